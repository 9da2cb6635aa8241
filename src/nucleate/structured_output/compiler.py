"""``GrammarCompiler`` and ``GrammarManager``: compiled constraints of one vocabulary, and the masks of a batch.

The compiler compiles constraints, caches them, and fills masks. The manager of an engine creates it, and with it loads
llguidance, with the first constrained request; it fills the masks of each step, also during the forward pass.
"""

from __future__ import annotations

import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from math import inf
from time import perf_counter
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import (
    GrammarMatcher,
    MatcherError,
    TimeBudget,
    check_masks,
    mark_cpu_time,
)
from nucleate.structured_output.guide import CompiledGrammar, Guide, load_validator
from nucleate.structured_output.llguidance_engine import LLGuidanceEngine
from nucleate.structured_output.llguidance_library import Vocabulary
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.tokenization.tokenizer import Tokenizer

CACHE_BYTES: Final = 64 * 2**20
SLOW_STEP_SECONDS: Final = 0.02
"""If the masks of a step take longer, the next step measures the time of each mask."""
CALLER_THREAD_SECONDS: Final = 0.0005
"""Masks are filled on the calling thread for so long before other threads are used: waking those may cost more."""
UNTIMED_STEPS: Final = 64
"""Steps without time measurement after a measured step in which no mask was slow."""


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
            future = self._in_progress.setdefault(spec, Future())
        if pending is None:
            try:
                future.set_result(self._compile(spec))
            except BaseException as error:  # noqa: BLE001 - it is raised below, also in the threads that wait
                future.set_exception(error)
            with self._lock:
                del self._in_progress[spec]
                if future.exception() is None:
                    self._store(future.result())
        return future.result()

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
        initial, ignored, unknown, length = self._engine.compile(spec)
        try:
            self._test_first_mask(GrammarMatcher(initial))  # fail now if no text is possible, and warm the lexer
        except (MatcherError, ValueError) as error:
            raise ParameterError(spec.kind, f"{spec.kind}: {error}") from None
        initial.budget = TimeBudget(self.limits.mask_budget_seconds)  # compilation is not charged to sequences
        return CompiledGrammar(spec, ignored, unknown, initial, self.num_words, 2**16 + 64 * length)

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


def compile_grammar(
    spec: StructuredOutputs | None, get_compiler: Callable[[], GrammarCompiler]
) -> CompiledGrammar | None:
    """Compile the constraint of a request, if any. Raises ParameterError, also if the model does not support it."""
    if spec is None:
        return None
    try:
        compiler = get_compiler()
    except (ModuleNotFoundError, ValueError) as error:
        raise ParameterError("structured_outputs", str(error)) from None
    try:
        grammar = compiler.compile(spec)
    except RecursionError:
        raise ParameterError("structured_outputs", "structured_outputs is nested too deeply") from None
    if grammar.ignored:
        try:
            load_validator()  # now, so that a missing package is an error of the request
        except ModuleNotFoundError as error:
            raise ParameterError("structured_outputs", str(error)) from None
    return grammar


OVERLAP_SECONDS = 0.0005
"""If the masks of a step take longer, those of the next step are filled on another thread during the forward pass."""


class GrammarManager:
    """Constraints and masks of one engine. ``seconds``: total time spent waiting for masks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        limits: GrammarLimits | None,
        whitespace: Whitespace = "flexible",
    ) -> None:
        self.seconds = 0.0
        self.is_slow = False  #: whether the last masks took so long that it pays to prefetch the next ones
        self._create: Callable[[], GrammarCompiler] = partial(
            GrammarCompiler, tokenizer, vocab_size, limits=limits, whitespace=whitespace
        )
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._masks_RW = np.empty((0, 0), np.int32)
        self._thread = ThreadPoolExecutor(1, "nucleate-masks")
        self._prefetch: _Prefetch | None = None

    def compile(self, spec: StructuredOutputs | None) -> CompiledGrammar | None:
        """Compile the constraint of a request, on any thread. Raises ParameterError."""
        return compile_grammar(spec, self._get_compiler)

    def prefetch(self, guides: Sequence[Guide | None]) -> None:
        """Start filling the masks of these sequences during a forward pass."""
        if self._prefetch is not None:  # unused
            wait([self._prefetch.future])
            self._prefetch = None
        if any(guides):
            self._prefetch = _Prefetch(guides, self._thread.submit(self._fill, guides, overlapped=True))

    def mask(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the bitmasks [R, W] of the next tokens; None if no sequence is constrained."""
        if self._compiler is None or not any(guides):
            return None  # prefetched masks are of other sequences
        prefetch, self._prefetch = self._prefetch, None
        mark_cpu_time()  # for the calls after this one: masks may be filled on another thread
        begin = perf_counter()
        masks_RW = None if prefetch is None else prefetch.masks(guides)
        if masks_RW is None:
            masks_RW = self._fill(guides)
        for row, guide in enumerate(guides):
            if guide is not None and guide.error is not None:
                masks_RW[row] = 0
        self.seconds += perf_counter() - begin
        return masks_RW

    def _fill(self, guides: Sequence[Guide | None], *, overlapped: bool = False) -> NDArray[np.int32]:
        begin, compiler = perf_counter(), self._get_compiler()
        if len(self._masks_RW) < len(guides):
            self._masks_RW = np.empty((len(guides), compiler.num_words), np.int32)
        masks_RW = self._masks_RW[: len(guides)]
        matchers = [None if guide is None else guide.matcher for guide in guides]
        compiler.fill_all(matchers, masks_RW, overlapped=overlapped)
        self.is_slow = compiler.parallel and perf_counter() - begin > OVERLAP_SECONDS
        return masks_RW

    def _get_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler = self._create()
            return self._compiler


class _Prefetch(NamedTuple):
    """Masks that are being filled on another thread."""

    guides: Sequence[Guide | None]
    future: Future[NDArray[np.int32]]

    def masks(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the masks of these sequences, a subset of the prefetched ones; None if one is missing."""
        masks_RW = self.future.result()
        if len(guides) == len(self.guides) and all(map(operator.is_, guides, self.guides)):
            return masks_RW
        row_of = {id(guide): row for row, guide in enumerate(self.guides)}
        rows = [row_of.get(id(guide), -1) for guide in guides]
        return None if -1 in rows else masks_RW[rows]
