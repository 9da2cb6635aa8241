"""Structured output through the openai SDK: ``response_format``, ``structured_outputs`` and errors."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from server_process import Server
from test_openai_sdk import HELLO, KINDS, MODEL, added, ask, async_client, client_of, in_process, text

import nucleate as nc

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Toy(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    name: str = pydantic.Field(max_length=12)
    kind: Literal["car", "doll", "ball"]


class Child(pydantic.BaseModel):  # type: ignore[name-defined,misc]
    """A child with toys; the nested list has an optional last field."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    likes_rain: bool
    best: Toy
    others: list[Toy] = pydantic.Field(max_length=2)
    home: str | None = pydantic.Field(max_length=12)


SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": 0, "maximum": 99}, "a": {"enum": ["x", "y"]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
FEW = {"enum": [1, 2, 3], "multipleOf": 1}  # multipleOf, because uniqueItems of an enum alone is enforced
UNIQUE = {"type": "array", "items": FEW, "uniqueItems": True, "minItems": 2, "maxItems": 3}
MOST = {"max_tokens": 300, "seed": 11}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.fast_cases(2)
def test_a_pydantic_model_is_parsed(client: Any, seed: int) -> None:
    response = client.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Child, temperature=1.0, max_tokens=400, seed=seed
    )
    [choice] = response.choices
    assert isinstance(choice.message.parsed, Child)
    assert choice.finish_reason == "stop"
    assert [*json.loads(choice.message.content)] == [*Child.model_fields]
    assert Child.model_validate_json(choice.message.content) == choice.message.parsed


def test_a_stream_with_a_pydantic_model(client: Any) -> None:
    fields = {"model": MODEL, "messages": HELLO, "response_format": Child, "max_tokens": 400, "seed": 3}
    complete = client.chat.completions.parse(**fields)
    with client.chat.completions.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == complete.choices[0].message.parsed
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == complete.choices[0].message.content
    assert len(deltas) > 1  # chunks that are delayed are sent together
    snapshots = [event.parsed for event in events if event.type == "content.delta"]
    assert snapshots[-1] == json.loads(complete.choices[0].message.content)


def test_many_requests_with_different_constraints(server: Server) -> None:
    async def one(client: Any, number: int) -> None:
        constraint = schema_format({**SCHEMA, "properties": {**SCHEMA["properties"], "b": {"const": number}}})
        response = await ask(client, "chat", response_format=constraint, n=2, **{**MOST, "seed": number})
        assert [json.loads(text(choice))["b"] for choice in response.choices] == [number] * 2

    async def all_of_them() -> None:
        async with async_client(server) as client:
            await asyncio.gather(*(one(client, number) for number in range(24)))

    asyncio.run(all_of_them())


@KINDS
@pytest.mark.parametrize("more", [{}, {"strict": True}, {"strict": None, "description": "what it is"}], ids=str)
def test_a_strict_schema_is_enforced(client: Any, llm: nc.LLM, kind: str, more: dict[str, Any]) -> None:
    response = ask(client, kind, extra_body={"response_format": schema_format(SCHEMA, **more)}, **MOST)
    [choice] = response.choices
    assert [*json.loads(text(choice))] == ["b", "a"]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert not hasattr(choice, "validation")
    assert text(choice) == in_process(llm, kind, structured_outputs={"json_schema": SCHEMA}, **MOST).outputs[0].text


@KINDS
@pytest.mark.fast_cases(1)
def test_a_non_strict_schema_ignores_unsupported_keywords(client: Any, kind: str) -> None:
    constraint = schema_format(UNIQUE, strict=False)
    found = []
    for seed in range(6):
        [choice] = ask(client, kind, extra_body={"response_format": constraint}, max_tokens=99, seed=seed).choices
        value = json.loads(text(choice))
        assert choice.validation["ignored"] == ["uniqueItems"]
        assert bool(choice.validation["errors"]) == (len(set(value)) < len(value))
        with ask(
            client, kind, extra_body={"response_format": constraint}, max_tokens=99, seed=seed, stream=True
        ) as stream:
            *others, last = [choice for chunk in stream for choice in chunk.choices]
        assert last.validation == choice.validation
        assert not any(hasattr(other, "validation") for other in others)
        found.append(bool(choice.validation["errors"]))
    assert len(found) == 6


@KINDS
@pytest.mark.fast_cases(1)
def test_any_json_object(client: Any, kind: str) -> None:
    for seed in range(3):
        fields = {"max_tokens": 200, "seed": seed, "extra_body": {"response_format": {"type": "json_object"}}}
        [choice] = ask(client, kind, **fields).choices
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(text(choice)), dict)
        else:
            assert choice.finish_reason == "length"
            assert text(choice).startswith("{")


def test_the_text_format_changes_nothing(client: Any) -> None:
    for kind in ("completions", "chat"):
        free = ask(client, kind, seed=4)
        assert text(ask(client, kind, seed=4, extra_body={"response_format": {"type": "text"}}).choices[0]) == text(
            free.choices[0]
        )


PAIR = r'\{\s*"b"\s*:\s*\d\d?\s*,\s*"a"\s*:\s*"[xy]"\s*\}'
OUTPUTS: list[tuple[dict[str, Any], str]] = [
    ({"json": SCHEMA}, PAIR),
    ({"json": json.dumps(SCHEMA)}, PAIR),
    ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"b":\d\d?,"a":"[xy]"\}'),
    ({"regex": r"[A-Z][a-z]{2,8} [0-9]+\."}, r"[A-Z][a-z]{2,8} [0-9]+\."),
    ({"choice": ["a cat", "a dog", "neither of them"]}, "a cat|a dog|neither of them"),
    ({"grammar": 'start: "(" start ")" | "cat"'}, r"\(*cat\)*"),
    ({"grammar": 'root ::= ("a" | "b"){3} "!"'}, "[ab]{3}!"),
    ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
]


