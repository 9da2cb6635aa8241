"""pydantic-ai, with its default output mode, on chat completions and on the Responses API."""

from __future__ import annotations

from typing import Any

import checks
from checks import equal, get_weather, raises, used
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

provider = OpenAIProvider(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
model = OpenAIChatModel(checks.MODEL, provider=provider)
sampled = ModelSettings(**checks.SAMPLED)


def chat() -> None:
    result = Agent(model).run_sync(checks.STORY, model_settings=sampled)
    assert result.output
    equal(result.usage.output_tokens, 16)


async def stream() -> None:
    agent = Agent(model)
    async with agent.run_stream(checks.STORY, model_settings=sampled) as result:
        text = "".join([part async for part in result.stream_text(delta=True, debounce_by=None)])
    equal(text.strip(), (await agent.run(checks.STORY, model_settings=sampled)).output.strip())


def stop() -> None:
    settings = ModelSettings(**checks.SAMPLED, stop_sequences=[" a"])
    text = Agent(model).run_sync(checks.STORY, model_settings=settings).output
    assert Agent(model).run_sync(checks.STORY, model_settings=sampled).output.startswith(f"{text} a")


def logprobs() -> None:
    settings = OpenAIChatModelSettings(**checks.SAMPLED, openai_logprobs=True, openai_top_logprobs=2)
    message = Agent(model).run_sync(checks.STORY, model_settings=settings).all_messages()[-1]
    equal([len(step["top_logprobs"]) for step in message.provider_details["logprobs"]], [2] * 16)


def parameters() -> None:
    own: Any = {"max_tokens": 16, "extra_body": {"top_k": 1, "min_p": 0.1}}
    outputs = [Agent(model).run_sync(checks.STORY, model_settings={**own, "seed": seed}).output for seed in (1, 2)]
    equal(outputs[0], outputs[1])


def schema() -> None:
    assert isinstance(Agent(model, output_type=checks.Hero).run_sync("Who?").output, checks.Hero)


async def tool() -> None:
    agent = Agent(model, output_type=checks.Hero)
    async with agent.run_stream("Who?") as result:
        assert isinstance(await result.get_output(), checks.Hero)


def auto() -> None:
    used.clear()
    Agent(model, tools=[get_weather]).run_sync(checks.PARIS)
    equal(used, ["Paris"])


def parallel() -> None:
    used.clear()
    output = Agent(model, tools=[get_weather]).run_sync(checks.BOTH).output
    equal((sorted(used), output), (["Paris", "Rome"], f"{checks.ANSWER} Sunny in Rome."))


async def streamed_call() -> None:
    used.clear()
    async with Agent(model, tools=[get_weather]).run_stream(checks.PARIS) as result:
        equal((await result.get_output(), used), (checks.ANSWER, ["Paris"]))


def loop() -> None:
    used.clear()
    agent = Agent(model, tools=[get_weather], output_type=checks.Weather, instructions="Be brief.")
    result = agent.run_sync(checks.PARIS)
    equal((result.output, used), (checks.Weather(city="Paris", weather="sunny"), ["Paris"]))
    plain = Agent(model, tools=[get_weather])
    history = plain.run_sync(checks.PARIS).all_messages()
    equal(plain.run_sync(checks.PARIS, message_history=history).output, checks.ANSWER)


def reasoning() -> None:
    result = Agent(model).run_sync(checks.THINK)
    parts = result.all_messages()[-1].parts
    equal([part.content for part in parts if isinstance(part, ThinkingPart)], [checks.THOUGHT])
    equal(result.output, checks.THOUGHT_ANSWER)


def responses() -> None:
    other = OpenAIResponsesModel(checks.MODEL, provider=provider)
    used.clear()
    equal((Agent(other, tools=[get_weather]).run_sync(checks.PARIS).output, used), (checks.ANSWER, ["Paris"]))
    assert isinstance(Agent(other, output_type=checks.Hero).run_sync("Who?").output, checks.Hero)
    equal(Agent(other).run_sync(checks.THINK).output, checks.THOUGHT_ANSWER)


def errors() -> None:
    bad = ModelSettings(temperature=-1)
    error = raises(ModelHTTPError, lambda: Agent(model).run_sync(checks.STORY, model_settings=bad))
    equal(error.status_code, 400)


NOTES = {"tool": "its default output mode: a required call of `final_result`"}
ABSENT = {"completions": "no API for it"}
checks.run("pydantic-ai-slim")
