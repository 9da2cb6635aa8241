"""Which tokens may come next in one answer, from step to step. Knows no logits, no text and no engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from time import monotonic, perf_counter, thread_time
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from nucleate.core.structured import Structured

FREE_SECONDS: Final = 0.005
"""What a call may take at any time. Only what is more counts."""
FILLED: Final = 0.1
"""Seconds by which a budget fills in a second."""
NOTHING: Final = "no text of this vocabulary can fulfil it from here on"
TOO_SLOW: Final = "it is so ambiguous that its masks took too long"
FAILED: Final = "the grammar engine failed"


class MatcherError(RuntimeError):
    """A grammar cannot go on: it became too complex, no token of the vocabulary fits, or the engine failed."""


class Matcher(Protocol):
    """The state of one answer under a grammar.

    An EOS id ends it where the grammar may end; from then on only EOS ids are allowed, and they count as tokens.
    An error stays: ``error`` tells it, and every call that would need the grammar raises MatcherError with it.
    """

    @property
    def finished(self) -> bool:
        """Whether the grammar may end here, or has ended: the text so far is a whole."""

    @property
    def stopped(self) -> bool:
        """Whether nothing but EOS can follow."""

    @property
    def ended(self) -> bool:
        """Whether an EOS id was pushed."""

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on."""

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        """Write which tokens are allowed next: bit i % 32 of word i // 32 is token i, as ``Sampler`` takes it.

        Where all that can follow is one text, an engine may allow its usual tokens only. All of them can be pushed.
        """

    def push(self, token_id: int) -> None:
        """Take a token. Raises ValueError, and stays as it was, if the grammar does not allow it."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens. Raises ValueError if there are not so many."""

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, or the first of them; none if there is a choice, or at the end."""

    def copy(self) -> Matcher:
        """The same state, apart from this one from now on."""


class FirstMatcher(Matcher, Protocol):
    """The begin of a text, of which others are copied. It is never moved, so that threads may copy it."""

    def begun(self, *, goes_on: bool) -> Matcher:
        """The state of a new answer. goes_on: EOS is allowed only where nothing else is."""


class GrammarEngine(Protocol):
    """A library that compiles grammars, over the vocabulary of one model."""

    def compile(self, structured: Structured) -> tuple[FirstMatcher, tuple[str, ...], int]:
        """What begins a text of a form, what its policy ignores, and about how many bytes it takes.

        Raises ParameterError, which names the field.
        """

    def fill_here(
        self, matchers: Sequence[Any], rows: Sequence[int], masks_RW: NDArray[np.int32], seconds: float
    ) -> tuple[int, bool]:
        """Fill rows for matchers of this engine that go on, on this thread, as long as it takes no more seconds.

        Returns how many, at least one and all but one, or all; and whether one took more than what is free.
        """

    def fill_all(self, matchers: Sequence[Any], rows: Sequence[int], masks_RW: NDArray[np.int32]) -> bool:
        """As ``fill_here``, all in parallel. False if it did not work out."""


class _Marks(threading.local):
    own = -np.inf  # seconds of this thread, when they were looked at last


_MARKS = _Marks()


def mark() -> None:
    """Look at the time of this thread: what follows is measured from here, which is cheaper than for each call."""
    _MARKS.own = thread_time()


def beyond_free(begin: float) -> float:
    """By how many seconds a call that began at this time of ``perf_counter`` took more than what is free.

    Of this thread, since an answer is not to pay for what else the machine does: no more than those since ``mark``.
    """
    wall = perf_counter() - begin
    if wall <= FREE_SECONDS:
        return 0.0
    before = _MARKS.own
    mark()
    return max(0.0, min(wall, _MARKS.own - before) - FREE_SECONDS)


@final
class Budget:
    """The seconds that all answers of one form may take beyond what is free. It fills again, slowly.

    Who is slow when it is empty ends; who is not does not mind.
    """

    __slots__ = ("_filled", "_left", "_lock", "most")

    def __init__(self, seconds: float) -> None:
        self.most = self._left = seconds
        self._filled = monotonic()
        self._lock = threading.Lock()

    @property
    def left(self) -> float:
        self._fill()
        return self._left

    @property
    def empty(self) -> bool:
        return self.left < 0

    def charge(self, begin: float) -> bool:
        """For a call that began at this time of ``perf_counter``. Whether it was slow."""
        more = beyond_free(begin)
        if more <= 0:
            return False
        self._fill()
        with self._lock:
            self._left -= more
        return True

    def _fill(self) -> None:
        with self._lock:
            now = monotonic()
            self._left = min(self.most, self._left + FILLED * (now - self._filled))
            self._filled = now


def fill_or_forbid(each: Matcher, mask_W: NDArray[np.int32]) -> None:
    """Fill a mask; after an error nothing is allowed."""
    try:
        each.fill(mask_W)
    except MatcherError:
        mask_W[:] = 0


def check_masks(masks: NDArray[np.int32], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless an array can be written to by address."""
    if not isinstance(masks, np.ndarray) or masks.dtype != np.int32 or masks.shape != shape:
        raise ValueError(f"masks must be an array of int32 with the shape {list(shape)}")
    if not masks.flags.carray:
        raise ValueError("masks must be contiguous and writeable")
