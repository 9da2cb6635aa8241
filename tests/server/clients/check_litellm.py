"""litellm, with the provider `openai`."""

from __future__ import annotations

import json
from typing import Any

import checks
import litellm
from checks import MODEL, equal, raises

SERVER = {"api_base": f"{checks.URL}/v1", "api_key": checks.KEY, "num_retries": 0}


def ask(question: str = checks.STORY, **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return litellm.completion(
        **{**SERVER, "model": f"openai/{MODEL}", "messages": messages, **checks.SAMPLED, **fields}
    )


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def chat() -> None:
    response = ask()
    assert response.choices[0].message.content
    equal(response.usage.completion_tokens, 16)


def stream() -> None:
    chunks = [*ask(stream=True, stream_options={"include_usage": True})]
    built = litellm.stream_chunk_builder(chunks)
    equal(built.choices[0].message.content, ask().choices[0].message.content)
    equal(built.usage.completion_tokens, 16)


def completions() -> None:
    given = {**SERVER, "model": f"text-completion-openai/{MODEL}", "prompt": checks.PROMPT, **checks.SAMPLED}
    text = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**given, stream=True))
    equal(text, litellm.text_completion(**given).choices[0].text)


def stop() -> None:
    choice = ask(stop=" a").choices[0]
    equal(choice.finish_reason, "stop")
    assert ask().choices[0].message.content.startswith(f"{choice.message.content} a")


def logprobs() -> None:
    steps = ask(logprobs=True, top_logprobs=2).choices[0].logprobs["content"]
    equal([len(step["top_logprobs"]) for step in steps], [2] * 16)


def parameters() -> None:
    texts = [ask(seed=seed, top_k=1, min_p=0.1).choices[0].message.content for seed in (1, 2)]
    equal(texts[0], texts[1])


def schema() -> None:
    content = ask("Who?", response_format=checks.Hero, max_tokens=100).choices[0].message.content
    checks.Hero.model_validate_json(content)


def tool() -> None:
    message = ask(tools=[checks.WEATHER_TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    equal(calls_of(message.choices[0].message)[0][0], "get_weather")


def auto() -> None:
    choice = ask(checks.PARIS, tools=[checks.WEATHER_TOOL], max_tokens=100).choices[0]
    equal((choice.finish_reason, calls_of(choice.message)), ("tool_calls", [("get_weather", {"city": "Paris"})]))


def parallel() -> None:
    message = ask(checks.BOTH, tools=[checks.WEATHER_TOOL], max_tokens=200).choices[0].message
    equal([arguments["city"] for _, arguments in calls_of(message)], ["Paris", "Rome"])


def streamed_call() -> None:
    chunks = [*ask(checks.BOTH, tools=[checks.WEATHER_TOOL], max_tokens=200, stream=True)]
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    equal([arguments["city"] for _, arguments in calls_of(message)], ["Paris", "Rome"])


def loop() -> None:
    message = ask(checks.PARIS, tools=[checks.WEATHER_TOOL], max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": checks.SUNNY}
    messages = [{"role": "user", "content": checks.PARIS}, message, result]
    equal(ask(messages=messages, tools=[checks.WEATHER_TOOL]).choices[0].message.content, checks.ANSWER)


def reasoning() -> None:
    message = ask(checks.THINK, max_tokens=40).choices[0].message
    equal((message.reasoning_content, message.content), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def responses() -> None:
    tool = {"type": "function", **checks.WEATHER_TOOL["function"]}
    given = {**SERVER, "model": f"openai/{MODEL}", "input": checks.PARIS}
    (call,) = litellm.responses(**given, tools=[tool]).output
    equal(json.loads(call.arguments), {"city": "Paris"})
    events = [*litellm.responses(**{**given, "input": checks.STORY}, max_output_tokens=16, stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")


def errors() -> None:
    raises(litellm.BadRequestError, lambda: ask(temperature=-1))
    raises(litellm.ContextWindowExceededError, lambda: ask("word " * 3000))
    raises(litellm.NotFoundError, lambda: ask(model="openai/other"))


checks.run("litellm")
