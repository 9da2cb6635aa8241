"""LangChain: ChatOpenAI, bind_tools, structured output, and its agent."""

from __future__ import annotations

from typing import Any

import checks
import openai
from checks import equal, raises, used
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool as as_tool
from langchain_openai import ChatOpenAI, OpenAI

SERVER = {"base_url": f"{checks.URL}/v1", "api_key": checks.KEY, "model": checks.MODEL}
llm = ChatOpenAI(**SERVER)
sampled = ChatOpenAI(**SERVER, **checks.SAMPLED)


get_weather = as_tool(checks.get_weather)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call["name"], call["args"]) for call in message.tool_calls]


def chat() -> None:
    message = sampled.invoke(checks.STORY)
    assert message.content
    equal(message.usage_metadata["output_tokens"], 16)


def stream() -> None:
    chunks = [*sampled.stream(checks.STORY)]
    assert len(chunks) > 2
    equal("".join(str(chunk.content) for chunk in chunks), sampled.invoke(checks.STORY).content)


def completions() -> None:
    text = OpenAI(**SERVER, **checks.SAMPLED)
    equal("".join(text.stream(checks.PROMPT)), text.invoke(checks.PROMPT))


def stop() -> None:
    message = sampled.invoke(checks.STORY, stop=[" a"])
    equal(message.response_metadata["finish_reason"], "stop")
    assert str(sampled.invoke(checks.STORY).content).startswith(f"{message.content} a")


def logprobs() -> None:
    message = sampled.bind(logprobs=True, top_logprobs=2).invoke(checks.STORY)
    equal([len(step["top_logprobs"]) for step in message.response_metadata["logprobs"]["content"]], [2] * 16)


def parameters() -> None:
    own = {**checks.SAMPLED, "extra_body": {"top_k": 1, "min_p": 0.1}}
    texts = [ChatOpenAI(**{**SERVER, **own, "seed": seed}).invoke(checks.STORY).content for seed in (1, 2)]
    equal(texts[0], texts[1])


def schema() -> None:
    assert isinstance(llm.with_structured_output(checks.Hero).invoke("Who?"), checks.Hero)
    by_call = llm.with_structured_output(checks.Hero, method="function_calling")
    assert isinstance(by_call.invoke("Who?"), checks.Hero)


def tool() -> None:
    for choice in ("any", "get_weather"):
        bound = llm.bind_tools([checks.WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False)
        equal(calls_of(bound.invoke(checks.STORY))[0][0], "get_weather")


def auto() -> None:
    equal(calls_of(llm.bind_tools([get_weather]).invoke(checks.PARIS)), [("get_weather", {"city": "Paris"})])


def parallel() -> None:
    calls = calls_of(llm.bind_tools([get_weather]).invoke(checks.BOTH))
    equal(calls, [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})])


def streamed_call() -> None:
    first, *others = llm.bind_tools([get_weather]).stream(checks.BOTH)
    for chunk in others:
        first += chunk
    equal([arguments["city"] for _, arguments in calls_of(first)], ["Paris", "Rome"])


def loop() -> None:
    used.clear()
    bound = llm.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(checks.PARIS), bound.invoke(checks.PARIS)]
    messages += [get_weather.invoke(call) for call in messages[1].tool_calls]
    assert isinstance(messages[-1], ToolMessage)
    equal((bound.invoke(messages).content, used), (checks.ANSWER, ["Paris"]))
    agent = create_agent(llm, [get_weather], system_prompt="Be brief.")
    asked = {"messages": [{"role": "user", "content": checks.BOTH}]}
    equal(agent.invoke(asked)["messages"][-1].content, f"{checks.ANSWER} Sunny in Rome.")
    equal(sorted(used), ["Paris", "Paris", "Rome"])
    assert [*agent.stream(asked, stream_mode="messages")]
    answering = create_agent(llm, [], response_format=ProviderStrategy(checks.Hero))
    who = {"messages": [{"role": "user", "content": "Who?"}]}
    assert isinstance(answering.invoke(who)["structured_response"], checks.Hero)


def reasoning() -> None:
    message = ChatOpenAI(**SERVER, reasoning={"summary": "auto"}).invoke(checks.THINK)
    thought, answer = message.content_blocks
    equal((thought["reasoning"], answer["text"]), (checks.THOUGHT, checks.THOUGHT_ANSWER))


def responses() -> None:
    other = ChatOpenAI(**SERVER, use_responses_api=True)
    message = other.bind_tools([get_weather]).invoke(checks.PARIS)
    equal(calls_of(message), [("get_weather", {"city": "Paris"})])
    agent = create_agent(other, [get_weather])
    asked = {"messages": [{"role": "user", "content": checks.PARIS}]}
    equal(agent.invoke(asked)["messages"][-1].text, checks.ANSWER)
    assert isinstance(other.with_structured_output(checks.Hero).invoke("Who?"), checks.Hero)


def errors() -> None:
    raises(openai.BadRequestError, lambda: llm.invoke(checks.STORY, temperature=-1))
    raises(openai.NotFoundError, lambda: llm.invoke(checks.STORY, model="other"))


NOTES = {
    "reasoning": "with `reasoning={'summary': 'auto'}` (Responses API); of chat completions, it drops "
    "`reasoning_content`"
}
checks.run("langchain", "langchain-openai")
