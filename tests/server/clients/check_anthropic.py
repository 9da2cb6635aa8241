"""Anthropic's SDK for Python, on the Messages API."""

from __future__ import annotations

from typing import Any

import anthropic
import checks
from anthropic import Anthropic, beta_tool
from checks import MODEL, equal, raises, used

client = Anthropic(base_url=checks.URL, api_key=checks.KEY)
TOOL: Any = {"name": "get_weather", "description": "Get the weather.", "input_schema": checks.WEATHER_SCHEMA}
SAMPLED = {"max_tokens": 16, "extra_body": {"seed": 7, "temperature": 0.9}}  # not an argument of the SDK any more


get_weather = beta_tool(checks.get_weather)


def given(question: str = checks.STORY, **fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 200, **fields}


def ask(question: str = checks.STORY, **fields: Any) -> Any:
    return client.messages.create(**given(question, **fields))


def chat() -> None:
    message = ask(**SAMPLED)
    assert message.content[0].text
    equal((message.stop_reason, message.usage.output_tokens), ("max_tokens", 16))
    counted = client.messages.count_tokens(model=MODEL, messages=given()["messages"])
    equal(counted.input_tokens, message.usage.input_tokens + message.usage.cache_read_input_tokens)


def stream() -> None:
    with client.messages.stream(**given(**SAMPLED)) as events:
        text = "".join(events.text_stream)
        equal(events.get_final_message().usage.output_tokens, 16)
    equal(text, ask(**SAMPLED).content[0].text)


def stop() -> None:
    message = ask(**SAMPLED, stop_sequences=[" a"])
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", " a"))


def parameters() -> None:
    bodies = [{"top_k": 1, "min_p": 0.1, "seed": seed} for seed in (1, 2)]
    texts = [ask(max_tokens=16, extra_body=body).content[0].text for body in bodies]
    equal(texts[0], texts[1])


def schema() -> None:
    assert isinstance(client.messages.parse(**given("Who?"), output_format=checks.Hero).parsed_output, checks.Hero)


def tool() -> None:
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
        message = ask(tools=[TOOL], tool_choice=choice)
        equal((message.stop_reason, message.content[-1].name), ("tool_use", "get_weather"))


def auto() -> None:
    message = ask(checks.PARIS, tools=[TOOL])
    equal([(block.name, block.input) for block in message.content], [("get_weather", {"city": "Paris"})])


def parallel() -> None:
    equal([block.input["city"] for block in ask(checks.BOTH, tools=[TOOL]).content], ["Paris", "Rome"])


def streamed_call() -> None:
    with client.messages.stream(**given(checks.BOTH, tools=[TOOL])) as events:
        kinds = {event.type for event in events}
        equal([block.input["city"] for block in events.get_final_message().content], ["Paris", "Rome"])
    assert "input_json" in kinds


def loop() -> None:
    used.clear()
    message = ask(checks.PARIS, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": checks.SUNNY}
    turns = [
        {"role": "user", "content": checks.PARIS},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    equal(ask(messages=turns, tools=[TOOL]).content[0].text, checks.ANSWER)
    runner = client.beta.messages.tool_runner(**given(checks.BOTH), tools=[get_weather])
    equal(runner.until_done().content[0].text, f"{checks.ANSWER} Sunny in Rome.")
    equal(sorted(used), ["Paris", "Rome"])


def reasoning() -> None:
    thought, answer = ask(checks.THINK, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=512).content
    equal((thought.thinking, answer.text), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def errors() -> None:
    raises(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": -1}))
    raises(anthropic.NotFoundError, lambda: ask(model="other"))


NOTES = {"loop": "also with `tool_runner`, which first asks for a thread and then does without"}
ABSENT = {"completions": "no API for it", "logprobs": "not in Anthropic's API", "responses": "not in Anthropic's API"}
checks.run("anthropic")
