"""The matcher of one sequence: computes which tokens the grammar allows next, with llguidance.

All sequences of a constraint share lexer states, see ``state_cache``. When they are used up, a matcher replays its
tokens on a new initial matcher, and continues.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.llguidance_loader import FAILED, raise_unless_panic, short_message
from nucleate.structured_output.state_cache import USED_UP, Beginning
from nucleate.structured_output.time_budget import FREE_SECONDS

NOTHING: Final = "no token of the vocabulary can continue the output"
TOO_SLOW: Final = "the grammar is so ambiguous that its masks took too long"
RENEWED_EVERY: Final = 100
"""Minimum tokens of a sequence between two replacements of the initial matcher."""


class MatcherError(RuntimeError):
    """A sequence cannot continue: the grammar is too complex, no token is allowed, or llguidance failed."""


@final
class GrammarMatcher:
    """The grammar state of one sequence.

    An EOS id ends it where the grammar may end; from then on only EOS ids are allowed, and they count as tokens. An
    error is permanent: it is in ``error``, and every call that needs the grammar raises MatcherError with it.

    ``inner`` is the LLMatcher of this sequence; it does not get the EOS id that ends the sequence. It is recreated from
    ``beginning`` when the shared lexer states are used up. ``continue_after_end``: EOS is allowed only if no other
    token is. Can be created on any thread. Raises MatcherError if llguidance fails.
    """

    __slots__ = (
        *(
            "_beginning",
            "_ended",
            "_ends",
            "_ends_W",
            "_error",
            "_continue_after_end",
            "_number",
            "_renewable",
            "_slow",
        ),
        *("_tokens", "budget", "inner"),
    )

    def __init__(self, beginning: Beginning, *, continue_after_end: bool = False) -> None:
        self._beginning, self.budget, self._continue_after_end = beginning, beginning.budget, continue_after_end
        self._ends, self._ends_W = beginning.ends, beginning.ends_W
        self._tokens: list[int] = []  # accepted by ``inner``
        self._ended = 0  # EOS ids after them
        self._slow = False  # whether the last call was slow
        self._renewable = 0  # minimum number of tokens for the next replacement
        first, self._number = beginning.now
        try:
            self.inner = first.deep_copy()
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise_unless_panic(error)
            raise MatcherError(FAILED) from None
        self._error = short_message(self.inner.get_error()) if self.inner.is_error() else None

    @property
    def error(self) -> str | None:
        """Why the sequence cannot continue, or None."""
        return self._error

    @property
    def ended(self) -> bool:
        """Whether EOS was accepted."""
        return self._ended > 0

    @property
    def finished(self) -> bool:
        """Whether the text so far is complete."""
        return self._error is None and (self._ended > 0 or self._may_end())

    @property
    def stopped(self) -> bool:
        """Whether only EOS can follow."""
        return self._error is None and (self._ended > 0 or bool(self._call("is_stopped")))

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        """Write which tokens are allowed next: bit i % 32 of word i // 32 is token i, as ``Sampler`` takes it.

        Where only one text can follow, only its usual tokens are allowed, and all of them are accepted.
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
        """Write the mask of a sequence that has not ended. Returns whether ``settle`` must be called."""
        self._check()
        self._call("unsafe_compute_mask_ptr", address, size)
        return self.needs_settling

    @property
    def needs_settling(self) -> bool:
        """Return whether a mask needs corrections after llguidance has written it."""
        renewed = self._number != self._beginning.now[1]
        return self._continue_after_end or renewed or self._error is not None or self.inner.is_stopped()

    def settle(self, mask_W: NDArray[np.int32]) -> None:
        """Check a computed mask. After an error no token is allowed; llguidance would allow EOS."""
        if self._error is None and self.behind():
            try:
                self._call("unsafe_compute_mask_ptr", mask_W.ctypes.data, mask_W.nbytes)
            except MatcherError:
                mask_W[:] = 0
        if self._error is None and self.inner.is_stopped():
            if self.inner.is_error():
                self._error = NOTHING if "NoExtension" in (why := self.inner.get_error()) else short_message(why)
            elif not self.inner.is_accepting():
                self._error = NOTHING
        if self._error is not None:
            mask_W[:] = 0
        elif self._continue_after_end and (mask_W & ~self._ends_W).any():
            mask_W &= ~self._ends_W

    def push(self, token_id: int) -> None:
        """Accept a token. Raises ValueError, without changes, if the grammar does not allow it."""
        self._check()
        if token_id in self._ends and (self._ended or self._may_end()):
            self._ended += 1
            return
        if self._ended or not self._take(token_id):
            raise ValueError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)

    def _may_end(self) -> bool:
        """Return whether the grammar may end here."""
        return bool(self._call("is_accepting"))

    def _take(self, token_id: int) -> bool:
        """Pass a token to llguidance. Returns False, without changes, if it is not allowed."""
        if token_id in self._ends and self._accept_named(token_id):
            return True
        known = 0 <= token_id < 32 * len(self._ends_W)
        if not known or self._call("try_consume_tokens", [token_id]) != 1:
            self._look()
            return False
        return True

    def _accept_named(self, token_id: int) -> bool:
        """Accept an EOS id that the grammar names as a token. llguidance cannot test it, so a copy does."""
        trial, previous = self._call("deep_copy"), self.inner
        self.inner = trial
        if not self._call("consume_token", token_id):
            self.inner = previous
            return False
        return True

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must follow, or the first ones; none if there is a choice, or at the end."""
        self._check()
        if self._ended:
            return ()
        tokens = tuple(self._call("compute_ff_tokens"))
        self._look()
        # The tokenizer may encode the text differently out of context, so the tokens are checked.
        allowed = self._call("validate_tokens", list(tokens)) if tokens else 0
        return tokens[:allowed]

    def copy(self) -> GrammarMatcher:
        """Return an independent copy."""
        self._check()
        inner = self._call("deep_copy")
        made = GrammarMatcher.__new__(GrammarMatcher)
        state = {name: getattr(self, name) for name in self.__slots__}
        for name, value in {**state, "inner": inner, "_tokens": self._tokens.copy()}.items():
            setattr(made, name, value)
        return made

    def behind(self) -> bool:
        """Return whether there is a newer initial matcher, because the shared lexer states are used up."""
        beginning = self._beginning
        if self._number == beginning.now[1] and self.inner.is_error() and USED_UP in self.inner.get_error():
            self._timed(beginning.after, self._number)
            if len(self._tokens) < self._renewable:
                self._look()
            self._renewable = len(self._tokens) + RENEWED_EVERY
        return self._number != beginning.now[1]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call llguidance's matcher; again on a new one, if the lexer states are used up."""
        beginning = self._beginning
        if self._number != beginning.now[1]:
            self._renew()
        result = self._timed(getattr(self.inner, name), *arguments)
        if (self._number == beginning.now[1] and not self.inner.is_error()) or not self.behind():
            return result
        self._renew()
        return self._timed(getattr(self.inner, name), *arguments)

    def _renew(self) -> None:
        """Replay the tokens on the newest initial matcher."""
        first, self._number = self._beginning.now
        self.inner = self._timed(first.deep_copy)
        self._timed(self.inner.consume_tokens, self._tokens)
        self._look()

    def _look(self) -> None:
        """Raise if the last call made llguidance's matcher fail."""
        if self.inner.is_error():
            self._error = short_message(self.inner.get_error())
            raise MatcherError(self._error)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call llguidance, and charge the time to the budget."""
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
    """Raise ValueError unless llguidance can write to the array."""
    if not isinstance(masks, np.ndarray) or masks.dtype != np.int32 or masks.shape != shape:
        raise ValueError(f"masks must be an array of int32 with the shape {list(shape)}")
    if not masks.flags.carray:
        raise ValueError("masks must be contiguous and writeable")
