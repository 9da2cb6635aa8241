"""Ollama's SDK for Python, on Ollama's API."""

from __future__ import annotations

from typing import Any

import checks
import ollama
from checks import MODEL, equal, get_weather, raises, used

client = ollama.Client(host=checks.URL)
OPTIONS = {"temperature": 0.9, "seed": 7, "num_predict": 16}


def ask(question: str = checks.STORY, **fields: Any) -> Any:
    return client.chat(MODEL, **{"messages": [{"role": "user", "content": question}], "options": OPTIONS, **fields})


def cities(message: Any) -> list[str]:
    return [call.function.arguments["city"] for call in message.tool_calls]


def chat() -> None:
    response = ask()
    assert response.message.content
    equal((response.done_reason, response.eval_count), ("length", 16))


def stream() -> None:
    equal("".join(part.message.content for part in ask(stream=True)), ask().message.content)


def completions() -> None:
    given = {"model": MODEL, "prompt": checks.PROMPT, "raw": True, "options": OPTIONS}
    equal("".join(part.response for part in client.generate(**given, stream=True)), client.generate(**given).response)


def stop() -> None:
    response = ask(options={**OPTIONS, "stop": [" a"]})
    equal(response.done_reason, "stop")
    assert ask().message.content.startswith(f"{response.message.content} a")


def logprobs() -> None:
    equal([len(step.top_logprobs) for step in ask(logprobs=True, top_logprobs=2).logprobs], [2] * 16)


def parameters() -> None:
    given = [{"top_k": 1, "min_p": 0.1, "num_predict": 16, "seed": seed} for seed in (1, 2)]
    equal(*(ask(options=options).message.content for options in given))


def schema() -> None:
    answer = ask("Who?", format=checks.Hero.model_json_schema(), options={}).message.content
    checks.Hero.model_validate_json(answer)


def auto() -> None:
    equal(cities(ask(checks.PARIS, tools=[get_weather], options={}).message), ["Paris"])


def parallel() -> None:
    equal(cities(ask(checks.BOTH, tools=[get_weather], options={}).message), ["Paris", "Rome"])


def streamed_call() -> None:
    parts = [*ask(checks.BOTH, tools=[get_weather], options={}, stream=True)]
    equal([city for part in parts if part.message.tool_calls for city in cities(part.message)], ["Paris", "Rome"])


def loop() -> None:
    used.clear()
    messages: list[Any] = [{"role": "user", "content": checks.BOTH}]
    response = ask(messages=messages, tools=[get_weather], options={})
    messages.append(response.message)
    for call in response.message.tool_calls:
        result = get_weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    answer = ask(messages=messages, tools=[get_weather], options={}).message.content
    equal((answer, used), (f"{checks.ANSWER} Sunny in Rome.", ["Paris", "Rome"]))


def reasoning() -> None:
    message = ask(checks.THINK, think=True, options={}).message
    equal((message.thinking, message.content), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def errors() -> None:
    equal(raises(ollama.ResponseError, lambda: ask(options={"temperature": -1})).status_code, 400)
    equal(
        raises(ollama.ResponseError, lambda: client.chat("other", [{"role": "user", "content": "Hi"}])).status_code, 404
    )


NOTES = {"completions": "`generate` with `raw=True`", "streamed call": "a call is one part of the stream, as in Ollama"}
ABSENT = {"tool": "Ollama's API has no tool choice", "responses": "not in Ollama's API"}
checks.run("ollama")
