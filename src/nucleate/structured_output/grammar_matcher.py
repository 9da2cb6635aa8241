"""``GrammarMatcher``: the grammar state of one sequence, which computes the bitmask of allowed next tokens.

All sequences of a constraint share lexer states, which makes masks faster with use; but llguidance limits their total
number. When the limit is exceeded, one copy of the initial matcher gets an error, and others may compute wrong, empty
masks. All matchers then replay their tokens on a new initial matcher and continue. The sequences also share a budget of
CPU time for slow masks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, perf_counter, thread_time
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import changed_copy
from nucleate.structured_output.llguidance_library import (
    FAILED,
    DigitLimit,
    JsonPosition,
    raise_unless_panic,
    short_message,
)

FREE_SECONDS: Final = 0.005
"""Time of a call that is not charged."""
REFILL_RATE: Final = 0.1
"""Seconds added to a budget per second."""


class _CpuTime(threading.local):
    marked = -np.inf  # CPU seconds of this thread at the last mark


_CPU_TIME = _CpuTime()


def mark_cpu_time() -> None:
    """Record the CPU time of this thread. Called once per batch of calls, which is cheaper than for each call."""
    _CPU_TIME.marked = thread_time()


def chargeable_seconds(begin: float) -> float:
    """Return the seconds by which a call that began at ``begin`` (``perf_counter``) exceeded FREE_SECONDS.

    At most the CPU time of this thread since ``mark_cpu_time`` counts, so that the load of the machine is not charged.
    """
    wall = perf_counter() - begin
    if wall <= FREE_SECONDS:
        return 0.0
    marked = _CPU_TIME.marked
    mark_cpu_time()
    return max(0.0, min(wall, _CPU_TIME.marked - marked) - FREE_SECONDS)


@final
class TimeBudget:
    """A token bucket of seconds: the time that all sequences of a constraint may take beyond FREE_SECONDS per call.

    When it is empty, slow sequences end with an error; fast ones are not affected.
    """

    def __init__(self, seconds: float) -> None:
        self.capacity = self._remaining = seconds
        self._refilled_at = monotonic()
        self._lock = threading.Lock()

    @property
    def remaining(self) -> float:
        self._refill()
        return self._remaining

    @property
    def empty(self) -> bool:
        return self.remaining < 0

    def charge(self, begin: float) -> bool:
        """Charge a call that began at ``begin`` (``perf_counter``). Returns whether it was slow."""
        seconds = chargeable_seconds(begin)
        if seconds <= 0:
            return False
        self._refill()
        with self._lock:
            self._remaining -= seconds
        return True

    def _refill(self) -> None:
        with self._lock:
            now = monotonic()
            self._remaining = min(self.capacity, self._remaining + REFILL_RATE * (now - self._refilled_at))
            self._refilled_at = now


STATES_EXHAUSTED = "too many states"
POISONED = "PoisonError"
"""In the errors of all copies after llguidance failed in one of them."""


@final
class InitialMatcher:
    """The state shared by all sequences of a constraint. ``current``: the initial LLMatcher and its generation number.

    create: creates an initial LLMatcher. ``eos_mask_W`` is the bitmask of ``eos_ids``. ``budget`` limits slow calls.
    ``digit_limit`` limits the digits of numbers in JSON.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        eos_ids: frozenset[int],
        eos_mask_W: NDArray[np.int32],
        budget: TimeBudget,
        digit_limit: DigitLimit | None = None,
    ) -> None:
        self.current: tuple[Any, int] = create(), 0
        self.eos_ids, self.eos_mask_W, self.budget = eos_ids, eos_mask_W, budget
        self.digit_limit = digit_limit
        self._create = create
        self._lock = threading.Lock()

    def replace(self, generation: int) -> None:
        """Replace the initial matcher of this generation, unless another thread has done so already."""
        with self._lock:
            if self.current[1] == generation:
                self.current = self._create(), generation + 1


DEAD_END: Final = "no token of the vocabulary can continue the output"
TOO_SLOW: Final = "the grammar is so ambiguous that its masks took too long"
MIN_TOKENS_BETWEEN_RENEWALS: Final = 100
"""Minimum number of tokens of a sequence between two renewals of its initial matcher."""


