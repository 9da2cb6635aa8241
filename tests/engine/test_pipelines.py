"""Pipelines of stages, the user's own included, wherever sampling parameters are accepted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import log
from nucleate.sampling.stage import Floor, SampledToken, Scale, param
from nucleate.sampling.stages import Gumbel, Temperature, TopK, TopP

PROMPT = "Once upon a time"
REPEATS = "The dog ran to the big tree. The dog ran to the big tree. The dog ran to"
CHAT = [{"role": "user", "content": "Tell me a story."}]
SAME = [
    ((Temperature(0.7), TopP(0.9)), {"temperature": 0.7, "top_p": 0.9}),
    ((TopP(0.9), Temperature(0.7)), {"temperature": 0.7, "top_p": 0.9, "order": ["top_p", "temperature"]}),
    ((TopK(1),), {"top_k": 1}),
]


class AboveAverage(Floor):
    """Keep the tokens with at least a times the average probability."""

    rank = 68
    a: float = param("Factor of the average probability", neutral=0.0, low=0.0)

    def floor(self, row: Any) -> Any:
        return row.top + log(self.a) + log(row.mass) - log(row.n)


class Cooling(Scale):
    """A temperature that falls with every sampled token: a stage with state."""

    t: float = param("Temperature", default=1.0, low=0.0, open_low=True)
    rate: float = param("Factor per token", default=0.9, low=0.0, high=1.0, name="cooling_rate")

    def apply(self, x: Any, row: Any) -> Any:
        return (x - row.top) / self.t

    def update(self, token: SampledToken) -> Cooling:
        return dataclasses.replace(self, t=max(self.t * self.rate, 0.05))


class Halving(Scale):
    """A temperature that falls with every token: its state is 1 in passing."""

    t: float = param("Temperature", neutral=1.0, low=0.0, open_low=True)
    factor: float = param("Factor per token", neutral=1.0, low=0.0, open_low=True, name="halving_factor")

    def apply(self, x: Any, row: Any) -> Any:
        return (x - row.top) / self.t

    def update(self, token: SampledToken) -> Halving:
        return dataclasses.replace(self, t=self.t * self.factor)


OWN = (Cooling(1.5, 0.8), AboveAverage(20.0))


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


def test_own_stages_give_the_same_tokens_in_every_batch_and_with_drafts(llm: nc.LLM) -> None:
    """Alone, among others, as n outputs, with a small cache, and with speculative decoding."""
    params = [nc.SamplingParams(pipeline=OWN, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(6)]
    alone = [llm.generate(PROMPT, one)[0].outputs[0].token_ids for one in params]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    others = [nc.SamplingParams(temperature=0.5, seed=1, max_tokens=24), nc.SamplingParams(mirostat_tau=4, seed=2)]
    together = llm.generate([PROMPT] * 8, [*params, *others])
    assert [one.outputs[0].token_ids for one in together[:6]] == alone
    several = llm.generate(PROMPT, params[0].replace(n=6))[0]
    assert [one.token_ids for one in several.outputs] == alone
    alone = [llm.generate(REPEATS, one)[0].outputs[0].token_ids for one in params]
    for method in ("ngram", "suffix"):
        config = {"method": method, "adaptive": False}
        engine = llm.new_engine(speculative_config=config, kv_cache_memory=2 << 20)
        ids = [engine.add(nc.Request(llm.encode(REPEATS), one)) for one in params]
        found: dict[str, list[int]] = {one: [] for one in ids}
        while len(engine):
            for output in engine.step():
                found[output.request_id] += output.chunk.token_ids
        assert [found[one] for one in ids] == [list(one) for one in alone]
        assert engine.stats.speculative.draft_tokens
    request = nc.Request(llm.encode(PROMPT), OWN)
    assert request.params == nc.SamplingParams(pipeline=OWN)


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


def test_own_stages_with_a_grammar_stops_and_logprobs(llm: nc.LLM) -> None:
    constraint = nc.StructuredOutputs(regex="[a-c]{5}")
    params = nc.SamplingParams(pipeline=OWN, structured_outputs=constraint, seed=1, logprobs=2, max_tokens=20)
    [output] = llm.generate(PROMPT, params)[0].outputs
    assert len(output.text) == 5
    assert set(output.text) <= set("abc")
    assert output.logprobs is not None
    assert all(len(step.top) == 2 for step in output.logprobs)
    stopped = llm.generate(PROMPT, nc.SamplingParams(pipeline=OWN, seed=1, stop=["a"], max_tokens=40))[0]
    assert "a" not in stopped.text
