"""Pipelines of stages, the user's own included, wherever sampling parameters are accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import SampledToken, Scale, param
from nucleate.sampling.stages import Gumbel, Temperature, TopK, TopP

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "Tell me a story."}]
SAME = [
    ((Temperature(0.7), TopP(0.9)), {"temperature": 0.7, "top_p": 0.9}),
    ((TopP(0.9), Temperature(0.7)), {"temperature": 0.7, "top_p": 0.9, "order": ["top_p", "temperature"]}),
    ((TopK(1),), {"top_k": 1}),
]


class Halving(Scale):
    """A temperature that falls with every token: its state is 1 in passing."""

    t: float = param("Temperature", neutral=1.0, low=0.0, open_low=True)
    factor: float = param("Factor per token", neutral=1.0, low=0.0, open_low=True, name="halving_factor")

    def apply(self, x: Any, row: Any) -> Any:
        return (x - row.top) / self.t

    def update(self, token: SampledToken) -> Halving:
        return dataclasses.replace(self, t=self.t * self.factor)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "fields"), SAME, ids=lambda value: str(value)[:40])
def test_a_pipeline_gives_the_text_of_the_same_fields(llm: nc.LLM, stages: Any, fields: Any) -> None:
    expected = llm.generate(PROMPT, nc.SamplingParams(**fields, seed=3, max_tokens=12))[0]
    for given in (
        llm.generate(PROMPT, nc.SamplingParams(pipeline=stages, seed=3, max_tokens=12)),
        llm.generate(PROMPT, stages, seed=3, max_tokens=12),
        llm.generate(PROMPT, (*stages, Gumbel(3)), max_tokens=12),
        llm.generate([PROMPT], [nc.SamplingParams(pipeline=(*stages, Gumbel(3)), max_tokens=12)]),
    ):
        assert given[0].text == expected.text
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, stages, seed=3, max_tokens=12)) == expected.text
    answer = llm.chat(CHAT, nc.SamplingParams(**fields, seed=3, max_tokens=12)).text
    assert llm.chat(CHAT, stages, seed=3, max_tokens=12).text == answer


def test_a_tuple_of_pipelines_has_one_per_prompt(llm: nc.LLM) -> None:
    given = [(Temperature(0.5), Gumbel(1)), nc.SamplingParams(top_k=1, max_tokens=4)]
    first, second = llm.generate([PROMPT] * 2, [nc.SamplingParams(pipeline=given[0], max_tokens=4), given[1]])
    assert first.text == llm.generate(PROMPT, given[0], max_tokens=4)[0].text
    assert second.text == llm.generate(PROMPT, given[1])[0].text
    with pytest.raises(ParameterError, match="a pipeline is a tuple of stages"):
        llm.generate(PROMPT, Temperature(0.5))
    with pytest.raises(ParameterError, match="temperature cannot be set with pipeline"):
        llm.generate(PROMPT, given[0], temperature=0.5)


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_a_state_that_is_neutral_in_passing_is_still_updated(backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="needs the extra 'torch'")
    sampler = nc.Sampler(50, backend=backend)
    row = sampler.add((Halving(4.0, 0.5),), seed=1)
    logits = np.random.default_rng(0).normal(size=(1, 50)).astype(np.float32)
    temperatures = []
    for step in range(5):
        [stage, _] = sampler.stages(row)
        temperatures.append(stage.t)
        expected = nc.sample(logits, (Temperature(stage.t), Gumbel(1)), step=step, backend="reference")
        assert sampler(logits).token_ids.tolist() == expected.tolist()
    assert temperatures == [4.0, 2.0, 1.0, 0.5, 0.25]
