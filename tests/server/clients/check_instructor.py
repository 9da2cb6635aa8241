"""instructor, with its default mode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import checks
import instructor
from checks import equal, raises
from instructor.core.exceptions import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

client = instructor.from_openai(OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY), model=checks.MODEL)


class get_weather(BaseModel):  # noqa: N801  # the name of the tool
    """Get the weather."""

    city: Literal["Paris", "Rome"]


def ask(question: str = "Who?", response_model: Any = checks.Hero, **fields: Any) -> Any:
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(response_model=response_model, messages=messages, **fields)


def chat() -> None:
    response = ask(checks.STORY, response_model=None, **checks.SAMPLED)
    equal(response.usage.completion_tokens, 16)


def stream() -> None:
    given = {"response_model": checks.Hero, "messages": [{"role": "user", "content": "Who?"}]}
    parts = [*client.chat.completions.create_partial(**given)]
    checks.Hero.model_validate(parts[-1].model_dump())
    heroes = [*client.chat.completions.create_iterable(**given)]
    equal([(hero.name, hero.brave) for hero in heroes], [("Tom", True), ("Lily", False)])


def stop() -> None:
    response = ask(checks.STORY, response_model=None, **checks.SAMPLED, stop=" a")
    equal(response.choices[0].finish_reason, "stop")


def logprobs() -> None:
    response = ask(checks.STORY, response_model=None, **checks.SAMPLED, logprobs=True, top_logprobs=2)
    equal([len(step.top_logprobs) for step in response.choices[0].logprobs.content], [2] * 16)


def reasoning() -> None:
    equal(ask(checks.THINK, response_model=None).choices[0].message.reasoning_content, checks.THOUGHT)


def parameters() -> None:
    heroes = [ask(seed=seed, extra_body={"top_k": 1, "min_p": 0.1}) for seed in (1, 2)]
    equal(heroes[0].model_dump(), heroes[1].model_dump())


def schema() -> None:
    hero, response = client.chat.completions.create_with_completion(
        response_model=checks.Hero, messages=[{"role": "user", "content": "Who?"}]
    )
    assert isinstance(hero, checks.Hero)
    equal(response.choices[0].finish_reason, "tool_calls")  # the default mode


def tool() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        inner = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
        other = instructor.from_openai(inner, mode=mode, model=checks.MODEL)
        given = {"response_model": checks.Hero, "messages": [{"role": "user", "content": "Who?"}]}
        assert isinstance(other.chat.completions.create(**given), checks.Hero)


def parallel() -> None:
    inner = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
    other = instructor.from_openai(inner, mode=instructor.Mode.PARALLEL_TOOLS, model=checks.MODEL)
    messages = [{"role": "user", "content": checks.BOTH}]
    calls = other.chat.completions.create(response_model=Iterable[get_weather], messages=messages)
    equal([call.city for call in calls], ["Paris", "Rome"])


def responses() -> None:
    inner = OpenAI(base_url=f"{checks.URL}/v1", api_key=checks.KEY)
    other = instructor.from_openai(inner, mode=instructor.Mode.RESPONSES_TOOLS, model=checks.MODEL)
    assert isinstance(other.responses.create(input="Who?", response_model=checks.Hero), checks.Hero)


def errors() -> None:
    error = raises(InstructorRetryException, lambda: ask(temperature=-1, max_retries=1))
    assert "temperature" in str(error)


NOTES = {
    "stream": "streams are objects: `create_partial` and `create_iterable`",
    "logprobs": "with `response_model=None`",
    "reasoning": "with `response_model=None`",
    "tool": "its default mode `TOOLS`; `Mode.JSON_SCHEMA` works too",
    "parallel": "with `Mode.PARALLEL_TOOLS`",
    "responses": "with `Mode.RESPONSES_TOOLS`",
}
ABSENT = {
    "completions": "no API for it",
    "auto": "calls are required: they are its structured output",
    "streamed call": "see stream: partial objects are streamed calls",
    "loop": "instructor does not run tools",
}
checks.run("instructor")
