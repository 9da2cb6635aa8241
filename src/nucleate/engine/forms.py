"""The forms of text that an engine's requests ask for, and which tokens they allow in a step. Knows no model.

What it takes is made when the first request asks for it: nobody else waits for it, or needs its library.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Structured
from nucleate.core.values import shown
from nucleate.text.structured import Compiled, Grammars, Guide, Limits, form_of
from nucleate.text.structured.grammar import Engine
from nucleate.text.tokenizer import Tokenizer

ENGINES = get_args(Engine)


class Forms:
    """Of one vocabulary. ``seconds``: what masks took so far. Raises ParameterError for an engine that is none."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: Limits | None, engine: str = "guidance") -> None:
        if engine not in ENGINES:
            known = " or ".join(ENGINES)
            raise ParameterError("structured_engine", f"structured_engine must be {known}, got {shown(engine)}")
        self.seconds = 0.0
        self._make: Callable[[], Grammars] = partial(
            Grammars, tokenizer, vocab_size, limits=limits, engine=cast("Engine", engine)
        )
        self._made: Grammars | None = None
        self._lock = threading.Lock()
        self._masks_RW = np.empty((0, 0), np.int32)

    def form(self, structured: Structured | None) -> Compiled | None:
        """What a request asks for, compiled; on any thread. Raises ParameterError."""
        return form_of(structured, self._grammars)

    def mask(self, guides: Sequence[Guide | None]) -> NDArray[np.int32] | None:
        """The tokens that each of some answers may go on with [R, W]; None if all may go on with any."""
        if self._made is None or not any(guides):
            return None
        begin = perf_counter()
        if len(self._masks_RW) < len(guides):
            self._masks_RW = np.empty((len(guides), self._made.words), np.int32)
        masks_RW = self._masks_RW[: len(guides)]
        self._made.fill_all([None if guide is None else guide.matcher for guide in guides], masks_RW)
        for place, guide in enumerate(guides):
            if guide is not None and guide.error is not None:
                masks_RW[place] = 0
        self.seconds += perf_counter() - begin
        return masks_RW

    def _grammars(self) -> Grammars:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made
