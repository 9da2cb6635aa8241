"""Compiles constraints for one vocabulary, caches them, and fills the masks of many sequences."""

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
"""If the masks of a step take longer, the next step times each of them."""
CALLER_SECONDS: Final = 0.0005
"""Masks are filled on the calling thread for this long, because waking other threads may cost more."""
QUIET_STEPS: Final = 64
"""Steps without timing after a timed step in which no mask was slow."""


@final
class CompiledGrammar:
    """A constraint compiled for one vocabulary. ``ignored``: the skipped schema keywords with their places."""

    def __init__(
        self, spec: StructuredOutputs, ignored: tuple[str, ...], beginning: Beginning, words: int, size: int
    ) -> None:
        self.spec = spec
        self.ignored = ignored
        self.words = words
        """The length W of a mask in words of 32 tokens."""
        self.size = size
        """The approximate size in bytes."""
        self._beginning = beginning

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """Create the matcher of a new sequence, on any thread. ignore_eos: allow EOS only if nothing else follows."""
        return GrammarMatcher(self._beginning, continue_after_end=ignore_eos)

    def validate(self, text: str, seconds: float = MAX_SECONDS) -> list[str]:
        """Return the errors of a whole JSON text, also for ignored keywords; see ``validate``."""
        return validate(self.spec, text, seconds)


@final
class GrammarCompiler:
    """Compiles constraints for the vocabulary of one model. Thread-safe; creating one takes 1 s for 128k tokens.

    ``vocab_size`` is the length of the model's logits. Ids without a token, and tokens of more than 1024 bytes, which
    llguidance does not support (``left_out``), are never allowed. ``threads`` fill masks; None: 80 % of the processors.

    Raises ValueError for a tokenizer without EOS or without a fixed byte sequence per token; ModuleNotFoundError
    without llguidance.
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
        """Tokens that are never allowed because they are too long."""
        self.words = len(vocabulary.ends_W)
        """The length W of a mask in words of 32 tokens."""
        self._guidance = LLGuidanceEngine(vocabulary, self.limits, threads)
        self._each_timed = False  # fill masks one by one and charge each to its budget
        self._quiet = 0  # steps left without timing
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._size = 0
        self._in_progress: dict[StructuredOutputs, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Compile a constraint, in milliseconds, or up to a second near the limits: not for event loops.

        If another thread is compiling the same constraint, this waits for it. Raises ParameterError.
        """
        with self._lock:
            cached = self._cache.get(spec)
            if cached is not None:
                self._cache.move_to_end(spec)
                return cached
            waiting = self._in_progress.get(spec)
            if waiting is None:
                mine: Future[CompiledGrammar] = Future()
                self._in_progress[spec] = mine
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
                del self._in_progress[spec]
                if mine.exception() is None:
                    self._store(mine.result())

    @property
    def together(self) -> bool:
        """Whether the next masks are filled together: false if one of the last was slow."""
        return not self._each_timed

    def fill_all(
        self, matchers: Sequence[GrammarMatcher | None], masks_RW: NDArray[np.int32], *, beside: bool = False
    ) -> None:
        """Fill one mask per row, in parallel and without the GIL. A row of None is unconstrained.

        beside: other work is running and should not be delayed.

        A matcher that fails gets an empty mask and sets its ``error``; other rows are not affected. Raises ValueError
        for an array of another shape, and for a matcher in two rows.
        """
        check_masks(masks_RW, (len(matchers), self.words))
        present = [each for each in matchers if each is not None]
        if len(set(map(id, present))) < len(present):
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
            done, slow = self._guidance.fill_here(going, rows, masks_RW, inf if self._each_timed else CALLER_SECONDS)
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
            self._try(GrammarMatcher(beginning))  # fail now if no text is possible, and warm the lexer
        except (MatcherError, ValueError) as error:
            raise ParameterError(spec.kind, f"{spec.kind}: {error}") from None
        beginning.budget = TimeBudget(self.limits.seconds)  # compilation is not charged to sequences
        return CompiledGrammar(spec, ignored, beginning, self.words, size)

    def _try(self, first: GrammarMatcher) -> None:
        """Fill the first mask, and accept its token if there is only one: only that detects endless text."""
        mask_W = np.empty(self.words, np.int32)
        first.fill(mask_W)
        bits = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if len(bits) == 1:
            first.push(int(bits[0]))

    def _store(self, made: CompiledGrammar) -> None:
        self._cache[made.spec] = made
        self._size += made.size
        while self._size > self._cache_bytes and self._cache:
            self._size -= self._cache.popitem(last=False)[1].size


def fill_or_forbid(each: GrammarMatcher, mask_W: NDArray[np.int32]) -> None:
    """Fill a mask; after an error, allow no token."""
    try:
        each.fill(mask_W)
    except MatcherError:
        mask_W[:] = 0
