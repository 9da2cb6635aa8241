"""``GrammarCompiler``: compiles constraints for one vocabulary, caches them, and fills the masks of a batch."""

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
from nucleate.structured_output.grammar_matcher import (
    GrammarMatcher,
    InitialMatcher,
    MatcherError,
    TimeBudget,
    check_masks,
    mark_cpu_time,
)
from nucleate.structured_output.llguidance_engine import LLGuidanceEngine
from nucleate.structured_output.llguidance_library import Vocabulary
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.structured_output.validation import MAX_SECONDS, unchecked_formats, validate
from nucleate.tokenization.tokenizer import Tokenizer

CACHE_BYTES: Final = 64 * 2**20
SLOW_STEP_SECONDS: Final = 0.02
"""If the masks of a step take longer, the next step measures the time of each mask."""
CALLER_THREAD_SECONDS: Final = 0.0005
"""Masks are filled on the calling thread for so long before other threads are used: waking those may cost more."""
UNTIMED_STEPS: Final = 64
"""Steps without time measurement after a measured step in which no mask was slow."""


@final
class CompiledGrammar:
    """A constraint compiled for one vocabulary.

    ignored: the schema keywords that are not enforced, and their places. unknown: words that are not keywords but look
    like misspelled ones.
    """

    def __init__(
        self,
        spec: StructuredOutputs,
        ignored: tuple[str, ...],
        unknown: tuple[str, ...],
        initial: InitialMatcher,
        num_words: int,
        num_bytes: int,
    ) -> None:
        self.spec = spec
        self.ignored, self.unknown = ignored, unknown
        self.unchecked = () if not ignored else ignored if spec.structural_tag else unchecked_formats(spec.schema)
        """What neither masks nor ``validate`` check: formats, or the ignored keywords of a structural tag."""
        self.num_words = num_words
        """Length W of a bitmask, in words of 32 tokens."""
        self.num_bytes = num_bytes
        """Approximate memory in bytes."""
        self._initial = initial

    def matcher(self, *, ignore_eos: bool = False) -> GrammarMatcher:
        """Create the matcher of a new sequence, on any thread. ignore_eos: allow EOS only if nothing else follows."""
        return GrammarMatcher(self._initial, ignore_eos=ignore_eos)

    def validate(self, text: str, seconds: float = MAX_SECONDS) -> list[str]:
        """Validate a JSON text against the whole schema, ignored keywords included; see ``validate``.

        Returns no errors for a structural tag, whose sections are not validated.
        """
        return [] if self.spec.structural_tag else validate(self.spec, text, seconds)


