"""Compiles constraints and fills masks with llguidance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import lark_text
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import GrammarMatcher, MatcherError
from nucleate.structured_output.grammar_source import source
from nucleate.structured_output.json_schema import check_unsupported, places_of, unsupported_keywords
from nucleate.structured_output.lark import read
from nucleate.structured_output.llguidance_loader import (
    FAILED,
    library,
    parser_limits,
    raise_unless_panic,
    short_message,
)
from nucleate.structured_output.llguidance_tokenizer import guidance_tokenizer
from nucleate.structured_output.schema_soundness import unsound
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.state_cache import Beginning
from nucleate.structured_output.time_budget import FREE_SECONDS, TimeBudget
from nucleate.structured_output.vocabulary import Vocabulary


@final
class LLGuidanceEngine:
    """Compiles grammars over one vocabulary, with llguidance. ``threads`` fill masks; None: 80 % of the processors."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, threads: int | None) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._tokenizer = guidance_tokenizer(vocabulary)
        self._executor = library().LLExecutor(num_threads=threads)

    def compile(self, spec: StructuredOutputs) -> tuple[Beginning, tuple[str, ...], int]:
        """Return the initial matcher of a constraint, the ignored keywords and the approximate size in bytes.

        Raises ParameterError, which names the field.
        """
        self._limits.check(spec)
        ignored: tuple[str, ...] = ()
        if spec.json_schema is not None:
            schema = spec.schema
            ignored = check_unsupported((*unsupported_keywords(schema), *unsound(schema)), spec.on_unsupported)
        if spec.grammar is not None:
            self._check_grammar(spec.grammar)
        text = _or_refused(spec, lambda: source(spec))
        ends, ends_W, budget = self._vocabulary.ends, self._vocabulary.ends_W, TimeBudget(self._limits.seconds)
        made = _or_refused(spec, lambda: Beginning(lambda: self.matcher(text), ends, ends_W, budget))
        inner, _ = made.now
        if inner.is_error():
            raise _refused(spec, inner.get_error())
        if spec.on_unsupported != "error":
            ignored += _one_of_as_any_of(spec, inner.get_grammar_warnings())
        return made, ignored, 2**16 + 64 * len(text)

    def matcher(self, text: str) -> Any:
        """Return an LLMatcher, possibly in an error state."""
        return library().LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())

    def fill_here(
        self, matchers: Sequence[GrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32], seconds: float
    ) -> tuple[int, bool]:
        """Fill the masks of matchers that have not ended on this thread, for at most so many seconds.

        Returns how many, at least one and all but one, or all; and whether one took more than what is free.
        """
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

    def fill_all(self, matchers: Sequence[GrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32]) -> bool:
        """Fill all masks in parallel. Returns False if that failed."""
        every = [(each.inner, row) for each, row in zip(matchers, rows, strict=True)]
        try:
            self._executor.unsafe_compute_mask_ptr(every, masks_RW.ctypes.data, masks_RW.strides[0], len(masks_RW))
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception, and does not name its row
            raise_unless_panic(error)
            return False
        for each in matchers:
            if each.inner.is_error():
                with suppress(MatcherError):  # it keeps the error
                    each.behind()  # all are checked before any mask is used
        for each, row in zip(matchers, rows, strict=True):
            if each.needs_settling:
                each.settle(masks_RW[row])
        return True

    def _check_grammar(self, grammar: str) -> None:
        """Check embedded schemas and named token ids like other constraints."""
        lark = read(lark_text(grammar))
        for schema in lark.schemas:
            for what, hint in (*unsupported_keywords(schema), *unsound(schema)):
                raise ParameterError("grammar", f"grammar: %json: cannot enforce {what}{hint}")
        for low, high in lark.ids:
            if high < low or not self._vocabulary.known.issuperset(
                range(low, min(high, low + len(self._vocabulary.tokens)) + 1)
            ):
                raise ParameterError("grammar", f"grammar: <[{low}-{high}]> is no range of tokens of this model")


def _or_refused(spec: StructuredOutputs, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ParameterError:
        raise
    except (ValueError, OverflowError) as error:
        raise _refused(spec, str(error)) from None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise _refused(spec, FAILED) from None


def _refused(spec: StructuredOutputs, message: str) -> ParameterError:
    field = spec.kind
    reason = short_message(message, place=field == "grammar")
    if "oneOf" in reason:
        where = f" at {places_of(spec.schema, 'oneOf')}" if field == "json_schema" else " in %json"
        hint = '; set on_unsupported="approximate" to treat it as anyOf' if field == "json_schema" else ""
        reason = f"cannot enforce oneOf whose alternatives may overlap{where}{hint}"
    return ParameterError(field, f"{field}: {reason}")


def _one_of_as_any_of(spec: StructuredOutputs, warnings: Sequence[str]) -> tuple[str, ...]:
    taken = any("oneOf" in warning for warning in warnings)
    return (f"oneOf treated as anyOf at {places_of(spec.schema, 'oneOf')}",) if taken else ()
