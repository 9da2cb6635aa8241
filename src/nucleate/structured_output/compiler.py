"""Forms compiled for one vocabulary, kept for who asks again, and masks for many answers at once. Knows no model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from math import inf
from time import perf_counter
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import GrammarMatcher, MatcherError, check_masks
from nucleate.structured_output.llguidance_engine import LLGuidanceEngine
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.state_cache import Beginning
from nucleate.structured_output.time_budget import TimeBudget, mark
from nucleate.structured_output.validation import MAX_SECONDS, validate
from nucleate.structured_output.vocabulary import Vocabulary
from nucleate.tokenization.tokenizer import Tokenizer

CACHE_BYTES: Final = 64 * 2**20
SLOW_SECONDS: Final = 0.02
"""If the masks of a step take longer, each is timed in the next one."""
ALONE_SECONDS: Final = 0.0005
"""For so long masks are filled on the calling thread: to wake others can cost more than what they would take over."""
QUIET_STEPS: Final = 64
"""After a step in which each was timed and none was slow."""


@final
class CompiledGrammar:
    """A form, ready for one vocabulary. ``ignored``: what the policy does not hold, keyword and place."""

    def __init__(
        self, spec: StructuredOutputs, ignored: tuple[str, ...], beginning: Beginning, words: int, size: int
    ) -> None:
        self.spec = spec
        self.ignored = ignored
        self.words = words
        """W, the length of a mask."""
        self.size = size
        """About how many bytes this takes."""
        self._beginning = beginning

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """The state of a new answer. Microseconds; from any thread. ignore_eos: EOS only where nothing else can be."""
        return GrammarMatcher(self._beginning, goes_on=ignore_eos)

    def validate(self, text: str, seconds: float = MAX_SECONDS) -> list[str]:
        """What is wrong with a whole text of JSON, held or ignored; see ``validate``."""
        return validate(self.spec, text, seconds)


@final
class GrammarCompiler:
    """All forms over the vocabulary of one model. Thread safe; made once, since it takes a second for 128k tokens.

    ``vocab_size`` is the length of the model's logits; ids that are no token are never allowed, nor are those of more
    than 1024 bytes, which llguidance cannot hold (``left_out``). ``threads`` fill masks; None: 80 % of the processors.

    Raises ValueError for a tokenizer without EOS, or whose tokens have no bytes of their own; ModuleNotFoundError,
    which says what to install, without llguidance.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        limits: GrammarLimits | None = None,
        cache_bytes: int = CACHE_BYTES,
        threads: int | None = None,
    ) -> None:
        self.limits = limits or GrammarLimits()
        vocabulary = Vocabulary(tokenizer, vocab_size)
        self.left_out = vocabulary.left_out
        """Ids of tokens that are never allowed because they are too long."""
        self.words = len(vocabulary.ends_W)
        """W, the length of a mask."""
        self._guidance = LLGuidanceEngine(vocabulary, self.limits, threads)
        self._each_timed = False  # masks are filled one by one, so that each pays for its own
        self._quiet = 0  # for so many steps they are filled together however long it takes
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._size = 0
        self._under_way: dict[StructuredOutputs, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Ready to use; milliseconds, or up to a second for what is just within the limits: not for an event loop.

        Who asks for what another thread is compiling waits for that. Raises ParameterError, which names the field.
        """
        with self._lock:
            kept = self._kept.get(spec)
            if kept is not None:
                self._kept.move_to_end(spec)
                return kept
            waiting = self._under_way.get(spec)
            if waiting is None:
                mine: Future[CompiledGrammar] = Future()
                self._under_way[spec] = mine
        if waiting is not None:
            return waiting.result()
        try:
            made = self._compile(spec)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(made)
            return made
        finally:
            with self._lock:
                del self._under_way[spec]
                if mine.exception() is None:
                    self._keep(mine.result())

    @property
    def together(self) -> bool:
        """Whether the next masks are filled together: not if one of the last was slow."""
        return not self._each_timed

    def fill_all(
        self, matchers: Sequence[GrammarMatcher | None], masks_RW: NDArray[np.int32], *, beside: bool = False
    ) -> None:
        """``fill`` for a row each, in parallel and without Python's lock. A row of None is not restricted.

        beside: other work is going on, which is to be held up as little as can be.

        A matcher in error, or that comes into it, gets a row in which nothing is allowed, and tells by ``error``; no
        row harms another. Raises ValueError for an array of another shape, or if a matcher is there twice.
        """
        check_masks(masks_RW, (len(matchers), self.words))
        held = [each for each in matchers if each is not None]
        if len(set(map(id, held))) < len(held):
            raise ValueError("a matcher can be in one row only")
        mark()
        going: list[GrammarMatcher] = []
        rows: list[int] = []
        for row, each in enumerate(matchers):
            if each is None:
                masks_RW[row] = -1
            elif each.error is None and not each.ended:
                going.append(each)
                rows.append(row)
            else:
                fill_or_forbid(each, masks_RW[row])
        begin = perf_counter()
        done, slow = 0, False
        if self._each_timed or not beside:
            done, slow = self._guidance.fill_here(going, rows, masks_RW, inf if self._each_timed else ALONE_SECONDS)
        if done == len(going):
            self._each_timed = slow
            if not slow:
                self._quiet = QUIET_STEPS
        elif self._guidance.fill_all(going[done:], rows[done:], masks_RW):
            self._quiet -= 1
            self._each_timed = self._quiet < 0 and perf_counter() - begin > SLOW_SECONDS
        else:
            for each, row in zip(going[done:], rows[done:], strict=True):
                fill_or_forbid(each, masks_RW[row])

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        beginning, ignored, size = self._guidance.compile(spec)
        try:
            self._try(GrammarMatcher(beginning))  # what cannot even begin is told now, and answers begin warm
        except (MatcherError, ValueError) as error:
            raise ParameterError(spec.kind, f"{spec.kind}: {error}") from None
        beginning.budget = TimeBudget(self.limits.seconds)  # no answer pays for that
        return CompiledGrammar(spec, ignored, beginning, self.words, size)

    def _try(self, first: GrammarMatcher) -> None:
        """Fill the first mask, and where it leaves no choice take the token: text without an end shows only then."""
        mask_W = np.empty(self.words, np.int32)
        first.fill(mask_W)
        bits = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if len(bits) == 1:
            first.push(int(bits[0]))

    def _keep(self, made: CompiledGrammar) -> None:
        self._kept[made.spec] = made
        self._size += made.size
        while self._size > self._cache_bytes and self._kept:
            self._size -= self._kept.popitem(last=False)[1].size


def fill_or_forbid(each: GrammarMatcher, mask_W: NDArray[np.int32]) -> None:
    """Fill a mask; after an error nothing is allowed."""
    try:
        each.fill(mask_W)
    except MatcherError:
        mask_W[:] = 0