@final
class GrammarCompiler:
    """Compiles constraints for the vocabulary of one model. Thread-safe; creating one takes 1 s for 128k tokens.

    vocab_size: the length of the model's logits. Ids without a token and tokens of more than 1024 bytes, which
    llguidance does not support (``excluded_ids``), are never allowed. threads: number of threads that fill masks; None:
    80 % of the processors. whitespace: in JSON, for constraints that do not select it ("flexible" or "none").

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
        whitespace: Whitespace = "flexible",
    ) -> None:
        self.limits = limits or GrammarLimits()
        vocabulary = Vocabulary(tokenizer, vocab_size)
        self.excluded_ids = vocabulary.excluded_ids
        """Ids of tokens that are never allowed because they are too long."""
        self.num_words = len(vocabulary.eos_mask_W)
        """Length W of a bitmask, in words of 32 tokens."""
        self._engine = LLGuidanceEngine(vocabulary, self.limits, threads, whitespace)
        self._time_each = False  # fill masks one by one and charge each to its budget
        self._untimed_left = 0  # steps left without time measurement
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()
        self._cached_bytes = 0
        self._in_progress: dict[StructuredOutputs, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()

    def compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        """Compile a constraint. Takes milliseconds, or up to a second near the limits: do not call on an event loop.

        If another thread is compiling the same constraint, this waits for it. Raises ParameterError.
        """
        with self._lock:
            cached = self._cache.get(spec)
            if cached is not None:
                self._cache.move_to_end(spec)
                return cached
            pending = self._in_progress.get(spec)
            if pending is None:
                own_future: Future[CompiledGrammar] = Future()
                self._in_progress[spec] = own_future
        if pending is not None:
            return pending.result()
        try:
            compiled = self._compile(spec)
        except BaseException as error:
            own_future.set_exception(error)
            raise
        else:
            own_future.set_result(compiled)
            return compiled
        finally:
            with self._lock:
                del self._in_progress[spec]
                if own_future.exception() is None:
                    self._store(own_future.result())

    @property
    def parallel(self) -> bool:
        """Whether the next masks are filled in parallel: False after a slow mask."""
        return not self._time_each

    def fill_all(
        self, matchers: Sequence[GrammarMatcher | None], masks_RW: NDArray[np.int32], *, overlapped: bool = False
    ) -> None:
        """Fill one bitmask per row, in parallel and without the GIL. None: an unconstrained row (all bits set).

        overlapped: this runs during a forward pass, which it should not delay.

        A matcher that fails gets an empty mask and sets its ``error``; other rows are not affected. Raises ValueError
        for an array of another shape, and for a matcher in two rows.
        """
        check_masks(masks_RW, (len(matchers), self.num_words))
        constrained = [matcher for matcher in matchers if matcher is not None]
        if len(set(map(id, constrained))) < len(constrained):
            raise ValueError("a matcher can be in one row only")
        mark_cpu_time()
        active: list[GrammarMatcher] = []
        rows: list[int] = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                masks_RW[row] = -1
            elif matcher.error is None and not matcher.eos_accepted:
                active.append(matcher)
                rows.append(row)
            else:
                fill_or_clear(matcher, masks_RW[row])
        begin = perf_counter()
        done, slow = 0, False
        if self._time_each or not overlapped:
            done, slow = self._engine.fill_on_caller(
                active, rows, masks_RW, inf if self._time_each else CALLER_THREAD_SECONDS
            )
        if done == len(active):
            self._time_each = slow
            if not slow:
                self._untimed_left = UNTIMED_STEPS
        elif self._engine.fill_all(active[done:], rows[done:], masks_RW):
            self._untimed_left -= 1
            self._time_each = self._untimed_left < 0 and perf_counter() - begin > SLOW_STEP_SECONDS
        else:
            for matcher, row in zip(active[done:], rows[done:], strict=True):
                fill_or_clear(matcher, masks_RW[row])

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        initial, ignored, unknown, num_bytes = self._engine.compile(spec)
        try:
            self._test_first_mask(GrammarMatcher(initial))  # fail now if no text is possible, and warm the lexer
        except (MatcherError, ValueError) as error:
            raise ParameterError(spec.kind, f"{spec.kind}: {error}") from None
        initial.budget = TimeBudget(self.limits.mask_budget_seconds)  # compilation is not charged to sequences
        return CompiledGrammar(spec, ignored, unknown, initial, self.num_words, num_bytes)

    def _test_first_mask(self, first: GrammarMatcher) -> None:
        """Fill the first mask, and accept its token if it is the only one, to detect grammars without finite text."""
        mask_W = np.empty(self.num_words, np.int32)
        first.fill_bitmask(mask_W)
        bits = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
        if len(bits) == 1:
            first.accept_token(int(bits[0]))

    def _store(self, compiled: CompiledGrammar) -> None:
        self._cache[compiled.spec] = compiled
        self._cached_bytes += compiled.num_bytes
        while self._cached_bytes > self._cache_bytes and self._cache:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes


def fill_or_clear(matcher: GrammarMatcher, mask_W: NDArray[np.int32]) -> None:
    """Fill a bitmask; after an error, allow no token."""
    try:
        matcher.fill_bitmask(mask_W)
    except MatcherError:
        mask_W[:] = 0
