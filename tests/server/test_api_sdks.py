"""The SDKs of OpenAI (responses), Anthropic and Ollama against a server process.

Install them with `pip install openai anthropic ollama`. A missing one skips its tests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import pytest
from server_process import Server, wait_until

pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MODEL, KEY = "nucleate-tiny", "sk-a-key-for-the-tests"
STORY = "Tell me a story about a cat."
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
RESPONSE_TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA}
RUNNING, WAITING = "nucleate_num_requests_running", "nucleate_num_requests_waiting"


class Hero(pydantic.BaseModel, extra="forbid"):
    """A structured output."""

    name: Literal["Tom", "Lily"]
    brave: bool


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with Server("--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def reasoning() -> Iterator[Server]:
    with Server("--reasoning-parser", "qwen3") as running:
        yield running


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes the clients of a test."""
    with ExitStack() as made:
        yield made


def openai_of(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60.0)


def anthropic_of(server: Server) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60.0)


def ollama_of(server: Server) -> Any:
    ollama = pytest.importorskip("ollama")
    return ollama.Client(host=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=60.0)


def is_idle(server: Server) -> bool:
    headers = {"authorization": f"Bearer {KEY}"}
    return server.metric(RUNNING, headers) == server.metric(WAITING, headers) == 0


def test_openai_responses(guarded: Server, stack: ExitStack) -> None:
    client = stack.enter_context(openai_of(guarded))
    given = {"model": MODEL, "input": STORY, "max_output_tokens": 12, "extra_body": {"seed": 3, "min_p": 0.05}}
    whole = client.responses.create(**given)
    assert (whole.status, whole.incomplete_details.reason, whole.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        12,
    )
    found = [*client.responses.create(**given, stream=True)]
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text
    assert found[-1].response.output_text == whole.output_text
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": STORY}], max_tokens=12, extra_body={"seed": 3, "min_p": 0.05}
    )
    assert chat.choices[0].message.content == whole.output_text
    parsed = client.responses.parse(model=MODEL, input=STORY, text_format=Hero, extra_body={"seed": 3})
    assert isinstance(parsed.output_parsed, Hero)
    with client.responses.stream(model=MODEL, input=STORY, text_format=Hero, extra_body={"seed": 3}) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Hero)


def test_openai_responses_with_tools(guarded: Server, stack: ExitStack) -> None:
    client = stack.enter_context(openai_of(guarded))
    given = {"model": MODEL, "tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "f"}}
    given["extra_body"] = {"seed": 3}
    [call] = client.responses.create(input=STORY, **given).output
    assert (call.type, call.name, [*json.loads(call.arguments)]) == ("function_call", "f", ["a"])
    with client.responses.stream(input=STORY, **given) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert [*streamed.parsed_arguments] == ["a"]
    result = {"type": "function_call_output", "call_id": streamed.call_id, "output": "yes"}
    sent = [{"role": "user", "content": STORY}, streamed.to_dict(), result]
    sent[1].pop("parsed_arguments", None)
    after = client.responses.create(model=MODEL, input=sent, tools=[RESPONSE_TOOL], max_output_tokens=8)
    assert after.output_text


def test_openai_responses_with_reasoning(reasoning: Server, stack: ExitStack) -> None:
    client = stack.enter_context(openai_of(reasoning))
    given = {
        "model": MODEL,
        "input": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "<think>"}],
        "max_output_tokens": 16,
        "extra_body": {"continue_final_message": True, "max_reasoning_tokens": 4, "ignore_eos": True, "seed": 3},
    }
    whole = client.responses.create(**given)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.usage.output_tokens_details.reasoning_tokens >= 4
    found = [*client.responses.create(**given, stream=True)]
    text = "".join(event.delta for event in found if event.type == "response.reasoning_text.delta")
    assert text == whole.output[0].content[0].text
    again = [*given["input"][:1], *(item.to_dict() for item in whole.output), given["input"][0]]
    assert client.responses.create(model=MODEL, input=again, max_output_tokens=4).output


def test_openai_responses_errors(guarded: Server, stack: ExitStack) -> None:
    openai = pytest.importorskip("openai")
    client = stack.enter_context(openai_of(guarded))
    for field, value in (("previous_response_id", "resp_1"), ("background", True), ("max_output_tokens", 10**6)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input=STORY, **{field: value})
        assert caught.value.param == field


def test_anthropic_messages(guarded: Server, stack: ExitStack) -> None:
    client = stack.enter_context(anthropic_of(guarded))
    given = {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 12,
        "extra_body": {"seed": 3},
    }
    whole = client.messages.create(**given, system=[{"type": "text", "text": "Be brief"}])
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**given, system="Be brief") as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [whole.content[0].text]
    first, second = whole.usage, final.usage
    assert second.output_tokens == 12
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens
    stopped = client.messages.create(
        **{**given, "max_tokens": 200, "extra_body": {"temperature": 0}}, stop_sequences=["."]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ".")
    counted = client.messages.count_tokens(model=MODEL, messages=given["messages"], system="Be brief")
    assert counted.input_tokens == first.input_tokens + first.cache_read_input_tokens
    parsed = client.messages.parse(**{**given, "max_tokens": 200}, output_format=Hero)
    assert isinstance(parsed.parsed_output, Hero)


