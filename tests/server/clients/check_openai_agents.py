"""OpenAI's Agents SDK: by default on the Responses API; also on chat completions."""

from __future__ import annotations

from typing import Any

import checks
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from checks import equal, used
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
set_default_openai_client(client)
set_tracing_disabled(disabled=True)  # traces go to OpenAI
sampled = ModelSettings(temperature=0.9, extra_body={"seed": 7})


get_weather = function_tool(checks.get_weather)


def agent(**fields: Any) -> Agent[Any]:
    return Agent(**{"name": "A", "model": checks.MODEL, **fields})


async def run(question: str, **fields: Any) -> Any:
    used.clear()
    return await Runner.run(agent(**fields), question)


async def chat() -> None:
    result = await run(checks.STORY, model_settings=sampled)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 10


async def stream() -> None:
    streamed = Runner.run_streamed(agent(model_settings=sampled), checks.STORY)
    events = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
    text = "".join(event.data.delta for event in events if event.data.type == "response.output_text.delta")
    equal(text, (await run(checks.STORY, model_settings=sampled)).final_output)


async def stop() -> None:
    settings = ModelSettings(temperature=0.9, extra_body={"seed": 7, "stop": " a"})
    text = (await run(checks.STORY, model_settings=settings)).final_output
    assert (await run(checks.STORY, model_settings=sampled)).final_output.startswith(f"{text} a")


async def logprobs() -> None:
    result = await run(checks.STORY, model_settings=ModelSettings(top_logprobs=2))
    steps = result.new_items[0].raw_item.content[0].logprobs
    equal({len(step.top_logprobs) for step in steps}, {2})


async def parameters() -> None:
    own = {"top_k": 1, "min_p": 0.1}
    given = [ModelSettings(extra_body={**own, "seed": seed}) for seed in (1, 2)]
    outputs = [(await run(checks.STORY, model_settings=settings)).final_output for settings in given]
    equal(outputs[0], outputs[1])


async def schema() -> None:
    assert isinstance((await run("Who?", output_type=checks.Hero)).final_output, checks.Hero)


async def tool() -> None:
    required = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=150)
    fields = {"tools": [get_weather], "tool_use_behavior": "stop_on_first_tool"}
    await run(checks.PARIS, model_settings=required, **fields)
    equal(used, ["Paris"])


async def auto() -> None:
    await run(checks.PARIS, tools=[get_weather])
    equal(used, ["Paris"])


async def parallel() -> None:
    result = await run(checks.BOTH, tools=[get_weather])
    equal((sorted(used), result.final_output), (["Paris", "Rome"], f"{checks.ANSWER} Sunny in Rome."))


async def streamed_call() -> None:
    used.clear()
    streamed = Runner.run_streamed(agent(tools=[get_weather]), checks.PARIS)
    items = [event.name async for event in streamed.stream_events() if event.type == "run_item_stream_event"]
    equal(items, ["tool_called", "tool_output", "message_output_created"])
    equal((streamed.final_output, used), (checks.ANSWER, ["Paris"]))


async def loop() -> None:
    result = await run(checks.PARIS, tools=[get_weather], instructions="Be brief.")
    equal((result.final_output, used), (checks.ANSWER, ["Paris"]))
    again = await Runner.run(
        agent(tools=[get_weather]), [*result.to_input_list(), {"role": "user", "content": checks.PARIS}]
    )
    equal((again.final_output, used), (checks.ANSWER, ["Paris", "Paris"]))


async def reasoning() -> None:
    result = await run(checks.THINK)
    thought, answer = (item.raw_item for item in result.new_items)
    equal(thought.content[0].text, checks.THOUGHT)
    equal(answer.content[0].text, checks.THOUGHT_ANSWER)


async def responses() -> None:
    model = OpenAIChatCompletionsModel(checks.MODEL, client)
    result = await run(checks.BOTH, model=model, tools=[get_weather])
    equal((sorted(used), result.final_output), (["Paris", "Rome"], f"{checks.ANSWER} Sunny in Rome."))
    assert isinstance((await run("Who?", model=model, output_type=checks.Hero)).final_output, checks.Hero)
    streamed = Runner.run_streamed(agent(model=model, tools=[get_weather]), checks.PARIS)
    assert [event async for event in streamed.stream_events()]
    equal(streamed.final_output, checks.ANSWER)


async def errors() -> None:
    try:
        await run(checks.STORY, model_settings=ModelSettings(temperature=-1))
    except openai.BadRequestError as error:
        equal(error.param, "temperature")
    else:
        raise AssertionError("no error")


NOTES = {
    "chat": "on the Responses API, its default; the client raises an error if `max_tokens` ends an output",
    "stop": "with `ModelSettings(extra_body=...)`; the Responses API has no field for it",
    "responses": "its default; `OpenAIChatCompletionsModel` works too",
}
ABSENT = {"completions": "no API for it"}
checks.run("openai-agents")