class MatcherError(RuntimeError):
    """A sequence cannot continue: the grammar is too complex, no token is allowed, or llguidance failed."""


@final
class GrammarMatcher:
    """The grammar state of one sequence.

    An EOS token is accepted where the grammar may end. After it, only EOS tokens are allowed. An error is permanent:
    ``error`` has the message, and every call that needs the grammar raises MatcherError with it.

    ``ll_matcher`` is the LLMatcher of this sequence. It does not receive the EOS token that ends the sequence, and is
    recreated from ``initial`` when the shared lexer states are exhausted. ignore_eos: EOS is allowed only if no other
    token is. A matcher can be created on any thread. Raises MatcherError if llguidance fails.
    """

    def __init__(self, initial: InitialMatcher, *, ignore_eos: bool = False) -> None:
        self._initial, self.budget, self._ignore_eos = initial, initial.budget, ignore_eos
        self._eos_ids, self._eos_mask_W = initial.eos_ids, initial.eos_mask_W
        self._digit_limit, self._position = initial.digit_limit, JsonPosition()
        self._tokens: list[int] = []  # accepted by ``ll_matcher``
        self._num_eos = 0  # number of EOS tokens after them
        self._slow = False  # whether the last call was slow
        self._next_renewal = 0  # minimum number of tokens for the next renewal
        first, self._generation = initial.current
        try:
            self.ll_matcher = first.deep_copy()
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise_unless_panic(error)
            raise MatcherError(FAILED) from None
        self._error = short_message(self.ll_matcher.get_error()) if self.ll_matcher.is_error() else None

    @property
    def error(self) -> str | None:
        """Why the sequence cannot continue, or None."""
        return self._error

    @property
    def eos_accepted(self) -> bool:
        """Whether EOS was accepted."""
        return self._num_eos > 0

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete."""
        return self._error is None and (self._num_eos > 0 or self._is_accepting())

    @property
    def terminated(self) -> bool:
        """Whether only EOS can follow."""
        return self._error is None and (self._num_eos > 0 or bool(self._call("is_stopped")))

    def fill_bitmask(self, mask_W: NDArray[np.int32]) -> None:
        """Write the bitmask of the allowed next tokens: token i is bit i % 32 of word i // 32, as in ``Sampler``.

        Where only one text can follow, the mask allows only its usual tokenization; the grammar accepts these tokens.
        """
        check_masks(mask_W, self._eos_mask_W.shape)
        if self._num_eos:
            self._check()
            mask_W[:] = self._eos_mask_W
            return
        if self.fill_bitmask_at(mask_W.ctypes.data, mask_W.nbytes):
            self.finalize_bitmask(mask_W)
        self._check()

    def fill_bitmask_at(self, address: int, size: int) -> bool:
        """Write the bitmask before EOS, to an address. Returns whether ``finalize_bitmask`` must be called."""
        self._check()
        self._call("unsafe_compute_mask_ptr", address, size)
        return self.needs_finalizing

    @property
    def needs_finalizing(self) -> bool:
        """Whether a bitmask needs corrections after llguidance has written it."""
        renewed = self._generation != self._initial.current[1]
        limited = self._digit_limit is not None and self._digit_limit.applies(self._position)
        return self._ignore_eos or renewed or limited or self._error is not None or self.ll_matcher.is_stopped()

    def finalize_bitmask(self, mask_W: NDArray[np.int32]) -> None:
        """Correct a bitmask that llguidance has written: after an error no token is allowed, not even EOS."""
        if self._error is None and self.needs_renewal():
            try:
                self._call("unsafe_compute_mask_ptr", mask_W.ctypes.data, mask_W.nbytes)
            except MatcherError:
                mask_W[:] = 0
        if self._error is None and self.ll_matcher.is_stopped():
            if self.ll_matcher.is_error():
                self._error = (
                    DEAD_END if "NoExtension" in (message := self.ll_matcher.get_error()) else short_message(message)
                )
            elif not self.ll_matcher.is_accepting():
                self._error = DEAD_END
        if self._digit_limit is not None and self._error is None and self._digit_limit.applies(self._position):
            self._digit_limit.apply(self._position, mask_W)
        if self._error is not None:
            mask_W[:] = 0
        elif self._ignore_eos and (mask_W & ~self._eos_mask_W).any():
            mask_W &= ~self._eos_mask_W

    def accept_token(self, token_id: int) -> None:
        """Advance by a token. Raises ValueError, without changes, if the grammar does not allow it."""
        self._check()
        if token_id in self._eos_ids and (self._num_eos or self._is_accepting()):
            self._num_eos += 1
            return
        if self._num_eos or not self._try_accept(token_id):
            raise ValueError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)
        if self._digit_limit is not None:
            self._position = self._position.after(self._digit_limit.tokens[token_id])

    def _is_accepting(self) -> bool:
        """Return whether the grammar may end here."""
        return bool(self._call("is_accepting"))

    def _try_accept(self, token_id: int) -> bool:
        """Pass a token to llguidance. Returns False, without changes, if it is not allowed."""
        if token_id in self._eos_ids and self._accept_named_eos(token_id):
            return True
        in_vocabulary = 0 <= token_id < 32 * len(self._eos_mask_W)
        if not in_vocabulary or self._call("try_consume_tokens", [token_id]) != 1:
            self._raise_on_error()
            return False
        return True

    def _accept_named_eos(self, token_id: int) -> bool:
        """Accept an EOS token that the grammar names. llguidance cannot validate it in advance, so this uses a copy."""
        attempt, previous = self._call("deep_copy"), self.ll_matcher
        self.ll_matcher = attempt
        if not self._call("consume_token", token_id):
            self.ll_matcher = previous
            return False
        return True

    def jump_forward_tokens(self) -> tuple[int, ...]:
        """Return the next tokens if they are determined (or the first of them); empty at a choice or at the end."""
        self._check()
        if self._num_eos:
            return ()
        tokens = tuple(self._call("compute_ff_tokens"))
        self._raise_on_error()
        # The tokenizer may encode the text differently out of context, so the tokens are checked.
        allowed = self._call("validate_tokens", list(tokens)) if tokens else 0
        return tokens[:allowed]

    def copy(self) -> GrammarMatcher:
        """Return an independent copy."""
        self._check()
        ll_matcher = self._call("deep_copy")
        return changed_copy(self, ll_matcher=ll_matcher, _tokens=self._tokens.copy())

    def needs_renewal(self) -> bool:
        """Whether there is a newer initial matcher, because the shared lexer states are exhausted."""
        initial = self._initial
        if (
            self._generation == initial.current[1]
            and self.ll_matcher.is_error()
            and any(reason in self.ll_matcher.get_error() for reason in (STATES_EXHAUSTED, POISONED))
        ):
            self._timed(initial.replace, self._generation)
            if len(self._tokens) < self._next_renewal:
                self._raise_on_error()
            self._next_renewal = len(self._tokens) + MIN_TOKENS_BETWEEN_RENEWALS
        return self._generation != initial.current[1]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call llguidance's matcher. If the lexer states are exhausted, renew it and call again."""
        initial = self._initial
        if self._generation != initial.current[1]:
            self._renew()
        result = self._timed(getattr(self.ll_matcher, name), *arguments)
        if (self._generation == initial.current[1] and not self.ll_matcher.is_error()) or not self.needs_renewal():
            return result
        self._renew()
        return self._timed(getattr(self.ll_matcher, name), *arguments)

    def _renew(self) -> None:
        """Replay the tokens on the newest initial matcher."""
        first, self._generation = self._initial.current
        self.ll_matcher = self._timed(first.deep_copy)
        self._timed(self.ll_matcher.consume_tokens, self._tokens)
        self._raise_on_error()

    def _raise_on_error(self) -> None:
        """Raise MatcherError if llguidance's matcher is in an error state."""
        if self.ll_matcher.is_error():
            self._error = short_message(self.ll_matcher.get_error())
            raise MatcherError(self._error)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call llguidance and charge the time to the budget."""
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
