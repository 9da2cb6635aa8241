"""What the programs check_*.py have in common: they check features of the server with one client.

Each prints one JSON object: the versions of its packages, and for each feature whether it passed, why it failed, or
why the client has no such feature. Arguments of a program: the server's URL, the model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

URL, MODEL = sys.argv[1:3]
FEATURES = (
    *("chat", "stream", "completions", "stop", "logprobs", "parameters", "schema", "tool", "auto", "parallel"),
    *("streamed call", "loop", "reasoning", "responses", "errors"),
)
KEY = "any"
PROMPT, STORY = "Once upon a time", "Tell me a story about a cat."
PARIS, BOTH = "What is the weather in Paris?", "What is the weather in Paris and Rome?"
THINK = "Think first: is it sunny?"
"""The questions that scripted_model.py answers with calls or reasoning."""
THOUGHT, THOUGHT_ANSWER = "The weather is a fact.", "It is sunny."
SUNNY = "Sunny in Paris."
ANSWER = f"The tool says: {SUNNY}"
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 16}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": WEATHER_SCHEMA},
}


class Hero(BaseModel, extra="forbid"):
    """The hero of a story."""

    name: Literal["Tom", "Lily"]
    brave: bool


class Weather(BaseModel, extra="forbid"):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    weather: Literal["sunny", "rainy"]


used: list[str] = []
"""The cities that ``get_weather`` was called with, since a check cleared them."""


def get_weather(city: str) -> str:
    """Get the weather.

    Args:
        city: a city
    """
    used.append(city)
    return f"Sunny in {city}."


def equal(got: Any, expected: Any) -> None:
    """Raise AssertionError unless two values are equal."""
    assert got == expected, f"got {got!r}, expected {expected!r}"


def raises(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """Return the exception of a call. Raises AssertionError if there is none of this type."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def run(*packages: str) -> None:
    """Run all checks of the program and print the report.

    A check is a function, or coroutine function, with the name of a feature, that raises if it does not work. NOTES has
    what a user must know about a feature, and ABSENT why the client has no such feature.
    """
    program = vars(sys.modules["__main__"])
    notes, absent = program.get("NOTES", {}), program.get("ABSENT", {})
    results = {feature: {"status": "absent", "reason": reason} for feature, reason in absent.items()}
    with asyncio.Runner() as runner:
        for feature in (one for one in FEATURES if one not in absent):
            try:
                if inspect.isawaitable(result := program[feature.replace(" ", "_")]()):
                    runner.run(result)
            except Exception as error:  # noqa: BLE001  # the report has it
                traceback.print_exc()
                results[feature] = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
            else:
                results[feature] = {"status": "passed", "reason": notes.get(feature, "")}
    print(json.dumps({"versions": {name: version(name) for name in packages}, "results": results}))
