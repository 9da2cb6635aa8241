"""The embedded model with every draft method: the same tokens as without drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tiers
from grammar_examples import RECORD
from toy_requests import drive, is_empty

import nucleate as nc
from nucleate.engine.request import Request
from nucleate.outputs import EngineOutput
from nucleate.speculative.config import METHODS, Speculation

SECTIONS: Any = {
    "structures": [{"begin": " a ", "schema": {"enum": ["big", "red"]}, "end": " dog"}],
    "triggers": [" a"],
}
LAZY: Any = {
    "grammar": 'root ::= " dog" (" ran"+ | " sat"+) "!"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": "word", "value": " dog"}],
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.8": {"temperature": 0.8},
    "top-p": {"top_p": 0.85},
    "min-p": {"min_p": 0.08, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "dry": {"dry_multiplier": 0.8, "temperature": 0.7},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
    "grammar": {"structured_outputs": nc.StructuredOutputs(json_schema=RECORD), "temperature": 0.9},
    "sections": {"structured_outputs": nc.StructuredOutputs(structural_tag=SECTIONS), "temperature": 0.9},
    "lazy grammar": {"structured_outputs": nc.StructuredOutputs(**LAZY), "temperature": 0.9},
    "stop strings": {"stop": (". ", "!", " and"), "temperature": 0.9},
    "n > 1": {"n": 3, "temperature": 0.9},
}
PROMPTS = (
    "Once upon a time",
    "Lily had a red ball. Tom had a red ball. Lily had a red",
    "The cat sat on the mat. The dog sat on the mat. The cat",
    "Tom and Lily went to the park. They saw a big dog. The big dog",
    "One day, the little bird sang a song. The song was",
    '{"name": "Ana", "age": 3}\n{"name": "Bob", "age": 4}\n',
    "He said hello. She said hello. He said hello. She said",
)


def requests(llm: nc.LLM, count: int, seed: int) -> list[Request]:
    """Requests of all kinds, shuffled."""
    rng = random.Random(seed)
    ways = [*WAYS] * -(-count // len(WAYS))
    made = []
    for way in ways[:count]:
        params = nc.SamplingParams(seed=rng.randrange(2**64), max_tokens=rng.randint(8, 40), **WAYS[way])
        made.append(Request(llm.encode(rng.choice(PROMPTS)), params))
    rng.shuffle(made)
    return made


def comparable(events: list[EngineOutput]) -> list[tuple[Any, ...]]:
    """The events in an order that does not depend on the interleaving of a request's outputs."""
    chunks = sorted((event.chunk for event in events), key=lambda chunk: chunk.index)
    return [(p.index, p.seed, p.text, p.token_ids, p.finish_reason, p.stop_reason) for p in chunks]


def compare(llm: nc.LLM, name: str, count: int, seed: int, **options: Any) -> None:
    batch = requests(llm, count, seed)
    plain, engine = llm.new_engine(), llm.new_engine(speculative_config=Speculation(name, **options))
    for request, expected, found in zip(batch, drive(plain, batch), drive(engine, batch), strict=True):
        assert comparable(found) == comparable(expected), request.params
        assert found[-1].usage == expected[-1].usage
    assert is_empty(engine)
    if options.get("adaptive", True):  # depends on timing: there are no drafts where they do not pay
        assert engine.stats.num_steps <= plain.stats.num_steps
    else:
        assert engine.stats.speculative.accepted_tokens > 0
        assert engine.stats.num_steps < plain.stats.num_steps


CHAINS = [(name, {}) for name in METHODS if name != "mtp"]  # which needs other models
TREES = [
    ("suffix", {"num_speculative_tokens": 9, "tree_width": 3}),
    ("medusa", {"num_speculative_tokens": 16, "tree_width": 4}),
    ("eagle", {"num_speculative_tokens": 8, "tree_width": 2}),
]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("name", "options"), [*CHAINS, *TREES])
def test_some_requests_at_once(llm: nc.LLM, name: str, options: dict[str, Any]) -> None:
    compare(llm, name, 12 if options else tiers.count(12, 30), 1, **options, adaptive=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "options"), [*CHAINS, *TREES])
@pytest.mark.parametrize("adaptive", [False, True])
def test_three_hundred_requests_at_once(llm: nc.LLM, name: str, options: dict[str, Any], adaptive: bool) -> None:
    compare(llm, name, 300, 2, **{"num_speculative_tokens": 7 if adaptive else 4, **options}, adaptive=adaptive)