@KINDS
@pytest.mark.parametrize(("outputs", "pattern"), OUTPUTS, ids=[str(outputs)[:50] for outputs, _ in OUTPUTS])
@pytest.mark.fast_cases(3)
def test_the_structured_outputs_field_of_vllm(client: Any, kind: str, outputs: dict[str, Any], pattern: str) -> None:
    complete = ask(client, kind, extra_body={"structured_outputs": outputs}, n=3, **MOST)
    for choice in complete.choices:
        assert re.fullmatch(pattern, text(choice), re.DOTALL), text(choice)
    assert any(choice.finish_reason == "stop" for choice in complete.choices) or "json_object" in outputs
    with ask(client, kind, extra_body={"structured_outputs": outputs}, n=3, stream=True, **MOST) as stream:
        choices = [choice for chunk in stream for choice in chunk.choices]
    for choice in complete.choices:
        own = [one for one in choices if one.index == choice.index]
        assert "".join(map(added, own)) == text(choice)
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert own[-1].finish_reason == choice.finish_reason


@KINDS
def test_extension_fields_of_structured_outputs(client: Any, llm: nc.LLM, kind: str) -> None:
    one_of = {"oneOf": [{"enum": ["a cat"]}, {"type": "string", "maxLength": 5}]}
    structured_outputs = {"json_schema": one_of, "on_unsupported": "approximate", "whitespace": "none"}
    expected = in_process(llm, kind, structured_outputs=structured_outputs, **MOST).outputs[0]
    [choice] = ask(client, kind, extra_body={"structured_outputs": structured_outputs}, **MOST).choices
    assert (text(choice), choice.token_ids) == (expected.text, list(expected.token_ids))
    assert expected.validation is None or choice.validation["ignored"] == list(expected.validation.ignored)


@KINDS
def test_logprobs_and_stops_with_structured_output(client: Any, kind: str) -> None:
    logprob_fields = {"logprobs": True, "top_logprobs": 2} if kind == "chat" else {"logprobs": 2}
    constraint = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    [choice] = ask(client, kind, extra_body=constraint, **logprob_fields, **MOST).choices
    count = len(choice.logprobs.content) if kind == "chat" else len(choice.logprobs.tokens)
    assert count == len(choice.token_ids)
    [bare] = ask(client, kind, extra_body=constraint, **MOST).choices
    assert text(bare) == text(choice)
    [cut] = ask(client, kind, extra_body=constraint, stop=',"a"', **MOST).choices
    assert text(cut) == text(bare).partition(',"a"')[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", ',"a"')


REJECTED: list[tuple[str, Any, str]] = [
    ("response_format", {"type": "xml"}, "type must be one of text, json_object, json_schema, structural_tag"),
    ("response_format", {"type": "json_schema"}, "json_schema must be an object"),
    ("response_format", schema_format({"type": "strnig"}), "schema: Invalid type: strnig"),
    (
        "response_format",
        schema_format(UNIQUE),
        'cannot enforce uniqueItems; set on_unsupported="ignore" to ignore it (in response_format: "st',
    ),
    ("response_format", schema_format(SCHEMA, name="no name"), "json_schema.name must be"),
    ("response_format", schema_format(SCHEMA, strict=1), "json_schema.strict must be"),
    ("structured_outputs", {"json": UNIQUE}, "json: cannot enforce uniqueItems"),
    ("structured_outputs", {"regex": "(?=a)b"}, "structured_outputs.regex: "),
    ("structured_outputs", {"regex": "("}, "structured_outputs.regex: at offset 0: ( is never closed"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice must be"),
    ("structured_outputs", {"grammar": "start: nothing"}, 'unknown name: "nothing"'),
    ("structured_outputs", {"regex": "a", "json_object": True}, "exactly one of"),
    ("structured_outputs", {"json_object": True, "structural_tag": "{}"}, "got json_object and structural_tag"),
    ("structured_outputs", {"json_object": True, "whitespace_pattern": " "}, "whitespace_pattern is not supported"),
    (
        "structured_outputs",
        {"json_schema": {"uniqueItems": True}},
        "structured_outputs.json_schema: cannot enforce uniqueItems",
    ),
    ("structured_outputs", {"regexx": "a"}, "did you mean regex?"),
    ("guided_json", SCHEMA, "use structured_outputs.json"),
]


@KINDS
@pytest.mark.parametrize(("field", "value", "words"), REJECTED, ids=[words[:40] for *_, words in REJECTED])
def test_an_unsupported_constraint_is_a_bad_request(client: Any, kind: str, field: str, value: Any, words: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, kind, extra_body={field: value}, stream=stream)
        error = caught.value
        assert (error.param, error.type, error.status_code) == (field, "invalid_request_error", 400)
        assert words in error.body["message"]
        assert len(error.body["message"]) < 500


@KINDS
def test_two_constraints_are_a_bad_request(client: Any, kind: str) -> None:
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, kind, extra_body=both)
    assert caught.value.param == "structured_outputs"
    assert "cannot be combined" in caught.value.body["message"]
