"""Which tokens may come next in one answer, from step to step. Knows no logits and no text."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from nucleate.text.structured.library import raise_unless_panic, told

FREE_SECONDS: Final = 0.005
"""What a mask may take at any time. Only what is more counts against the seconds of an answer."""

_NOTHING = "no text of this vocabulary can fulfil it from here on"


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
    def error(self) -> str | None:
        """Why the grammar cannot go on."""

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        """Write which tokens are allowed next: bit i % 32 of word i // 32 is token i, as ``Sampler`` takes it.

        Where all that can follow is one text, only its usual tokens are allowed. Not more than ``push`` takes.
        """

    def push(self, token_id: int) -> None:
        """Take a token. Raises ValueError, and stays as it was, if the grammar does not allow it."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens. Raises ValueError if there are not so many."""

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, as the tokenizer would write them; none if there is a choice, or at the end."""

    def copy(self) -> Matcher:
        """The same state, apart from this one from now on."""


@final
class GuidanceMatcher:
    """A Matcher by llguidance. ``inner`` is an LLMatcher of its own; ``ends_W`` the mask of the EOS ids.

    ``seconds`` are those that slow masks may take in all. ``goes_on``: EOS is allowed only where nothing else is.
    """

    __slots__ = ("_count", "_ended", "_ends", "_ends_W", "_error", "_goes_on", "_seconds", "inner")

    def __init__(
        self, inner: Any, ends: frozenset[int], ends_W: NDArray[np.int32], seconds: float, *, goes_on: bool = False
    ) -> None:
        self.inner = inner
        self._ends, self._ends_W = ends, ends_W
        self._seconds, self._goes_on = seconds, goes_on
        self._count = 0  # tokens the library counts
        self._ended = 0  # EOS ids after them, which it would count only sometimes
        self._error: str | None = None
        if inner.is_error():
            self._error = told(inner.get_error())

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def ended(self) -> bool:
        """Whether an EOS id was pushed."""
        return self._ended > 0

    @property
    def finished(self) -> bool:
        return self._error is None and (self._ended > 0 or bool(self._ask(self.inner.is_accepting)))

    @property
    def stopped(self) -> bool:
        return self._error is None and (self._ended > 0 or bool(self._ask(self.inner.is_stopped)))

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        check_masks(mask_W, self._ends_W.shape)
        self._check()
        if self._ended:
            mask_W[:] = self._ends_W
            return
        begin = perf_counter()
        self._ask(self.inner.unsafe_compute_mask_ptr, mask_W.ctypes.data, mask_W.nbytes)
        self._seconds -= max(0.0, perf_counter() - begin - FREE_SECONDS)
        self.settle(mask_W)
        self._check()

    def settle(self, mask_W: NDArray[np.int32]) -> None:
        """See what computing a mask has led to. After an error nothing is allowed; the library would allow EOS."""
        if self.inner.is_stopped() and self._error is None:
            if self.inner.is_error():
                self._error = _NOTHING if "NoExtension" in (why := self.inner.get_error()) else told(why)
            elif not self.inner.is_accepting():
                self._error = _NOTHING
        if self._seconds < 0 and self._error is None:
            self._error = "it is so ambiguous that its masks took too long"
        if self._error is not None:
            mask_W[:] = 0
        elif self._goes_on and (mask_W & ~self._ends_W).any():
            mask_W &= ~self._ends_W

    def push(self, token_id: int) -> None:
        self._check()
        if token_id in self._ends and (self._ended or self._ask(self.inner.is_accepting)):
            self._ended += 1
            return
        if token_id in self._ends and self._took_named(token_id):
            return
        known = 0 <= token_id < 32 * len(self._ends_W) and not self._ended
        if not known or self._ask(self.inner.try_consume_tokens, [token_id]) != 1:
            self._look()
            raise ValueError(f"token {token_id} is not allowed here")
        self._count += 1

    def _took_named(self, token_id: int) -> bool:
        """Take an EOS id that a grammar names within its text. It cannot be tried, so a copy goes ahead."""
        tried = self._ask(self.inner.deep_copy)
        if not self._ask(tried.consume_token, token_id):
            return False
        self.inner = tried
        self._count += 1
        return True

    def rollback(self, count: int) -> None:
        self._check()
        if not 0 <= count <= self._count + self._ended:
            raise ValueError(f"cannot take back {count} of {self._count + self._ended} tokens")
        ends = min(count, self._ended)
        if count > ends:
            self._ask(self.inner.rollback, count - ends)
            self._look()
        self._ended -= ends
        self._count -= count - ends

    def forced(self) -> tuple[int, ...]:
        self._check()
        if self._ended:
            return ()
        tokens = tuple(self._ask(self.inner.compute_ff_tokens))
        self._look()
        # A tokenizer may write the text differently on its own, so what it says is tried before it is believed.
        allowed = self._ask(self.inner.validate_tokens, list(tokens)) if tokens else 0
        return tokens[:allowed]

    def copy(self) -> GuidanceMatcher:
        return self.begun(goes_on=self._goes_on)

    def begun(self, *, goes_on: bool) -> GuidanceMatcher:
        """A copy that goes on after EOS where it can, or does not."""
        self._check()
        inner = self._ask(self.inner.deep_copy)
        made = GuidanceMatcher(inner, self._ends, self._ends_W, self._seconds, goes_on=goes_on)
        made._count, made._ended = self._count, self._ended
        return made

    def fail(self, error: BaseException) -> None:
        """Keep a panic of the library as this matcher's error; raise anything else again."""
        raise_unless_panic(error)
        self._error = "the grammar engine failed"

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            self.fail(error)
        raise MatcherError(self._error)

    def _check(self) -> None:
        if self._error is not None:
            raise MatcherError(self._error)

    def _look(self) -> None:
        """Raise if the last call has put the library's matcher in error."""
        if self.inner.is_error():
            self._error = told(self.inner.get_error())
            raise MatcherError(self._error)


def check_masks(masks: NDArray[np.int32], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless an array can be written to by address."""
    if not isinstance(masks, np.ndarray) or masks.dtype != np.int32 or masks.shape != shape:
        raise ValueError(f"masks must be an array of int32 with the shape {list(shape)}")
    if not masks.flags.carray:
        raise ValueError("masks must be contiguous and writeable")
