"""A GGUF model drafts for a GGUF model."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import EXACT

import nucleate as nc

PROMPTS = ["Once upon a time", "The dog ran to", "One day, Tom and his friend"]


@pytest.fixture(scope="module")
def drafting(files: dict[str, Path]) -> nc.LLM:
    """The embedded model in float32, with drafts of the same model in 8 bits."""
    config = {"method": "draft", "model": str(files["q8_0"]), "num_speculative_tokens": 4, "adaptive": False}
    return nc.LLM(files["f32"], gguf_options=EXACT, speculative_config=config)


def texts(llm: nc.LLM, params: nc.SamplingParams) -> tuple[list[list[int]], nc.EngineStats]:
    """The outputs of an engine for the prompts, in one batch, and its counters."""
    engine, found = llm.new_engine(), {}
    for prompt in PROMPTS:
        found[engine.add(nc.Request(llm.encode(prompt), params))] = list[int]()
    while len(engine):
        for output in engine.step():
            found[output.request_id] += output.chunk.token_ids
    return [*found.values()], engine.stats


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_are_accepted(exact: nc.LLM, drafting: nc.LLM, temperature: float) -> None:
    """The 8-bit model predicts nearly the same: most drafts are accepted, and the output is that without them."""
    params = nc.SamplingParams(temperature=temperature, seed=5, max_tokens=24, ignore_eos=True)
    (expected, plain), (found, stats) = texts(exact, params), texts(drafting, params)
    assert found == expected
    assert stats.speculative.draft_tokens > 0
    assert stats.speculative.acceptance_rate > 0.8
    assert stats.num_steps < 0.5 * plain.num_steps
