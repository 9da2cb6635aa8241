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
from nucleate.text.structured.matcher import FREE_SECONDS, Budget, fill_or_forbid
from nucleate.text.structured.vocabulary import Vocabulary
from nucleate.text.structured.xgrammar_forms import check_schema, taken_regex, taken_schema
from nucleate.text.structured.xgrammar_matcher import Words, XGrammarMatcher

XGRAMMAR_LIMITS: Final = Limits(
    characters=20_000, string=2_000, depth=32, properties=200, enum=1_000, choices=1_000, repetitions=128, forced=128
)
"""Smaller than those for llguidance, since compiling takes longer; what is repeated more often makes each mask slow."""
WHITESPACE: Final = 17
"""Characters of it that may stand between tokens of JSON: as long as with guidance, in any order."""

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
