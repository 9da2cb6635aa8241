"""A plug-in for `nucleate serve` that makes the bundled model call tools and answer from their results.

The bundled model writes stories and calls no tool by itself. With ``--scripted 1000``, this stage raises the score of
the next token of a script, which depends on the conversation only: a question about Paris or Rome becomes one call of
``get_weather`` per city, results become an answer, and "Think" in the question opens a reasoning section. Any other
conversation, and an output that a grammar has led away from its script, is the model's own.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from nucleate import LLM
from nucleate.sampling.stage import Shift, param
from nucleate.tokenization.tokenizer import Tokenizer

TURN = re.compile(r"<\|(system|user|assistant)\|>(.*?)<\|end\|>", re.DOTALL)
RESULT = re.compile(r"Result of \w+:\n(.*?)(?=\n\nResult of|\Z)", re.DOTALL)
CITIES = ("Paris", "Rome")
ANSWER_TOOL, LIST_TOOL = "final_result", "IterableHero"
"""The tools by which pydantic-ai and instructor let a model return an object and a list."""
WEATHER = {"city": "Paris", "weather": "sunny"}
HEROES = {"tasks": [{"name": "Tom", "brave": True}, {"name": "Lily", "brave": False}]}


def script(conversation: str) -> str:
    """Return what the model says next; empty: whatever it likes."""
    turns = TURN.findall(conversation)
    tools = [json.loads(line)["name"] for line in conversation.split("\n") if line.startswith('{"name": "')]
    asked = [index for index, (role, text) in enumerate(turns) if role == "user" and not text.startswith("Result of")]
    if not asked:
        return ""
    question = turns[asked[-1]][1]
    results = [found for role, text in turns[asked[-1] + 1 :] if role == "user" for found in RESULT.findall(text)]
    if results and ANSWER_TOOL in tools:
        return call(ANSWER_TOOL, WEATHER)
    if LIST_TOOL in tools:
        return call(LIST_TOOL, HEROES)
    if results:
        return f"The tool says: {' '.join(results)}"
    thoughts = "<think>\nThe weather is a fact.\n</think>\n\n" if "Think" in question else ""
    calls = [call("get_weather", {"city": city}) for city in CITIES if city in question and "get_weather" in tools]
    return thoughts + ("\n".join(calls) or ("It is sunny." if thoughts else ""))


def call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@functools.cache
def tokenizer() -> Tokenizer:
    return LLM().tokenizer


@functools.lru_cache(maxsize=64)
def script_ids(prompt: tuple[int, ...]) -> tuple[int, ...]:
    text = script(tokenizer().decode(prompt, skip_special_tokens=False))
    return tuple(tokenizer().encode(f"{text}<|end|>", add_special_tokens=False)) if text else ()


class Scripted(Shift):
    """Raise the score of the next token of the conversation's script."""

    rank = 0.5
    touches = "listed"
    amount: float = param("Added to the score of the scripted token", neutral=0.0, low=0.0, name="scripted")

    def listing(self, history: Any) -> Mapping[int, float]:
        ids, output = script_ids(tuple(map(int, history.prompt))), tuple(map(int, history.output))
        on_script = len(output) < len(ids) and ids[: len(output)] == output
        return {ids[len(output)]: self.amount} if on_script else {}

    def apply(self, x: Any, token: Any) -> Any:
        return x + token.listed
