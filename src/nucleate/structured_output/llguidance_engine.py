"""``LLGuidanceEngine``: compiles constraints and fills token bitmasks with llguidance."""

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
from nucleate.structured_output.grammar_source import llguidance_grammar
from nucleate.structured_output.json_schema import check_unsupported, keyword_locations, unsupported_keywords
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.llguidance_loader import (
    FAILED,
    library,
    parser_limits,
    raise_unless_panic,
    short_message,
)
from nucleate.structured_output.llguidance_tokenizer import guidance_tokenizer
from nucleate.structured_output.schema_soundness import unsupported_combinations
from nucleate.structured_output.spec import StructuredOutputs
from nucleate.structured_output.state_cache import InitialMatcher
from nucleate.structured_output.time_budget import FREE_SECONDS, TimeBudget
from nucleate.structured_output.vocabulary import Vocabulary


@final
class LLGuidanceEngine:
    """Compiles grammars for one vocabulary. threads: threads that fill masks; None: 80 % of the processors."""

    def __init__(self, vocabulary: Vocabulary, limits: GrammarLimits, threads: int | None) -> None:
        self._vocabulary, self._limits = vocabulary, limits
        self._tokenizer = guidance_tokenizer(vocabulary)
        self._executor = library().LLExecutor(num_threads=threads)

    def compile(self, spec: StructuredOutputs) -> tuple[InitialMatcher, tuple[str, ...], int]:
        """Return the initial matcher of a constraint, the ignored schema keywords and the approximate size in bytes.

        Raises ParameterError, which names the field.
        """
        self._limits.check(spec)
        ignored: tuple[str, ...] = ()
        if spec.json_schema is not None:
            schema = spec.schema
            ignored = check_unsupported(
                (*unsupported_keywords(schema), *unsupported_combinations(schema)), spec.on_unsupported
            )
        if spec.grammar is not None:
            self._check_grammar(spec.grammar)
        text = _checked(spec, lambda: llguidance_grammar(spec))
        eos_ids, eos_mask_W, budget = (
            self._vocabulary.eos_ids,
            self._vocabulary.eos_mask_W,
            TimeBudget(self._limits.mask_budget_seconds),
        )
        initial = _checked(spec, lambda: InitialMatcher(lambda: self.matcher(text), eos_ids, eos_mask_W, budget))
        ll_matcher, _ = initial.current
        if ll_matcher.is_error():
            raise _compile_error(spec, ll_matcher.get_error())
        if spec.on_unsupported != "error":
            ignored += _one_of_as_any_of(spec, ll_matcher.get_grammar_warnings())
        return initial, ignored, 2**16 + 64 * len(text)

    def matcher(self, text: str) -> Any:
        """Create an LLMatcher, possibly in an error state."""
        return library().LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())

    def fill_on_caller(
        self, matchers: Sequence[GrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32], seconds: float
    ) -> tuple[int, bool]:
        """Fill the masks of matchers before EOS on the calling thread, until ``seconds`` have passed.

        Returns the number of filled masks (at least one; one is never left alone), and whether any exceeded
        FREE_SECONDS.
        """
        address, size = masks_RW.ctypes.data, masks_RW.strides[0]
        begin = before = perf_counter()
        slow, last = False, len(matchers) - 1
        for done, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if before - begin > seconds and done < last:
                return done, slow
            try:
                if matcher.fill_bitmask_at(address + row * size, size):
                    matcher.finalize_bitmask(masks_RW[row])
            except MatcherError:
                masks_RW[row] = 0
            now = perf_counter()
            slow |= now - before > FREE_SECONDS
            before = now
        return len(matchers), slow

    def fill_all(self, matchers: Sequence[GrammarMatcher], rows: Sequence[int], masks_RW: NDArray[np.int32]) -> bool:
        """Fill the masks of matchers before EOS in parallel. Returns False if that failed."""
        inputs = [(matcher.ll_matcher, row) for matcher, row in zip(matchers, rows, strict=True)]
        try:
            self._executor.unsafe_compute_mask_ptr(inputs, masks_RW.ctypes.data, masks_RW.strides[0], len(masks_RW))
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception, and does not name its row
            raise_unless_panic(error)
            return False
        for matcher in matchers:
            if matcher.ll_matcher.is_error():
                with suppress(MatcherError):  # stored in matcher.error
                    matcher.needs_renewal()  # check all matchers before using any mask
        for matcher, row in zip(matchers, rows, strict=True):
            if matcher.needs_finalizing:
                matcher.finalize_bitmask(masks_RW[row])
        return True

    def _check_grammar(self, grammar: str) -> None:
        """Check the embedded schemas and token ids of a grammar. Raises ParameterError."""
        lark = parse_lark(lark_text(grammar))
        for schema in lark.schemas:
            for what, hint in (*unsupported_keywords(schema), *unsupported_combinations(schema)):
                raise ParameterError("grammar", f"grammar: %json: cannot enforce {what}{hint}")
        for first, last in lark.token_id_ranges:
            if last < first or not self._vocabulary.allowed_ids.issuperset(
                range(first, min(last, first + len(self._vocabulary.tokens)) + 1)
            ):
                raise ParameterError(
                    "grammar", f"grammar: <[{first}-{last}]> is not a range of token ids of this model"
                )


def _checked(spec: StructuredOutputs, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ParameterError:
        raise
    except (ValueError, OverflowError) as error:
        raise _compile_error(spec, str(error)) from None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise _compile_error(spec, FAILED) from None


def _compile_error(spec: StructuredOutputs, message: str) -> ParameterError:
    field = spec.kind
    reason = short_message(message, keep_position=field == "grammar")
    if "oneOf" in reason:
        where = f" at {keyword_locations(spec.schema, 'oneOf')}" if field == "json_schema" else " in %json"
        hint = '; set on_unsupported="approximate" to treat it as anyOf' if field == "json_schema" else ""
        reason = f"cannot enforce oneOf whose alternatives may overlap{where}{hint}"
    return ParameterError(field, f"{field}: {reason}")


def _one_of_as_any_of(spec: StructuredOutputs, warnings: Sequence[str]) -> tuple[str, ...]:
    warned = any("oneOf" in warning for warning in warnings)
    return (f"oneOf treated as anyOf at {keyword_locations(spec.schema, 'oneOf')}",) if warned else ()