def test_anthropic_messages_with_tools(guarded: Server, stack: ExitStack) -> None:
    client = stack.enter_context(anthropic_of(guarded))
    ask = {"role": "user", "content": STORY}
    given = {"model": MODEL, "messages": [ask], "max_tokens": 200, "tools": [TOOL], "extra_body": {"seed": 3}}
    for choice in ({"type": "tool", "name": "f"}, {"type": "any", "disable_parallel_tool_use": True}):
        whole = client.messages.create(**given, tool_choice=choice)
        assert (whole.stop_reason, whole.content[0].name, [*whole.content[0].input]) == ("tool_use", "f", ["a"])
    with client.messages.stream(**given, tool_choice={"type": "tool", "name": "f"}) as stream:
        kinds = {event.type for event in stream}
        [use] = stream.get_final_message().content
    assert {"input_json", "content_block_stop", "message_stop"} <= kinds
    assert [*use.input] == ["a"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "yes"}]}
    after = client.messages.create(
        **{**given, "messages": [ask, {"role": "assistant", "content": [use]}, result]}, tool_choice={"type": "none"}
    )
    assert [block.type for block in after.content] == ["text"]


def test_anthropic_messages_with_thinking(reasoning: Server, stack: ExitStack) -> None:
    client = stack.enter_context(anthropic_of(reasoning))
    given = {
        "model": MODEL,
        "messages": [{"role": "user", "content": STORY}, {"role": "assistant", "content": "<think>"}],
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "f"},
        "max_tokens": 200,
        "extra_body": {"seed": 3},
    }
    whole = client.messages.create(**given)
    assert [block.type for block in whole.content] == ["thinking", "tool_use"]
    with client.messages.stream(**given) as stream:
        thinking = "".join(event.thinking for event in stream if event.type == "thinking")
    assert thinking == whole.content[0].thinking
    turns = [given["messages"][0], {"role": "assistant", "content": whole.content}]
    turns.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": whole.content[1].id, "content": "ok"}]}
    )
    assert client.messages.create(model=MODEL, messages=turns, tools=[TOOL], max_tokens=4).content


def test_anthropic_messages_errors(guarded: Server, stack: ExitStack) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = stack.enter_context(anthropic_of(guarded))
    given = {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "max_tokens": 5}
    for fields, kind in (
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError),
    ):
        with pytest.raises(kind):
            client.messages.create(**{**given, **fields})
    other = stack.enter_context(anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0))
    with pytest.raises(anthropic.AuthenticationError):
        other.messages.create(**given)


def test_anthropic_streams_are_cancelled(guarded: Server) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as client:
            given = {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "max_tokens": 900}
            async with client.messages.stream(**given, extra_body={"ignore_eos": True}) as stream:
                async for _ in stream.text_stream:
                    break

    asyncio.run(main())
    wait_until(lambda: is_idle(guarded), 30)


def test_ollama(guarded: Server, stack: ExitStack) -> None:
    client = stack.enter_context(ollama_of(guarded))
    assert [model.model for model in client.list().models] == [MODEL]
    assert "tools" in client.show(MODEL).capabilities
    messages, options = [{"role": "user", "content": STORY}], {"num_predict": 12, "seed": 3, "min_p": 0.05}
    whole = client.chat(MODEL, messages, options=options)
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 12)
    parts = [*client.chat(f"{MODEL}:latest", messages, options=options, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    shown = client.chat(MODEL, messages, options=options, logprobs=True, top_logprobs=2)
    assert "".join(step.token for step in shown.logprobs) == whole.message.content
    assert Hero.model_validate_json(
        client.chat(MODEL, messages, format=Hero.model_json_schema(), options={"seed": 3}).message.content
    )
    generated = client.generate(MODEL, STORY, options=options)
    assert generated.response == whole.message.content
    parts = [*client.generate(MODEL, "Once upon", raw=True, options=options, stream=True)]
    assert "".join(part.response for part in parts)
    with pytest.raises(Exception, match="frob"):
        client.chat(MODEL, messages, options={"frob": 1})


def test_ollama_with_tools_and_thinking(reasoning: Server, stack: ExitStack) -> None:
    client = stack.enter_context(ollama_of(reasoning))

    def f(a: bool) -> str:
        """Do it.

        Args:
            a: whether
        """
        return "yes"

    ask = {"role": "user", "content": STORY}
    turns = [ask, {"role": "assistant", "content": "<think>"}]
    given = {"think": True, "options": {"max_reasoning_tokens": 4, "num_predict": 16, "seed": 3, "ignore_eos": True}}
    whole = client.chat(MODEL, turns, tools=[f], **given)
    assert whole.message.thinking
    parts = [*client.chat(MODEL, turns, tools=[f], stream=True, **given)]
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    assert "".join(part.message.content for part in parts) == whole.message.content
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": True}}}]}
    after = client.chat(
        MODEL, [ask, call, {"role": "tool", "content": "yes", "tool_name": "f"}], tools=[f], options={"num_predict": 4}
    )
    assert after.eval_count == 4


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "protocols.md").read_text("utf-8"), re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.split()[1])
def test_the_examples_of_the_docs_run(server: Server, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(code.split()[1])
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), "<example>", "exec"), names)
    names["client"].close()
    assert len(capsys.readouterr().out) > 20
