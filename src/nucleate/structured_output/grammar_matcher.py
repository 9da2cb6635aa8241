"""Which tokens may come next in one answer under a grammar, by the library llguidance.

The states of its lexer are shared by all answers of a form, see ``beginning``; where they are used up, an answer takes
its tokens once more from a new beginning, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.llguidance_loader import FAILED, raise_unless_panic, told
from nucleate.structured_output.state_cache import USED_UP, Beginning
from nucleate.structured_output.time_budget import FREE_SECONDS

NOTHING: Final = "no text of this vocabulary can fulfil it from here on"
TOO_SLOW: Final = "it is so ambiguous that its masks took too long"
RENEWED_EVERY: Final = 100
"""Tokens that an answer must have come on before its form begins anew for it once more."""


class MatcherError(RuntimeError):
    """A grammar cannot go on: it became too complex, no token of the vocabulary fits, or llguidance failed."""


@final
class GrammarMatcher:
    """The state of one answer under a grammar.

    An EOS id ends it where the grammar may end; from then on only EOS ids are allowed, and they count as tokens.
    An error stays: ``error`` tells it, and every call that would need the grammar raises MatcherError with it.

    ``inner`` is an LLMatcher, of this answer alone, and gets no EOS id that ends it. It is made anew from ``beginning``
    when the states that it shares are used up. ``goes_on``: EOS is allowed only where nothing else is. Any thread may
    make one. Raises MatcherError if llguidance fails.
    """

    __slots__ = (
        *("_beginning", "_ended", "_ends", "_ends_W", "_error", "_goes_on", "_number", "_renewable", "_slow"),
        *("_tokens", "budget", "inner"),
    )

    def __init__(self, beginning: Beginning, *, goes_on: bool = False) -> None:
        self._beginning, self.budget, self._goes_on = beginning, beginning.budget, goes_on
        self._ends, self._ends_W = beginning.ends, beginning.ends_W
        self._tokens: list[int] = []  # that ``inner`` has taken
        self._ended = 0  # EOS ids after them
        self._slow = False  # the last call
        self._renewable = 0  # once there are so many tokens
        first, self._number = beginning.now
        try:
            self.inner = first.deep_copy()
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise_unless_panic(error)
            raise MatcherError(FAILED) from None
        self._error = told(self.inner.get_error()) if self.inner.is_error() else None

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether an EOS id was pushed."""
        return self._ended > 0

    @property
    def finished(self) -> bool:
        """Whether the grammar may end here, or has ended: the text so far is a whole."""
        return self._error is None and (self._ended > 0 or self._may_end())

    @property
    def stopped(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self._error is None and (self._ended > 0 or bool(self._ask("is_stopped")))

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        """Write which tokens are allowed next: bit i % 32 of word i // 32 is token i, as ``Sampler`` takes it.

        Where all that can follow is one text, only its usual tokens are allowed. All of them can be pushed.
        """
        check_masks(mask_W, self._ends_W.shape)
        if self._ended:
            self._check()
            mask_W[:] = self._ends_W
            return
        if self.fill_at(mask_W.ctypes.data, mask_W.nbytes):
            self.settle(mask_W)
        self._check()

    def fill_at(self, address: int, size: int) -> bool:
        """Write the mask to memory, of an answer that goes on. Whether ``settle`` is to see it."""
        self._check()
        self._ask("unsafe_compute_mask_ptr", address, size)
        return self.odd

    @property
    def odd(self) -> bool:
        """Whether there is more to a mask than what the library has written, or may be."""
        renewed = self._number != self._beginning.now[1]
        return self._goes_on or renewed or self._error is not None or self.inner.is_stopped()

    def settle(self, mask_W: NDArray[np.int32]) -> None:
        """See what computing a mask has led to. After an error nothing is allowed; the library would allow EOS."""
        if self._error is None and self.behind():
            try:
                self._ask("unsafe_compute_mask_ptr", mask_W.ctypes.data, mask_W.nbytes)
            except MatcherError:
                mask_W[:] = 0
        if self._error is None and self.inner.is_stopped():
            if self.inner.is_error():
                self._error = NOTHING if "NoExtension" in (why := self.inner.get_error()) else told(why)
            elif not self.inner.is_accepting():
                self._error = NOTHING
        if self._error is not None:
            mask_W[:] = 0
        elif self._goes_on and (mask_W & ~self._ends_W).any():
            mask_W &= ~self._ends_W

    def push(self, token_id: int) -> None:
        """Take a token. Raises ValueError, and stays as it was, if the grammar does not allow it."""
        self._check()
        if token_id in self._ends and (self._ended or self._may_end()):
            self._ended += 1
            return
        if self._ended or not self._take(token_id):
            raise ValueError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)

    def _may_end(self) -> bool:
        """Whether the grammar may end after the tokens so far."""
        return bool(self._ask("is_accepting"))

    def _take(self, token_id: int) -> bool:
        """Have the library take a token. False, and all stays as it was, if it does not."""
        if token_id in self._ends and self._took_named(token_id):
            return True
        known = 0 <= token_id < 32 * len(self._ends_W)
        if not known or self._ask("try_consume_tokens", [token_id]) != 1:
            self._look()
            return False
        return True

    def _took_named(self, token_id: int) -> bool:
        """Take an EOS id that a grammar names within its text. It cannot be tried, so a copy goes ahead."""
        tried, kept = self._ask("deep_copy"), self.inner
        self.inner = tried
        if not self._ask("consume_token", token_id):
            self.inner = kept
            return False
        return True

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, or the first of them; none if there is a choice, or at the end."""
        self._check()
        if self._ended:
            return ()
        tokens = tuple(self._ask("compute_ff_tokens"))
        self._look()
        # A tokenizer may write the text differently on its own, so what it says is tried before it is believed.
        allowed = self._ask("validate_tokens", list(tokens)) if tokens else 0
        return tokens[:allowed]

    def copy(self) -> GrammarMatcher:
        """The same state, apart from this one from now on."""
        self._check()
        inner = self._ask("deep_copy")
        made = GrammarMatcher.__new__(GrammarMatcher)
        state = {name: getattr(self, name) for name in self.__slots__}
        for name, value in {**state, "inner": inner, "_tokens": self._tokens.copy()}.items():
            setattr(made, name, value)
        return made

    def behind(self) -> bool:
        """Whether there is a newer beginning, after this one's states or another's that shares them are used up."""
        beginning = self._beginning
        if self._number == beginning.now[1] and self.inner.is_error() and USED_UP in self.inner.get_error():
            self._timed(beginning.after, self._number)
            if len(self._tokens) < self._renewable:
                self._look()
            self._renewable = len(self._tokens) + RENEWED_EVERY
        return self._number != beginning.now[1]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What the library's matcher says to a call; a second time if its states are used up."""
        beginning = self._beginning
        if self._number != beginning.now[1]:
            self._renew()
        said = self._timed(getattr(self.inner, name), *arguments)
        if (self._number == beginning.now[1] and not self.inner.is_error()) or not self.behind():
            return said
        self._renew()
        return self._timed(getattr(self.inner, name), *arguments)

    def _renew(self) -> None:
        """Take the tokens so far once more, from the newest beginning."""
        first, self._number = self._beginning.now
        self.inner = self._timed(first.deep_copy)
        self._timed(self.inner.consume_tokens, self._tokens)
        self._look()

    def _look(self) -> None:
        """Raise if the last call has put the library's matcher in error."""
        if self.inner.is_error():
            self._error = told(self.inner.get_error())
            raise MatcherError(self._error)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the library says to a call."""
        begin = perf_counter()
        try:
            return call(*arguments)
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise_unless_panic(error)
            self._error = FAILED
        finally:
            self._slow = perf_counter() - begin > FREE_SECONDS and self.budget.charge(begin)
            if self._slow and self.budget.empty and self._error is None:
                self._error = TOO_SLOW
        raise MatcherError(self._error)

    def _check(self) -> None:
        if self._slow and self.budget.empty and self._error is None:
            self._error = TOO_SLOW
        if self._error is not None:
            raise MatcherError(self._error)


def check_masks(masks: NDArray[np.int32], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless an array can be written to by address."""
    if not isinstance(masks, np.ndarray) or masks.dtype != np.int32 or masks.shape != shape:
        raise ValueError(f"masks must be an array of int32 with the shape {list(shape)}")
    if not masks.flags.carray:
        raise ValueError("masks must be contiguous and writeable")
