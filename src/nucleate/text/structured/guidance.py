"""Grammars by the library llguidance: its tokenizer, its matchers, many masks at once. Knows no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Structured
from nucleate.text.structured.beginning import USED_UP, Beginning
from nucleate.text.structured.gbnf import lark_text
from nucleate.text.structured.guidance_tokenizer import guidance_tokenizer
from nucleate.text.structured.lark import read
from nucleate.text.structured.library import library, parser_limits, raise_unless_panic, told
from nucleate.text.structured.limits import Limits
from nucleate.text.structured.matcher import (
    FAILED,
    FREE_SECONDS,
    NOTHING,
    TOO_SLOW,
    Budget,
    MatcherError,
    check_masks,
)
from nucleate.text.structured.schema import check_policy, not_held, places_of
from nucleate.text.structured.sound import unsound
from nucleate.text.structured.source import source
from nucleate.text.structured.vocabulary import Vocabulary

RENEWED_EVERY: Final = 100
"""Tokens that an answer must have come on before its form begins anew for it once more."""


@final
class GuidanceMatcher:
    """A Matcher by llguidance. ``inner`` is an LLMatcher of its own; ``ends_W`` the mask of the EOS ids.

    ``budget`` is for slow calls. ``goes_on``: EOS is allowed only where nothing else is. ``beginning``: of ``inner``,
    from which it is made anew when the states that it shares are used up.
    """

    __slots__ = (
        "_beginning", "_ended", "_ends", "_ends_W", "_error", "_goes_on", "_number", "_renewable", "_slow", "_tokens",
        "budget", "inner",
    )  # fmt: skip

    def __init__(
        self,
        inner: Any,
        ends: frozenset[int],
        ends_W: NDArray[np.int32],
        budget: Budget,
        *,
        goes_on: bool = False,
        beginning: Beginning | None = None,
    ) -> None:
        self.inner = inner
        self._ends, self._ends_W = ends, ends_W
        self.budget, self._goes_on = budget, goes_on
        self._beginning, self._number = beginning, 0
        self._renewable = 0  # once there are so many tokens
        self._tokens: list[int] = []  # the library's
        self._ended = 0  # EOS ids after them, which it would count only sometimes
        self._slow = False  # the last call
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
        return self._error is None and (self._ended > 0 or bool(self._ask("is_accepting")))

    @property
    def stopped(self) -> bool:
        return self._error is None and (self._ended > 0 or bool(self._ask("is_stopped")))

    def fill(self, mask_W: NDArray[np.int32]) -> None:
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
        beginning = self._beginning
        renewed = beginning is not None and self._number != beginning.now[1]
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
        self._check()
        if token_id in self._ends and (self._ended or self._ask("is_accepting")):
            self._ended += 1
            return
        if token_id in self._ends and self._took_named(token_id):
            return
        known = 0 <= token_id < 32 * len(self._ends_W) and not self._ended
        if not known or self._ask("try_consume_tokens", [token_id]) != 1:
            self._look()
            raise ValueError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)

    def _took_named(self, token_id: int) -> bool:
        """Take an EOS id that a grammar names within its text. It cannot be tried, so a copy goes ahead."""
        tried, kept = self._ask("deep_copy"), self.inner
        self.inner = tried
        if not self._ask("consume_token", token_id):
            self.inner = kept
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, count: int) -> None:
        self._check()
        if not 0 <= count <= len(self._tokens) + self._ended:
            raise ValueError(f"cannot take back {count} of {len(self._tokens) + self._ended} tokens")
        ends = min(count, self._ended)
        if count > ends:
            self._ask("rollback", count - ends)
            self._look()
        self._ended -= ends
        del self._tokens[len(self._tokens) - (count - ends) :]

    def forced(self) -> tuple[int, ...]:
        self._check()
        if self._ended:
            return ()
        tokens = tuple(self._ask("compute_ff_tokens"))
        self._look()
        # A tokenizer may write the text differently on its own, so what it says is tried before it is believed.
        allowed = self._ask("validate_tokens", list(tokens)) if tokens else 0
        return tokens[:allowed]

    def copy(self) -> GuidanceMatcher:
        self._check()
        inner = self._ask("deep_copy")
        made = GuidanceMatcher(inner, self._ends, self._ends_W, self.budget, beginning=self._beginning)
        made._goes_on, made._number, made._renewable = self._goes_on, self._number, self._renewable
        made._tokens, made._ended, made._slow = self._tokens.copy(), self._ended, self._slow
        return made

    def begun(self, *, goes_on: bool) -> GuidanceMatcher:
        beginning = self._beginning
        if self._error is not None or beginning is None:
            raise MatcherError(self._error or FAILED)
        first, number = beginning.now
        try:
            inner = first.deep_copy()
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise_unless_panic(error)
            raise MatcherError(FAILED) from None
        made = GuidanceMatcher(inner, self._ends, self._ends_W, beginning.budget, goes_on=goes_on, beginning=beginning)
        made._number = number
        return made

    def fail(self, error: BaseException) -> None:
        """Keep a panic of the library as this matcher's error; raise anything else again."""
        raise_unless_panic(error)
        self._error = FAILED

    def behind(self) -> bool:
        """Whether there is a newer beginning, after this one's states or another's that shares them are used up."""
        beginning = self._beginning
        if beginning is None:
            return False
        if self._number == beginning.now[1] and self.inner.is_error() and USED_UP in self.inner.get_error():
            self._timed(beginning.after, self._number)
            if len(self._tokens) < self._renewable:
                self._look()
            self._renewable = len(self._tokens) + RENEWED_EVERY
        return self._number != beginning.now[1]

    def _ask(self, name: str, *arguments: Any) -> Any:
        """What the library's matcher says to a call; a second time if its states are used up."""
        beginning = self._beginning
        if beginning is not None and self._number != beginning.now[1]:
            self._renew()
        said = self._timed(getattr(self.inner, name), *arguments)
        if beginning is None or (self._number == beginning.now[1] and not self.inner.is_error()) or not self.behind():
            return said
        self._renew()
        return self._timed(getattr(self.inner, name), *arguments)

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = perf_counter()
        try:
            return call(*arguments)
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            self.fail(error)
        finally:
            self._slow = perf_counter() - begin > FREE_SECONDS and self.budget.charge(begin)
            if self._slow and self.budget.empty and self._error is None:
                self._error = TOO_SLOW
        raise MatcherError(self._error)

    def _renew(self) -> None:
        """Take the tokens so far once more, from the newest beginning."""
        if self._beginning is not None:
            first, self._number = self._beginning.now
            self.inner = self._timed(first.deep_copy)
            self._timed(self.inner.consume_tokens, self._tokens)
            self._look()

    def _check(self) -> None:
        if self._slow and self.budget.empty and self._error is None:
            self._error = TOO_SLOW
        if self._error is not None:
            raise MatcherError(self._error)

    def _look(self) -> None:
        """Raise if the last call has put the library's matcher in error."""
        if self.inner.is_error():
            self._error = told(self.inner.get_error())
            raise MatcherError(self._error)


