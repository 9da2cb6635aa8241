"""Structured output, tools and reasoning through the openai SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import chat_models
import pytest
from server_process import Server
from test_openai_sdk import HELLO, MODEL, client_of

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


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MOST = {"max_tokens": 300, "seed": 11}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


@pytest.mark.slow
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


ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get it.", "parameters": WEATHER, "strict": True},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = chat_models.folder(tmp_path_factory.mktemp("model"), chat_models.OPENED)
    with Server("--model", str(folder), "--served-model-name", MODEL) as running, client_of(running) as made:
        yield made


def ask_about(client: Any, **fields: Any) -> Any:
    values = {"model": MODEL, "messages": ASK, "max_tokens": 200, "seed": 1, "tools": [TOOL], **fields}
    return client.chat.completions.create(**values)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_and_its_result(client: Any, choice: Any) -> None:
    completion = ask_about(client, tool_choice=choice, parallel_tool_calls=False)
    (chosen,) = completion.choices
    assert (chosen.finish_reason, chosen.message.content) == ("tool_calls", None)
    (call,) = chosen.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    again = ask_about(client, messages=[*ASK, chosen.message, result], max_tokens=10)
    assert again.choices[0].message.tool_calls is None
    assert again.choices[0].message.content


@pytest.mark.slow
def test_a_stream_of_calls_adds_up_to_the_response(client: Any) -> None:
    fields = {"tool_choice": "required", "n": 2, "temperature": 2.0}
    whole = ask_about(client, **fields)
    calls: dict[tuple[int, int], dict[str, Any]] = {}
    reasons = {}
    for chunk in ask_about(client, **fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            for delta in choice.delta.tool_calls or ():
                key = choice.index, delta.index
                if key not in calls:
                    assert delta.id
                    assert delta.type == "function"
                    assert delta.function.arguments == ""
                    calls[key] = {"name": delta.function.name, "arguments": ""}
                else:
                    assert delta.id is None
                    assert delta.function.name is None
                    calls[key]["arguments"] += delta.function.arguments
    for choice in whole.choices:
        assert reasons[choice.index] == choice.finish_reason
        own = [calls[key] for key in sorted(calls) if key[0] == choice.index]
        made = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls or ()]
        assert own[: len(made)] == made
        assert choice.finish_reason == "length" or own == made


def test_response_format_and_tools(client: Any) -> None:
    schema = schema_format(WEATHER)
    for seed in range(3):
        message = ask_about(client, response_format=schema, seed=seed, temperature=2.0).choices[0].message
        assert message.tool_calls or json.loads(message.content)["city"] in ("Paris", "Rome")
    message = ask_about(client, response_format=schema, tool_choice="required").choices[0].message
    assert message.tool_calls
    with pytest.raises(openai.BadRequestError) as caught:
        ask_about(client, tool_choice="required", extra_body={"structured_outputs": {"regex": "a"}})
    assert caught.value.param == "structured_outputs"


def test_a_strict_schema_that_cannot_be_enforced(client: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=a)"}}}
    with pytest.raises(openai.BadRequestError, match="pattern") as caught:
        ask_about(client, tools=[{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])
    assert caught.value.param == "tools"
    assert ask_about(
        client, tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}], max_tokens=5
    )


@pytest.mark.slow
def test_reasoning(reasoning: Any) -> None:
    values = {"tools": openai.omit, "max_tokens": 40, "reasoning_effort": "low"}
    limited = {"max_reasoning_tokens": 12, "ignore_eos": True}
    whole = ask_about(reasoning, **values, extra_body=limited)
    message = whole.choices[0].message
    assert message.reasoning_content == message.reasoning
    assert message.reasoning
    assert message.content
    assert whole.usage.completion_tokens_details.reasoning_tokens == 12
    silent = {"include_reasoning": False, "thinking_token_budget": 12, "ignore_eos": True}
    without = ask_about(reasoning, **values, extra_body=silent)
    assert without.choices[0].message.content == message.content
    assert without.usage.completion_tokens_details == whole.usage.completion_tokens_details
    assert not {"reasoning", "reasoning_content"} & without.choices[0].message.model_dump().keys()
    streamed = ask_about(reasoning, **values, extra_body=silent, stream=True)
    deltas = [choice.delta.model_dump() for chunk in streamed for choice in chunk.choices]
    assert "".join(delta["content"] or "" for delta in deltas) == message.content
    assert not any("reasoning" in delta for delta in deltas)
    deltas, usage = [], None
    for chunk in ask_about(
        reasoning, **values, extra_body=limited, stream=True, stream_options={"include_usage": True}
    ):
        deltas += [choice.delta for choice in chunk.choices]
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens_details.reasoning_tokens == 12
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning
    assert "".join(delta.content or "" for delta in deltas) == message.content


@pytest.mark.slow
def test_calls_and_structured_output_after_reasoning(reasoning: Any) -> None:
    limited = {"max_reasoning_tokens": 12}
    message = ask_about(reasoning, tool_choice=NAMED, extra_body=limited).choices[0].message
    assert message.reasoning
    assert message.content is None
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
    schema = schema_format(WEATHER)
    message = ask_about(reasoning, tools=openai.omit, response_format=schema, extra_body=limited).choices[0].message
    assert message.reasoning
    assert json.loads(message.content)["city"] in ("Paris", "Rome")
