"""The forms of text that an engine's requests ask for, and which tokens they allow in a step. Knows no model.

What it takes is made when the first request asks for it: nobody else waits for it, or needs its library.
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

WORTH_SECONDS = 0.0005
"""If the masks of a step take longer, those of the next one are made while the model reads: to ask another thread for
them has its price."""


class GrammarManager:
    """Of one vocabulary. ``seconds``: what masks took so far."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: GrammarLimits | None) -> None:
        self.seconds = 0.0
        self._make: Callable[[], GrammarCompiler] = partial(GrammarCompiler, tokenizer, vocab_size, limits=limits)
        self._made: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._masks_RW = np.empty((0, 0), np.int32)
        self._thread = ThreadPoolExecutor(1, "nucleate-masks")
        self._ahead: _Ahead | None = None
        self._took = 0.0  # of the masks of the last step

    def form(self, spec: StructuredOutputs | None) -> CompiledGrammar | None:
        """What a request asks for, compiled; on any thread. Raises ParameterError."""
        return form_of(spec, self._grammars)

    def begin(self, guides: Sequence[Guide | None]) -> None:
        """A forward begins, and then masks of these answers are asked for: those that take long are made meanwhile."""
        if self._ahead is not None:  # nobody has come for them
            wait([self._ahead.made])
            self._ahead = None
        if self._took > WORTH_SECONDS and self._made is not None and self._made.together and any(guides):
            self._ahead = _Ahead(guides, self._thread.submit(self._fill, guides, beside=True))

    def mask(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """The tokens that each of some answers may go on with [R, W]; None if all may go on with any."""
        if self._made is None or not any(guides):
            return None  # as for a beam search beside answers of a form: what is made ahead is for those, or under way
        ahead, self._ahead = self._ahead, None
        begin = perf_counter()
        masks_RW = None if ahead is None else ahead.masks(guides)
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


class _Ahead(NamedTuple):
    """Masks that are being made."""

    guides: Sequence[Guide | None]
    made: Future[NDArray[np.int32]]

    def masks(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """Those of some of the answers, as a forward may have failed for others; None if there are more."""
        masks_RW = self.made.result()
        if len(guides) == len(self.guides) and all(map(operator.is_, guides, self.guides)):
            return masks_RW
        rows = {id(guide): row for row, guide in enumerate(self.guides)}
        places = [rows.get(id(guide), -1) for guide in guides]
        return None if -1 in places else masks_RW[places]
