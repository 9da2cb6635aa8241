"""Grammars by the library xgrammar, which has to be asked for. Knows no request.

It computes masks ahead, for seconds on a large vocabulary where lengths are bounded, and its calls cannot be stopped.
So grammars of one's own are not taken, and who waits too long for a form is told so.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from time import perf_counter
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError
from nucleate.core.structured import Structured
from nucleate.text.structured.limits import Limits
from nucleate.text.structured.matcher import (
    FAILED,
    FREE_SECONDS,
    NOTHING,
    TOO_SLOW,
    Budget,
    MatcherError,
    check_masks,
    fill_or_forbid,
)
from nucleate.text.structured.vocabulary import Vocabulary, mask_of
from nucleate.text.structured.xgrammar_forms import check_schema, taken_regex, taken_schema

XGRAMMAR_LIMITS: Final = Limits(
    characters=20_000, string=2_000, depth=32, properties=200, enum=1_000, choices=1_000, repetitions=128, forced=128
)
"""Smaller than those for llguidance, since compiling takes longer; what is repeated more often makes each mask slow."""
WHITESPACE: Final = 17
"""Characters of it that may stand between tokens of JSON: as long as with guidance, in any order."""
FORCED: Final = 32
"""Tokens told at once."""

_BROKEN: Final = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""First bytes of characters, and the range of what must not follow them in UTF-8, which the library does not know."""
_BREAKS: Final = re.compile(b"|".join(b"%c[%c-%c]" % (first, *rest) for first, rest in _BROKEN.items()), re.DOTALL)
_PLACE = re.compile(r"^\[\d+:\d+:\d+\] \S+:\d+: (?:Check failed: .*? is false: )?")


@cache
def library() -> Any:
    """The module. Raises ModuleNotFoundError with what to install."""
    try:
        import xgrammar
    except ModuleNotFoundError as error:
        if error.name not in ("xgrammar", "tvm_ffi", "torch", "transformers", "pydantic"):
            raise
        raise ModuleNotFoundError(
            "the grammar engine xgrammar needs the package xgrammar: pip install 'nucleate[xgrammar]'", name="xgrammar"
        ) from None
    return xgrammar


