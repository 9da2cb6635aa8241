"""``LLGuidanceEngine``: converts constraints to llguidance's grammar format, compiles them and fills token bitmasks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.gbnf import is_gbnf, lark_text
from nucleate.structured_output.grammar_limits import GrammarLimits
from nucleate.structured_output.grammar_matcher import (
    FREE_SECONDS,
    GrammarMatcher,
    InitialMatcher,
    MatcherError,
    TimeBudget,
)
from nucleate.structured_output.json_schema import (
    NUMERIC,
    PreparedSchema,
    SchemaLocation,
    check_unsupported,
    keyword_locations,
    misspelled_keywords,
    unsupported_keywords,
)
from nucleate.structured_output.lark import parse_lark
from nucleate.structured_output.lazy_grammar import lazy_grammar
from nucleate.structured_output.llguidance_library import (
    FAILED,
    DigitLimit,
    SpecialTokens,
    TokenDigits,
    Vocabulary,
    guidance_tokenizer,
    library,
    parser_limits,
    raise_unless_panic,
    short_message,
)
from nucleate.structured_output.pattern_syntax import check_syntax, with_explicit_classes
from nucleate.structured_output.schema_normalization import any_of
from nucleate.structured_output.schema_rewriting import prepare_schema
from nucleate.structured_output.schema_soundness import (
    remove_unsupported_patterns,
    rewrite_schema,
    unsupported_combinations,
)
from nucleate.structured_output.spec import StructuredOutputs, Whitespace
from nucleate.structured_output.structural_tag import (
    Grammar,
    JsonSchema,
    Regex,
    at_place,
    parse_structural_tag,
    parts_of,
)
from nucleate.structured_output.tag_grammar import tag_grammar

WHITESPACE: Final = r"( |\n( {0,16}|\t{0,8}))"
"""Optional whitespace between JSON tokens: bounded, but enough for indentation (four levels of four spaces).

Some models generate as much whitespace as is allowed: with 40 spaces, the bundled model needed 1.3 times the tokens.
"""


def llguidance_grammar(
    spec: StructuredOutputs, tokens: SpecialTokens, options: Mapping[str, Any], schema: PreparedSchema | None = None
) -> str:
    """Return the constraint in llguidance's JSON format. Raises ParameterError for an invalid grammar.

    options: of llguidance for JSON schemas. schema: the prepared schema of a JSON constraint, which is changed.
    """
    if spec.grammar is not None and spec.grammar_triggers is not None:
        return lazy_grammar(spec.grammar, spec.grammar_triggers, options, tokens)
    if schema is not None:
        text = json.dumps(rewrite_schema(schema))
        return str(library().LLMatcher.grammar_from_json_schema(text, overrides=dict(options)))
    if spec.regex is not None:
        check_syntax("regex", spec.regex)
        return str(library().LLMatcher.grammar_from_regex(with_explicit_classes(spec.regex)))
    if spec.choice is not None:
        # ASCII, because Lark strings cannot contain control characters.
        # A terminal, because the parser tries the alternatives of a rule one by one.
        return _lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in dict.fromkeys(spec.choice)))
    return _lark(parse_lark(lark_text(spec.grammar or ""), options).text)


def _lark(text: str) -> str:
    """Wrap a Lark grammar in JSON, because llguidance parses text that starts with a brace as its own format."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def schema_options(spec: StructuredOutputs, whitespace: Whitespace) -> dict[str, Any]:
    """Return llguidance's options for JSON schemas: all of them, so that a schema cannot override any.

    whitespace: for a constraint that does not select any.
    """
    flexible = (spec.whitespace or whitespace) == "flexible"
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": flexible,
        "whitespace_pattern": WHITESPACE if flexible else None,
        "coerce_one_of": False,
        "lenient": spec.on_unsupported == "ignore",
    }


_COUNTS = ("minProperties", "maxProperties")
_COUNTS_WARNING = "min/maxProperties"
_OVERLAPS = "oneOf whose alternatives may overlap"


_Compiled = tuple[InitialMatcher, tuple[str, ...], tuple[str, ...], int]
"""The initial matcher of a constraint, the ignored and the unknown keywords, and the length of its grammar."""


