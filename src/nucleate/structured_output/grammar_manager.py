"""Structured output of an engine: compiles the constraints of requests and fills the token masks of each step.

The compiler, and with it llguidance, is loaded with the first constrained request.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.compiler import CompiledGrammar, GrammarCompiler
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.guide import Guide, compile_grammar
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.tokenization.tokenizer import Tokenizer

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
        compiler.fill_all(
            [None if guide is None else guide.matcher for guide in guides], masks_RW, overlapped=overlapped
        )
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
