"""Manages the structured output of an engine: compiles constraints, and fills the masks of each step.

The compiler, and so llguidance, is loaded with the first constrained request.
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

from nucleate.structured_output import CompiledGrammar, GrammarCompiler, GrammarLimits, Guide, form_of
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.tokenization.tokenizer import Tokenizer

OVERLAP_SECONDS = 0.0005
"""If the masks of a step take longer, those of the next step are filled during the forward pass, on another thread."""


class GrammarManager:
    """Constraints and masks of one engine. ``seconds``: the total time of masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits | None) -> None:
        self.seconds = 0.0
        self._make: Callable[[], GrammarCompiler] = partial(GrammarCompiler, tokenizer, vocab_size, limits=limits)
        self._made: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._masks_RW = np.empty((0, 0), np.int32)
        self._thread = ThreadPoolExecutor(1, "nucleate-masks")
        self._prefetch: _Prefetch | None = None
        self._took = 0.0  # time of the masks of the last step

    def form(self, spec: StructuredOutputs | None) -> CompiledGrammar | None:
        """Compile the constraint of a request, on any thread. Raises ParameterError."""
        return form_of(spec, self._grammars)

    def begin(self, guides: Sequence[Guide | None]) -> None:
        """Start to fill the masks of these sequences during a forward pass, if they are slow."""
        if self._prefetch is not None:  # unused
            wait([self._prefetch.made])
            self._prefetch = None
        if self._took > OVERLAP_SECONDS and self._made is not None and self._made.together and any(guides):
            self._prefetch = _Prefetch(guides, self._thread.submit(self._fill, guides, beside=True))

    def mask(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the masks [R, W] of the next tokens; None if no sequence is constrained."""
        if self._made is None or not any(guides):
            return None  # prefetched masks are for other sequences
        prefetch, self._prefetch = self._prefetch, None
        begin = perf_counter()
        masks_RW = None if prefetch is None else prefetch.masks(guides)
        if masks_RW is None:
            masks_RW = self._fill(guides)
        for place, guide in enumerate(guides):
            if guide is not None and guide.error is not None:
                masks_RW[place] = 0
        self.seconds += perf_counter() - begin
        return masks_RW

    def _fill(self, guides: Sequence[Guide | None], *, beside: bool = False) -> NDArray[np.int32]:
        begin, made = perf_counter(), self._grammars()
        if len(self._masks_RW) < len(guides):
            self._masks_RW = np.empty((len(guides), made.words), np.int32)
        masks_RW = self._masks_RW[: len(guides)]
        made.fill_all([None if guide is None else guide.matcher for guide in guides], masks_RW, beside=beside)
        self._took = perf_counter() - begin
        return masks_RW

    def _grammars(self) -> GrammarCompiler:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made


class _Prefetch(NamedTuple):
    """Masks that are being filled on another thread."""

    guides: Sequence[Guide | None]
    made: Future[NDArray[np.int32]]

    def masks(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Return the masks of these sequences, possibly fewer than expected; None if one is missing."""
        masks_RW = self.made.result()
        if len(guides) == len(self.guides) and all(map(operator.is_, guides, self.guides)):
            return masks_RW
        rows = {id(guide): row for row, guide in enumerate(self.guides)}
        places = [rows.get(id(guide), -1) for guide in guides]
        return None if -1 in places else masks_RW[places]