@final
class LLGuidanceEngine:
    """Compiles grammars for one vocabulary. threads: threads that fill masks; None: 80 % of the processors.

    whitespace: in JSON, for constraints that do not select it.
    """

    def __init__(
        self, vocabulary: Vocabulary, limits: GrammarLimits, threads: int | None, whitespace: Whitespace
    ) -> None:
        self._vocabulary, self._limits, self._whitespace = vocabulary, limits, whitespace
        self._tokenizer = guidance_tokenizer(vocabulary)
        self._special_tokens = SpecialTokens(vocabulary)
        self._digits = TokenDigits(vocabulary.tokens)
        self._executor = library().LLExecutor(num_threads=threads)

    def compile(self, spec: StructuredOutputs) -> _Compiled:
        """Compile a constraint. Raises ParameterError, which names the field."""
        if spec.structural_tag is not None:
            return self._compile_tag(spec, spec.structural_tag)
        try:
            return self._compile(spec)
        except ParameterError as error:
            if spec.on_unsupported != "ignore" or "Unsatisfiable" in str(error):
                raise
        return self._compile(spec, rewrite=False)  # rewritten conditions may be too large, or not supported together

    def _compile(self, spec: StructuredOutputs, *, rewrite: bool = True) -> _Compiled:
        schema = self._limits.check(spec, rewrite=rewrite)
        unknown = () if schema is None else _unknown(schema, spec)
        ignored = () if schema is None else _ignored(schema, spec)
        if spec.grammar is not None:
            self._check_grammar(spec.grammar)
        initial, text = self._create(spec, schema)
        if schema is not None and spec.on_unsupported != "error":
            warnings = "".join(initial.current[0].get_grammar_warnings())
            if _COUNTS_WARNING in warnings:  # llguidance approximates them, but not as alternatives
                ignored += (f"{' and '.join(_COUNTS)} at {keyword_locations(schema.locations, *_COUNTS)}",)
                for location in schema.locations:
                    for name in _COUNTS:
                        cast("dict[str, Any]", location.schema).pop(name, None)
                schema.update_locations()  # the first translation has rewritten them
                initial, text = self._create(spec, schema)
        return initial, ignored, unknown, len(text)

    def _compile_tag(self, spec: StructuredOutputs, document: str) -> _Compiled:
        form = parse_structural_tag(json.loads(document))
        schemas, ignored = self._limits.check_tag(document, form), dict[str, None]()
        unknown: list[str] = []
        for part in parts_of(form):
            with at_place(part):
                if isinstance(part, JsonSchema):
                    unknown += [f"{what} in {part.at}" for what in _unknown(schemas[part.at], spec)]
                    ignored |= {f"{what} in {part.at}": None for what in _ignored(schemas[part.at], spec)}
                elif isinstance(part, Grammar):
                    self._check_grammar(part.grammar)
                elif isinstance(part, Regex):
                    check_syntax("regex", part.pattern)
        rewritten = {at: rewrite_schema(schema) for at, schema in schemas.items()}
        options = schema_options(spec, self._whitespace)
        text = _checked(spec, lambda: tag_grammar(form, rewritten, options, self._special_tokens), None)
        initial = self._initial(spec, text, None, None)
        if spec.on_unsupported != "error":
            ignored |= dict.fromkeys(map(short_message, initial.current[0].get_grammar_warnings()))
        return initial, tuple(ignored), tuple(unknown), len(text)

    def _create(self, spec: StructuredOutputs, schema: PreparedSchema | None) -> tuple[InitialMatcher, str]:
        """Return the initial matcher and llguidance's text of a constraint. schema: its prepared schema."""
        options = schema_options(spec, self._whitespace)
        text = _checked(spec, lambda: llguidance_grammar(spec, self._special_tokens, options, schema), schema)
        limit = None
        if schema is not None and spec.max_digits:
            limit = DigitLimit(self._digits, max(spec.max_digits, _longest_number(schema.locations)))
        return self._initial(spec, text, schema, limit), text

    def _initial(
        self, spec: StructuredOutputs, text: str, schema: PreparedSchema | None, limit: DigitLimit | None
    ) -> InitialMatcher:
        eos_ids, eos_mask_W = self._vocabulary.eos_ids, self._vocabulary.eos_mask_W
        budget = TimeBudget(self._limits.mask_budget_seconds)
        create = partial(InitialMatcher, lambda: self.matcher(text), eos_ids, eos_mask_W, budget, limit)
        initial: InitialMatcher = _checked(spec, create, schema)
        ll_matcher, _ = initial.current
        if ll_matcher.is_error():
            raise _compile_error(spec, ll_matcher.get_error(), schema)
        return initial

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
        for schema in map(prepare_schema, deepcopy(lark.schemas)):
            try:
                check_unsupported(_unsupported(schema), "error")
            except ParameterError as error:
                reason = str(error).removeprefix("json_schema").partition("; set on_unsupported")[0]
                raise ParameterError("grammar", f"grammar: %json{reason}") from None
            if overlapping := _overlapping(schema):
                raise ParameterError("grammar", f"grammar: %json: cannot enforce {_OVERLAPS} at {overlapping}")
        for first, last in lark.token_id_ranges:
            vocabulary, fault = self._vocabulary, ""
            ids = range(first, min(last, first + len(vocabulary.tokens)) + 1)
            if not ids or not vocabulary.allowed_ids.issuperset(ids):
                fault = f"<[{first}-{last}]> is not a range of token ids of this model"
            elif is_gbnf(grammar) and first not in vocabulary.special_ids:
                fault = f"<[{first}]> must be a special token in GBNF; write other tokens as text"
            if fault:
                raise ParameterError("grammar", f"grammar: {fault}")


