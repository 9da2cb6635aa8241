"""Structured outputs of the embedded model: each conforms, or ends by length."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest
import regex
import tiers
from grammar_examples import CHOICES, OPEN, PATTERNS, SCHEMAS

import nucleate as nc
from nucleate.outputs import CompletionOutput
from nucleate.structured_output import GrammarCompiler, StructuredOutputs

PROMPTS = ("Once upon a time", "The little dog", '{"name": "', "Answer: ")
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 1.4, "min_p": 0.02, "frequency_penalty": 0.5},
    {"temperature": 0.8, "logprobs": 2},
    {"temperature": 1.1, "dry_multiplier": 0.8, "logit_bias": {300: 2.0}},
    {"mirostat_tau": 4.0, "min_tokens": 5},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.05, "n": 2},
]
STREAMED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}
MAY_REPEAT = {"names of a pattern", "other names are numbers"}
"""Schemas with names that are not listed: no grammar remembers which of them it has seen; JSON's last one counts."""


def requests(structured_outputs: dict[str, Any], index: int) -> list[nc.SamplingParams]:
    """Nine settings for one constraint."""
    return [
        nc.SamplingParams(structured_outputs=structured_outputs, seed=1000 * index + number, **values)
        for number, values in enumerate(SETTINGS)
    ]


def outputs(llm: nc.LLM, constraints: list[dict[str, Any]]) -> list[list[CompletionOutput]]:
    """Ten outputs for each constraint: nine from one batch, one streamed."""
    params_list = [
        params for index, structured_outputs in enumerate(constraints) for params in requests(structured_outputs, index)
    ]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params_list))]
    done = iter(llm.generate(prompts, params_list))
    found = [[output for _ in SETTINGS for output in next(done).outputs] for _ in constraints]
    for index, structured_outputs in enumerate(constraints):
        params = nc.SamplingParams(structured_outputs=structured_outputs, seed=index, **STREAMED)
        chunks = list(llm.stream(PROMPTS[index % len(PROMPTS)], params))
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        found[index].append(nc.Completion.from_chunks((1,), chunks).outputs[0])
    assert {len(each) for each in found} == {10}
    return found


def validation_errors(schema: dict[str, Any], text: str, *, may_repeat: bool = False) -> list[str]:
    """The errors of a text, from an independent validator."""
    value = json.loads(text, parse_constant=_never, object_pairs_hook=dict if may_repeat else _once)
    judge = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})
    return [error.message for error in judge(schema, format_checker=FORMATS).iter_errors(value)]


def _never(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a name twice in {pairs}"
    return dict(pairs)


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):  # in JSON schemas, \d is 0 to 9
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)
_PART = r"(?:\d+{}(?:\d+{}(?:\d+{})?)?|\d+{}(?:\d+{})?|\d+{})"
_DATES, _TIMES = (_PART.format(*"".join((units, units[1:], units[2:]))) for units in ("YMD", "HMS"))
_DURATION = re.compile(rf"P(?:{_DATES}(?:T{_TIMES})?|T{_TIMES}|\d+W)", re.ASCII)


@FORMATS.checks("time")
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or _TIME.fullmatch(text) is not None


@FORMATS.checks("date-time", raises=ValueError)
def _is_moment(text: object) -> bool:
    if not isinstance(text, str):
        return True
    dt.date.fromisoformat(text[:10])
    return text[10:11] in ("T", "t") and _is_time(text[11:])


@FORMATS.checks("duration")
def _is_duration(text: object) -> bool:
    return not isinstance(text, str) or _DURATION.fullmatch(text) is not None


@pytest.mark.slow
def test_outputs_of_fifty_schemas_are_valid(llm: nc.LLM) -> None:
    constraints = [
        {"json_schema": schema, "whitespace": "none" if index % 2 else "flexible"}
        for index, schema in enumerate(SCHEMAS.values())
    ]
    assert len(constraints) == 50
    some = slice(None, None, tiers.count(15, 1))
    grammars = GrammarCompiler(llm.tokenizer, llm.model.vocab_size)
    without_end: Counter[str] = Counter()
    for (name, schema), structured_outputs, each in zip(
        list(SCHEMAS.items())[some], constraints[some], outputs(llm, constraints[some]), strict=True
    ):
        for output in each:
            if output.finish_reason == "length":
                assert name in OPEN, (name, output.text[-200:])
                assert is_unfinished_prefix(grammars, structured_outputs, output.token_ids)
                without_end[name] += 1
            else:
                assert (output.finish_reason, output.stop_reason) == ("stop", None), (name, output)
                assert validation_errors(schema, output.text, may_repeat=name in MAY_REPEAT) == [], (name, output.text)
            assert output.validation is None
    assert without_end.total() <= 10, without_end


def is_unfinished_prefix(
    grammars: GrammarCompiler, structured_outputs: dict[str, Any], tokens: tuple[int, ...]
) -> bool:
    """Whether tokens are an unfinished prefix under a constraint."""
    matcher = grammars.compile(StructuredOutputs(**structured_outputs)).matcher()
    for token in tokens:
        matcher.accept_token(token)
    return not matcher.terminated


@pytest.mark.slow
def test_outputs_match_their_pattern(llm: nc.LLM) -> None:
    assert len(PATTERNS) == 20
    for pattern, each in zip(PATTERNS, outputs(llm, [{"regex": pattern} for pattern in PATTERNS]), strict=True):
        for output in each:
            assert (output.finish_reason, output.stop_reason) == ("stop", None), (pattern, output)
            assert regex.fullmatch(pattern, output.text), (pattern, output.text)


@pytest.mark.slow
def test_outputs_are_one_of_the_choices(llm: nc.LLM) -> None:
    assert len(CHOICES) == 20
    for texts, each in zip(CHOICES, outputs(llm, [{"choice": texts} for texts in CHOICES]), strict=True):
        for output in each:
            assert (output.finish_reason, output.stop_reason) == ("stop", None), (texts, output)
            assert output.text in texts