@final
class Guidance:
    """A GrammarEngine by llguidance. ``threads`` fill masks; None: 80 % of the processors."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits, threads: int | None) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._tokenizer = guidance_tokenizer(vocabulary)
        self._executor = library().LLExecutor(num_threads=threads)

    def compile(self, structured: Structured) -> tuple[GuidanceMatcher, tuple[str, ...], int]:
        self._limits.check(structured)
        ignored: tuple[str, ...] = ()
        if structured.json_schema is not None:
            schema = structured.schema
            ignored = check_policy((*not_held(schema), *unsound(schema)), structured.policy)
        if structured.grammar is not None:
            self._check_grammar(structured.grammar)
        text = _or_refused(structured, lambda: source(structured))
        inner = _or_refused(structured, lambda: self.matcher(text))
        if inner.is_error():
            raise _refused(structured, inner.get_error())
        if structured.policy != "strict":
            ignored += _one_of_as_any_of(structured, inner.get_grammar_warnings())
        first = GuidanceMatcher(
            inner,
            self._vocabulary.ends,
            self._vocabulary.ends_W,
            Budget(self._limits.seconds),
            beginning=Beginning(inner, lambda: self.matcher(text), Budget(self._limits.seconds)),
        )
        return first, ignored, 2**16 + 64 * len(text)

    def matcher(self, text: str) -> Any:
        """An LLMatcher; it may be in error."""
        return library().LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())

    def fill_here(
        self, matchers: Sequence[GuidanceMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32], seconds: float
    ) -> tuple[int, bool]:
        address, size = masks_RW.ctypes.data, masks_RW.strides[0]
        begin = before = perf_counter()
        slow, last = False, len(matchers) - 1
        for done, (each, row) in enumerate(zip(matchers, rows, strict=True)):
            if before - begin > seconds and done < last:
                return done, slow
            try:
                if each.fill_at(address + row * size, size):
                    each.settle(masks_RW[row])
            except MatcherError:
                masks_RW[row] = 0
            now = perf_counter()
            slow |= now - before > FREE_SECONDS
            before = now
        return len(matchers), slow

    def fill_all(self, matchers: Sequence[GuidanceMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32]) -> bool:
        every = [(each.inner, row) for each, row in zip(matchers, rows, strict=True)]
        try:
            self._executor.unsafe_compute_mask_ptr(every, masks_RW.ctypes.data, masks_RW.strides[0], len(masks_RW))
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception, and does not tell its row
            raise_unless_panic(error)
            return False
        for each in matchers:
            if each.inner.is_error():
                with suppress(MatcherError):  # it tells itself
                    each.behind()  # all see it before any mask is believed
        for each, row in zip(matchers, rows, strict=True):
            if each.odd:
                each.settle(masks_RW[row])
        return True

    def _check_grammar(self, grammar: str) -> None:
        """What a grammar embeds or names is held to what holds elsewhere."""
        said = read(lark_text(grammar))
        for schema in said.schemas:
            for what, hint in (*not_held(schema), *unsound(schema)):
                raise ParameterError("grammar", f"grammar: %json: cannot enforce {what}{hint}")
        for low, high in said.ids:
            if high < low or not self._vocabulary.known.issuperset(
                range(low, min(high, low + len(self._vocabulary.tokens)) + 1)
            ):
                raise ParameterError("grammar", f"grammar: <[{low}-{high}]> is no range of tokens of this model")


def _or_refused(structured: Structured, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ParameterError:
        raise
    except (ValueError, OverflowError) as error:
        raise _refused(structured, str(error)) from None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise _refused(structured, FAILED) from None


def _refused(structured: Structured, message: str) -> ParameterError:
    field = structured.form
    reason = told(message, place=field == "grammar")
    if "oneOf" in reason:
        where = f" at {places_of(structured.schema, 'oneOf')}" if field == "json_schema" else " in %json"
        hint = "; policy coerce would take it for anyOf" if field == "json_schema" else ""
        reason = f"cannot enforce oneOf, of which several may hold,{where}{hint}"
    return ParameterError(field, f"{field}: {reason}")


def _one_of_as_any_of(structured: Structured, warnings: Sequence[str]) -> tuple[str, ...]:
    taken = any("oneOf" in warning for warning in warnings)
    return (f"oneOf, taken for anyOf, at {places_of(structured.schema, 'oneOf')}",) if taken else ()