@final
class Words:
    """A vocabulary as xgrammar is to see it: ``tokens`` without those that are no text, or none in UTF-8."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = frozenset(vocabulary.special)
        self.tokens = [
            b"" if token in special or _BREAKS.search(data) else data for token, data in enumerate(vocabulary.tokens)
        ]
        self.ends, self.ends_W = vocabulary.ends, vocabulary.ends_W
        self._any_W = self.ends_W | mask_of((token for token, data in enumerate(self.tokens) if data), len(self.tokens))
        self._after_W = {
            first: self._any_W
            & ~mask_of(
                (token for token, data in enumerate(self.tokens) if data and low <= data[0] <= high), len(self.tokens)
            )
            for first, (low, high) in _BROKEN.items()
        }

    def after(self, pushed: Sequence[int]) -> NDArray[np.int32]:
        """The mask of the tokens that are text after these."""
        return self._after_W.get(self.tokens[pushed[-1]][-1], self._any_W) if pushed else self._any_W


@final
class XGrammarMatcher:
    """A Matcher by xgrammar. ``inner`` is a GrammarMatcher of its own, which never gets an EOS id.

    ``next_W``: the mask of this state, once computed; whether anything but EOS can follow is read off it.
    """

    __slots__ = ("_answers", "_ended", "_error", "_goes_on", "_pushed", "_slow", "_words", "budget", "inner", "next_W")

    def __init__(
        self, inner: Any, words: Words, budget: Budget, *, answers: Budget | None = None, goes_on: bool = False
    ) -> None:
        self.inner = inner
        self.budget = budget
        self._answers = answers or budget  # that of those that begin here
        self._words, self._goes_on = words, goes_on
        self.next_W: NDArray[np.int32] | None = None
        self._pushed: list[int] = []
        self._ended = 0
        self._slow = False  # the last call
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def ended(self) -> bool:
        return self._ended > 0

    @property
    def finished(self) -> bool:
        return self._error is None and (self._ended > 0 or bool(self._ask(self.inner.is_completed)))

    @property
    def stopped(self) -> bool:
        if not self.finished:
            return False
        if self._ended:
            return True
        try:
            return not (self._mask() & ~self._words.ends_W).any()
        except MatcherError:
            return False

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        check_masks(mask_W, self._words.ends_W.shape)
        self._check()
        mask_W[:] = self._words.ends_W if self._ended else self._mask()

    def keep(self, mask_W: NDArray[np.int32]) -> None:
        """Take a mask that was computed for this state."""
        mask_W = mask_W & self._words.after(self._pushed)  # the library's has ids beyond the vocabulary
        more = mask_W & ~self._words.ends_W
        if not mask_W.any():
            self._error = NOTHING
        self.next_W = more if self._goes_on and more.any() else mask_W

    def push(self, token_id: int) -> None:
        self._check()
        ends, tokens = self._words.ends, self._words.tokens
        if token_id in ends and (self._ended or self._ask(self.inner.is_completed)):
            self._ended += 1
            return
        # What is no text would be refused with a line on stderr.
        text = 0 <= token_id < len(tokens) and bool(tokens[token_id]) and self._is_text(token_id)
        if self._ended or not text or not self._ask(self.inner.accept_token, token_id):
            raise ValueError(f"token {token_id} is not allowed here")
        self._pushed.append(token_id)
        self.next_W = None

    def rollback(self, count: int) -> None:
        self._check()
        if not 0 <= count <= len(self._pushed) + self._ended:
            raise ValueError(f"cannot take back {count} of {len(self._pushed) + self._ended} tokens")
        ends = min(count, self._ended)
        if count > ends:
            self._ask(self.inner.rollback, count - ends)
            self.next_W = None
        self._ended -= ends
        del self._pushed[len(self._pushed) - (count - ends) :]

    def forced(self) -> tuple[int, ...]:
        """Those that are the only ones a mask allows; where a text can be written in several ways, none is forced."""
        self._check()
        tokens: list[int] = []
        ahead = self
        while not ahead.ended and len(tokens) < FORCED:
            mask_W = ahead._mask()
            word = int(np.argmax(mask_W != 0))
            bits = int(mask_W[word]) & 0xFFFFFFFF
            if np.count_nonzero(mask_W) != 1 or bits & (bits - 1) or mask_W[word] & self._words.ends_W[word]:
                break
            ahead = self.copy() if ahead is self else ahead
            tokens.append(32 * word + bits.bit_length() - 1)
            ahead.push(tokens[-1])
        return tuple(tokens)

    def copy(self) -> XGrammarMatcher:
        return self._copied(self.budget, self._goes_on)

    def begun(self, *, goes_on: bool) -> XGrammarMatcher:
        made = self._copied(self._answers, goes_on)
        made.next_W = None
        return made

    def _copied(self, budget: Budget, goes_on: bool) -> XGrammarMatcher:
        self._check()
        made = XGrammarMatcher(self._ask(self.inner.fork), self._words, budget, goes_on=goes_on)
        made._slow = self._slow and budget is self.budget
        made._pushed, made._ended, made.next_W = self._pushed.copy(), self._ended, self.next_W
        return made

    def _is_text(self, token_id: int) -> bool:
        return bool(self._words.after(self._pushed)[token_id // 32] >> (token_id % 32) & 1)

    def _mask(self) -> NDArray[np.int32]:
        if self.next_W is None:
            mask_1W = np.zeros((1, len(self._words.ends_W)), np.int32)
            self._ask(self.inner.fill_next_token_bitmask, mask_1W, 0)
            self.keep(mask_1W[0])
        self._check()
        if self.next_W is None:  # pragma: no cover - it was kept
            raise AssertionError
        return self.next_W

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = perf_counter()
        try:
            return call(*arguments)
        except RuntimeError:
            self._error = FAILED
        finally:
            self._slow = self.budget.charge(begin)
            if self._slow and self.budget.empty and self._error is None:
                self._error = TOO_SLOW
        raise MatcherError(self._error)

    def _check(self) -> None:
        if self._slow and self.budget.empty and self._error is None:
            self._error = TOO_SLOW
        if self._error is not None:
            raise MatcherError(self._error)


@final
class XGrammar:
    """A GrammarEngine by xgrammar. ``threads`` compile one form, and fill masks; None: the library's own choice."""

    def __init__(self, vocabulary: Vocabulary, limits: Limits, threads: int | None) -> None:
        self._words, self._limits = Words(vocabulary), limits
        words = library().TokenizerInfo(
            self._words.tokens,
            library().VocabType.RAW,
            vocab_size=len(self._words.tokens),
            stop_token_ids=sorted(vocabulary.ends),
        )
        self._compiler = library().GrammarCompiler(words, max_threads=threads or 8, cache_enabled=False)
        self._batch = library().BatchGrammarMatcher(max_threads=threads or "auto")
        self._turn = threading.Lock()

    def compile(self, structured: Structured) -> tuple[XGrammarMatcher, tuple[str, ...], int]:
        field = structured.form
        if structured.grammar is not None:
            raise ParameterError(field, "grammar: the engine xgrammar takes none, only guidance does")
        self._limits.check(structured)
        ignored = check_schema(structured.schema, structured.policy) if structured.json_schema is not None else ()
        compiled = self._in_time(field, self._call(structured))
        inner = library().GrammarMatcher(compiled)
        first = XGrammarMatcher(inner, self._words, Budget(self._limits.seconds), answers=Budget(self._limits.seconds))
        return first, ignored, 2**16 + int(compiled.memory_size_bytes)

    def fill_here(
        self, matchers: Sequence[XGrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32], seconds: float
    ) -> tuple[int, bool]:
        begin = before = perf_counter()
        slow = False
        for done, (each, row) in enumerate(zip(matchers, rows, strict=True)):
            if before - begin > seconds and done + 1 < len(matchers):
                return done, slow
            fill_or_forbid(each, masks_RW[row])
            slow |= (now := perf_counter()) - before > FREE_SECONDS
            before = now
        return len(matchers), slow

    def fill_all(self, matchers: Sequence[XGrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32]) -> bool:
        new = [(each, row) for each, row in zip(matchers, rows, strict=True) if each.next_W is None]
        try:
            if new:
                self._batch.batch_fill_next_token_bitmask(
                    [each.inner for each, _ in new], masks_RW, [row for _, row in new]
                )
        except RuntimeError:
            return False
        for each, row in new:
            each.keep(masks_RW[row])
        for each, row in zip(matchers, rows, strict=True):
            masks_RW[row] = 0 if each.error is not None or each.next_W is None else each.next_W
        return True

    def _call(self, structured: Structured) -> Callable[[], Any]:
        if structured.regex is not None:
            pattern = taken_regex(structured.regex)
            return lambda: self._compiler.compile_regex(pattern)
        if structured.choice is not None:
            grammar = "root ::= " + " | ".join(map(_literal, dict.fromkeys(structured.choice)))
            return lambda: self._compiler.compile_grammar(grammar)
        schema = taken_schema(structured.schema)
        if structured.whitespace == "bounded":
            options: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": WHITESPACE}
        else:
            options = {"any_whitespace": False, "separators": (",", ":")}
        return lambda: self._compiler.compile_json_schema(schema, strict_mode=False, **options)

    def _in_time(self, field: str, call: Callable[[], Any]) -> Any:
        """One form at a time. Who waits too long is told so; what has begun goes on, since it cannot be stopped."""
        made: Future[Any] = Future()

        def work() -> None:
            with self._turn:
                if not made.set_running_or_notify_cancel():
                    return
                try:
                    made.set_result(call())
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    made.set_exception(error)

        threading.Thread(target=work, name="nucleate-xgrammar", daemon=True).start()
        try:
            return made.result(self._limits.compiling)
        except TimeoutError:
            why = "others are compiled before it" if made.cancel() else "it takes the engine xgrammar too long"
            raise ParameterError(field, f"{field}: not compiled within {self._limits.compiling} s: {why}") from None
        except RuntimeError as error:
            raise ParameterError(field, f"{field}: {told(str(error))}") from None


def told(message: str) -> str:
    """A message of the library on one line, of bounded length, and without its own places."""
    line = " ".join(_PLACE.sub("", message.strip()).split()) or "it cannot be used"
    return line if len(line) <= 200 else line[:197] + "..."


def _literal(text: str) -> str:
    """A text as a string of EBNF."""
    return '"' + "".join(_ESCAPED.get(char, char) for char in text) + '"'


_ESCAPED = {chr(code): f"\\x{code:02x}" for code in (*range(32), 127)} | {'"': '\\"', "\\": "\\\\"}
