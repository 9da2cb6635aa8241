"""Random constraints combined with all other parameters: compared with the reference and a JSON schema validator."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import tiers
from grammar_examples import CHOICES, PATTERNS, SCHEMAS, Schema, array, closed, integer, text
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from toy_requests import KINDS, chunks_by_index, drive, is_empty, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.outputs import CompletionChunk
from nucleate.structured_output import GrammarCompiler, StructuredOutputs
from nucleate.structured_output.guide import validate

LENIENT = {
    "json_schema": {"type": "array", "items": integer(0, 3) | {"multipleOf": 1}, "uniqueItems": True},
    "on_unsupported": "ignore",
}
CONSTRAINTS: list[dict[str, Any]] = [
    *({"json_schema": schema, "whitespace": "none"} for schema in SCHEMAS.values()),
    *({"json_schema": schema} for schema in SCHEMAS.values()),
    *({"regex": pattern} for pattern in (*PATTERNS, "[a-z ]*", "x?", "(?s).*")),
    *({"choice": list(texts)} for texts in CHOICES),
    {"json_object": True},
    {"grammar": 'start: "(" start ")" | "x"'},
    {"grammar": 'start: word (" " word)*\nword: /[a-z]{1,5}/'},
    LENIENT,
]
STAGES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.4, "top_p": 0.9, "frequency_penalty": -1.0, "presence_penalty": 0.7},
    {"repetition_penalty": 0.6, "penalty_last_n": 4, "top_k": 8},
    {"dry_multiplier": 0.9, "no_repeat_ngram_size": 3},
    {"logit_bias": {20: 4.0, 38: 9.0, 300: -5.0}},
    {"suppress_token_ids": [7, 38, 95, 300]},
    {"bad_words": ["t", "no"]},
    {"mirostat_tau": 3.0, "repetition_penalty": 1.2},
    {"xtc_probability": 0.8, "xtc_threshold": 0.05, "min_p": 0.01},
    {"draw": "categorical", "typical_p": 0.7},
]


@st.composite
def structured_request(draw: st.DrawFn) -> Request:
    """A request with structured output and random other parameters."""
    most = draw(st.integers(1, 40))
    values = {
        "min_tokens": draw(st.sampled_from([0, 0, 1, 7])),
        "stop": draw(st.sampled_from([(), (), ('"',), (",", "]"), ("e", " t", "1"), ("a very",)])),
        "stop_regex": draw(st.sampled_from([(), (), ("[0-9]{2}",), (r"\}$",)])),
        "stop_json": draw(st.sampled_from([False, False, False, True])),
        "stop_token_ids": draw(st.sampled_from([(), (), (6, 17), tuple(range(20, 40))])),
        "include_stop_str_in_output": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, None, None, 0, 3])),
        "logprobs_mode": draw(st.sampled_from(["raw", "processed"])),
        "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        "ignore_eos": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
        "n": draw(st.sampled_from([1, 1, 2, 3])),
        "seed": draw(st.integers(0, 2**64 - 1)),
        **draw(st.sampled_from(STAGES)),
    }
    values["min_tokens"] = min(values["min_tokens"], most)
    params = nc.SamplingParams(structured_outputs=draw(st.sampled_from(CONSTRAINTS)), max_tokens=most, **values)
    prompt = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return Request(prompt, params)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(requests=st.lists(structured_request(), min_size=1, max_size=4), rows=st.integers(1, 5))
@pytest.mark.fast_cases(0)
def test_structured_output_with_all_parameters(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, requests: list[Request], rows: int
) -> None:
    engine = Engine(
        runner(kind, toy(), 30), llm.tokenizer, max_num_seqs=rows, max_num_batched_tokens=8, backend="reference"
    )
    for request, events in zip(requests, drive(engine, requests), strict=True):
        found = chunks_by_index(events, request.params.n)
        assert found == reference_chunks(toy(), llm.tokenizer, request, grammars), request
        for chunks in found:
            assert follows_grammar(grammars, request.params, chunks), request
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == sum(len(event.chunk.token_ids) for event in events)
    assert is_empty(engine)


def follows_grammar(grammars: GrammarCompiler, params: nc.SamplingParams, chunks: list[CompletionChunk]) -> bool:
    """Whether the tokens follow the grammar, and complete it unless something else ended the output."""
    assert params.structured_outputs is not None
    matcher = grammars.compile(params.structured_outputs).matcher(ignore_eos=params.ignore_eos)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    for index, token in enumerate(tokens):
        assert index == 0 or not matcher.terminated
        matcher.accept_token(token)
    reason, detail = chunks[-1].finish_reason, chunks[-1].stop_reason
    if matcher.terminated:
        return reason == "stop"
    return (reason, detail) != ("stop", None) or params.stop_json


def _joined(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.lists(st.sampled_from(["a", "b c", "ä", "key", 'q"', "x\\y", "🙂"]), max_size=3, unique=True)
    return st.one_of(
        st.builds(_object, names, st.lists(inner, min_size=3, max_size=3), st.integers(0, 3)),
        st.builds(lambda items, low, more: array(items, low, low + more), inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(_tuple, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=3)),
    )


def _object(names: list[str], schemas: list[Schema], optional: int) -> Schema:
    return closed(tuple(names[:optional]), **dict(zip(names, schemas, strict=False)))


def _tuple(schemas: list[Schema]) -> Schema:
    return {"type": "array", "prefixItems": schemas, "items": False, "minItems": len(schemas)}


def _referred(schema: Schema) -> Schema:
    """An object with the schema twice, by reference."""
    return {"$defs": {"it": schema}, **closed(one={"$ref": "#/$defs/it"}, two={"$ref": "#/$defs/it"})}


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.sampled_from([0.5, -1.25, "", "yes", "ü", "a\nb"])
)
_BOUNDS = st.tuples(st.integers(-120, 120), st.integers(0, 130)).map(lambda pair: (pair[0], pair[0] + pair[1]))
_PATTERNS = st.sampled_from(["^[a-f]{1,4}$", "^(?:ab|cd)+$", "^x", "[0-9]", "y$", "^$|^z{2}$", "^[^a-z]{3}$"])
_FORMATS = st.sampled_from(["date", "ipv4", "uuid", "email"])
LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["boolean", "null"]}]),
    st.builds(lambda bounds: integer(*bounds), _BOUNDS),
    st.builds(lambda bounds: {"type": "number", "minimum": bounds[0], "maximum": bounds[1]}, _BOUNDS),
    st.builds(lambda bounds: {"type": "number", "exclusiveMinimum": bounds[0] - 0.5, "maximum": bounds[1]}, _BOUNDS),
    st.builds(lambda least, k: integer(least, least + 3 * k, multipleOf=k), st.integers(-50, 50), st.integers(1, 12)),
    st.builds(lambda low, more: text(low + more, minLength=low), st.integers(0, 4), st.integers(0, 6)),
    st.builds(lambda pattern: text(12, pattern=pattern), _PATTERNS),
    st.builds(lambda name: text(40, format=name), _FORMATS),
    st.builds(lambda values: {"enum": values}, st.lists(_VALUES, min_size=1, max_size=5)),
    st.builds(lambda value: {"const": value}, _VALUES),
)
_SCHEMAS = st.recursive(LEAVES, _joined, max_leaves=6)
RANDOM = st.one_of(_SCHEMAS, _SCHEMAS, st.builds(_referred, _SCHEMAS))


# shrinking takes minutes
@pytest.mark.slow
@settings(max_examples=tiers.count(3, 10), phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    schemas=st.lists(RANDOM, min_size=10, max_size=10), seed=st.integers(0, 2**32), stage=st.sampled_from(STAGES[:4])
)
def test_outputs_of_random_schemas_are_valid(
    llm: nc.LLM, schemas: list[Schema], seed: int, stage: dict[str, Any]
) -> None:
    engine = Engine(runner("paged", toy(1024), 4000), llm.tokenizer)
    requests = [
        nc.SamplingParams(
            structured_outputs={"json_schema": schema, "whitespace": ("flexible", "none")[index % 2]},
            seed=seed,
            **stage,
        )
        for index, schema in enumerate(schemas)
    ]
    for schema, events in zip(schemas, drive(engine, [Request([5], params) for params in requests]), strict=True):
        written = "".join(event.chunk.text for event in events)
        if events[-1].chunk.finish_reason == "length":  # numbers may have unlimited digits
            continue
        assert (events[-1].chunk.finish_reason, events[-1].chunk.stop_reason) == ("stop", None), (schema, written)
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        assert [error.message for error in validator.iter_errors(json.loads(written))] == [], (schema, written)
        assert validate(StructuredOutputs(json_schema=schema), written, seconds=60) == []