def _ignored(schema: PreparedSchema, spec: StructuredOutputs) -> tuple[str, ...]:
    """Remove what cannot be enforced from a schema, in place, and return it. Raises ParameterError."""
    found = _unsupported(schema, overlapping=spec.on_unsupported == "ignore")
    ignored = check_unsupported(found, spec.on_unsupported)
    if not (overlapping := _overlapping(schema)):
        return ignored
    if spec.on_unsupported == "error":
        hint = 'set on_unsupported="approximate" to treat it as anyOf'
        raise ParameterError("json_schema", f"json_schema: cannot enforce {_OVERLAPS} at {overlapping}; {hint}")
    for location in schema.locations:
        own = cast("dict[str, Any]", location.schema)
        if location.list_of("oneOf"):
            any_of(own, own.pop("oneOf"))
    return (*ignored, f"oneOf treated as anyOf at {overlapping}")


def _overlapping(schema: PreparedSchema) -> str:
    """Return the locations of ``oneOf`` whose alternatives may overlap: those that are not rewritten."""
    return keyword_locations([each for each in schema.locations if each.list_of("oneOf")], "oneOf")


def _unknown(schema: PreparedSchema, spec: StructuredOutputs) -> tuple[str, ...]:
    """Return the keywords that look misspelled. Raises ParameterError for the first one with ``strict_keywords``."""
    unknown = tuple(dict.fromkeys(misspelled_keywords(schema.locations)))
    if unknown and spec.strict_keywords:
        raise ParameterError("json_schema", f"json_schema: unknown keyword {unknown[0]}")
    return unknown


def _unsupported(schema: PreparedSchema, *, overlapping: bool = False) -> Iterator[tuple[str, str]]:
    yield from remove_unsupported_patterns(schema, overlapping=overlapping)
    yield from unsupported_keywords(schema.locations)
    yield from unsupported_combinations(schema.locations)


def _checked(spec: StructuredOutputs, call: Callable[[], Any], schema: PreparedSchema | None) -> Any:
    try:
        return call()
    except ParameterError:
        raise
    except (ValueError, OverflowError) as error:
        raise _compile_error(spec, str(error), schema) from None
    except BaseException as error:  # noqa: BLE001 - a panic is no Exception
        raise_unless_panic(error)
        raise _compile_error(spec, FAILED, schema) from None


def _compile_error(spec: StructuredOutputs, message: str, schema: PreparedSchema | None) -> ParameterError:
    """Return the error for a message of llguidance. schema: the prepared schema of a JSON constraint."""
    field = spec.kind
    reason = short_message(message, keep_position=field == "grammar")
    if "lookarounds not supported" in reason:
        reason = "an anchor (^ or $) in a pattern is repeated, or next to text; put it at the beginning or end"
    elif "patternProperty regexes" in reason and field == "json_schema":
        reason = "cannot enforce patternProperties that match the same names of an object, here or under allOf or $ref"
    elif schema and _COUNTS_WARNING in reason:
        where = keyword_locations(schema.locations, *_COUNTS)
        reason = f"cannot enforce {' and '.join(_COUNTS)} at {where} with optional properties of allOf or $ref"
    return ParameterError(field, f"{field}: {reason}")


def _longest_number(locations: Iterable[SchemaLocation]) -> int:
    """Return the most consecutive digits in a constant or bound of a prepared schema."""
    given = [location.schema[name] for location in locations for name in NUMERIC & location.schema.keys()]
    return max((len(digits) for value in given for digits in re.findall("[0-9]+", json.dumps(value))), default=0)
