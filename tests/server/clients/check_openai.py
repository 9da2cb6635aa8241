"""OpenAI's SDK for Python."""

from __future__ import annotations

import json
from typing import Any

import checks
import openai
from checks import MODEL, equal, raises
from openai import OpenAI

client = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY)


def ask(question: str = checks.STORY, **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(**{"model": MODEL, "messages": messages, **checks.SAMPLED, **fields})


def call_of(message: Any) -> tuple[str, Any]:
    (call,) = message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


def chat() -> None:
    response = ask()
    assert response.choices[0].message.content
    equal(response.usage.completion_tokens, 16)


def stream() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal(text, ask().choices[0].message.content)
    equal(chunks[-1].usage.completion_tokens, 16)


def completions() -> None:
    given = {"model": MODEL, "prompt": checks.PROMPT, **checks.SAMPLED}
    equal(
        "".join(c.choices[0].text for c in client.completions.create(**given, stream=True)),
        client.completions.create(**given).choices[0].text,
    )


def stop() -> None:
    choice = ask(stop=" a").choices[0]
    equal(choice.finish_reason, "stop")
    assert ask().choices[0].message.content.startswith(f"{choice.message.content} a")


def logprobs() -> None:
    steps = ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    equal([len(step.top_logprobs) for step in steps], [2] * 16)


def parameters() -> None:
    texts = [ask(seed=seed, extra_body={"top_k": 1, "min_p": 0.1}).choices[0].message.content for seed in (1, 2)]
    equal(texts[0], texts[1])


def schema() -> None:
    given = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "response_format": checks.Hero}
    assert isinstance(client.chat.completions.parse(**given).choices[0].message.parsed, checks.Hero)
    with client.chat.completions.stream(**given) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, checks.Hero)


def tool() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = ask(tools=[checks.WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=100)
        equal(call_of(message.choices[0].message)[0], "get_weather")


def auto() -> None:
    choice = ask(checks.PARIS, tools=[checks.WEATHER_TOOL], max_tokens=100).choices[0]
    equal(choice.finish_reason, "tool_calls")
    equal(call_of(choice.message), ("get_weather", {"city": "Paris"}))


def parallel() -> None:
    calls = ask(checks.BOTH, tools=[checks.WEATHER_TOOL], max_tokens=200).choices[0].message.tool_calls
    equal([json.loads(call.function.arguments)["city"] for call in calls], ["Paris", "Rome"])


def streamed_call() -> None:
    given = {"model": MODEL, "messages": [{"role": "user", "content": checks.PARIS}], "tools": [checks.WEATHER_TOOL]}
    with client.chat.completions.stream(**given) as events:
        kinds = {event.type for event in events}
        equal(call_of(events.get_final_completion().choices[0].message), ("get_weather", {"city": "Paris"}))
    assert "tool_calls.function.arguments.done" in kinds


def loop() -> None:
    message = ask(checks.PARIS, tools=[checks.WEATHER_TOOL], max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": checks.SUNNY}
    messages = [{"role": "user", "content": checks.PARIS}, message, result]
    equal(ask(messages=messages, tools=[checks.WEATHER_TOOL]).choices[0].message.content, checks.ANSWER)


def reasoning() -> None:
    message = ask(checks.THINK, max_tokens=40).choices[0].message
    equal((message.reasoning_content, message.content), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def responses() -> None:
    tool = {"type": "function", "strict": True, **checks.WEATHER_TOOL["function"]}
    first = client.responses.create(model=MODEL, input=checks.PARIS, tools=[tool])
    (call,) = first.output
    equal(json.loads(call.arguments), {"city": "Paris"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": checks.SUNNY}
    turns = [{"role": "user", "content": checks.PARIS}, *first.output, result]
    equal(client.responses.create(model=MODEL, input=turns, tools=[tool]).output_text, checks.ANSWER)
    with client.responses.stream(model=MODEL, input=turns, tools=[tool]) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    equal(text, checks.ANSWER)
    parsed = client.responses.parse(model=MODEL, input="Who?", text_format=checks.Hero)
    assert isinstance(parsed.output_parsed, checks.Hero)


def errors() -> None:
    equal(raises(openai.BadRequestError, lambda: ask(temperature=-1)).param, "temperature")
    raises(openai.NotFoundError, lambda: ask(model="other"))


checks.run("openai")
