"""User-defined stages, with state and without, give the same tokens however a request runs: docs/custom_stages.md."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_process import Server
from toy_requests import drive, tokens_of

import nucleate as nc
from nucleate.generation.loop import generate
from nucleate.models.runner import BLOCK
from nucleate.parameters.parameter import ParameterError
from nucleate.plugins.plugin_loader import load_plugins, set_stages
from nucleate.plugins.stage_check import check_stage
from nucleate.sampling.stages import STAGES
from nucleate.speculative.config import METHODS

PAGE = (Path(__file__).parents[2] / "docs" / "custom_stages.md").read_text("utf-8")
[STATEFUL] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class SteadySurprise" in block]
STATELESS = '''

class Steep(Scale):
    """Sharpen the distribution: the same stage without state."""

    rank = 52.7
    factor: float = param("Factor of the scores", neutral=1.0, low=0.0, open_low=True, name="steep")

    def apply(self, x, row):
        return (x - row.top) * self.factor
'''
FIELDS: dict[str, dict[str, Any]] = {
    "stateful": {"steady_surprise": 3.0},
    "stateless": {"steep": 0.7},
    "both": {"steady_surprise": 1.5, "steep": 0.8, "frequency_penalty": 0.3},
}
REPEATS = "The dog ran to the big tree. The dog ran to the big tree. The dog ran to"
TOKENS = 24

PIPELINE = {"pipeline": "steady_surprise(1.5) | steep(0.8)"}

with_each = pytest.mark.parametrize("fields", [*FIELDS.values(), PIPELINE], ids=[*FIELDS, "pipeline"])


@pytest.fixture(scope="module")
def llm() -> nc.LLM:
    return nc.LLM(generation_config="none")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path, before = tmp_path_factory.mktemp("plugin") / "steady.py", dict(STAGES)
    path.write_text(STATEFUL + STATELESS)
    load_plugins([str(path)])
    yield path
    set_stages(before)


def params_of(fields: dict[str, Any], seed: int, **more: Any) -> nc.SamplingParams:
    return nc.SamplingParams(**{"seed": seed, "max_tokens": TOKENS, "ignore_eos": True, **fields, **more})


@functools.cache
def alone(llm: nc.LLM, prompt: str, params: nc.SamplingParams) -> list[int]:
    """The tokens of the reference loop: one sequence, no batch, no speculation."""
    chunks = generate(llm.model, llm.tokenizer, llm.encode(prompt), params)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
def test_the_state_matters_and_the_mean_surprise_approaches_the_target(llm: nc.LLM) -> None:
    params = [params_of(FIELDS["stateful"], seed, max_tokens=90) for seed in range(4)]
    reported = [one.replace(logprobs=0, logprobs_mode="processed") for one in params]
    chosen = [
        step.chosen.logprob
        for completion in llm.generate(["Once upon a time"] * 4, reported)
        for step in (completion.outputs[0].logprobs or ())[30:]
    ]
    assert -np.mean(chosen) == pytest.approx(3.0, abs=0.4)
    plain = [alone(llm, REPEATS, params_of({}, seed)) for seed in range(3)]
    assert plain != [alone(llm, REPEATS, params_of(FIELDS["stateful"], seed)) for seed in range(3)]


@with_each
@pytest.mark.usefixtures("plugin")
@pytest.mark.fast_cases(0)
def test_llm_batches_outputs_and_streams(llm: nc.LLM, fields: dict[str, Any]) -> None:
    params = [params_of(fields, seed) for seed in range(4)]
    expected = [alone(llm, REPEATS, one) for one in params]
    assert [list(one.outputs[0].token_ids) for one in llm.generate([REPEATS] * 4, params)] == expected
    [several] = llm.generate(REPEATS, params[0].replace(n=4))
    assert [list(one.token_ids) for one in several.outputs] == expected
    streamed = [token for chunk in llm.stream(REPEATS, params[1]) for token in chunk.token_ids]
    assert streamed == expected[1]


@with_each
@pytest.mark.parametrize("method", [None, *(method for method in METHODS if method != "mtp")])  # no modules for it
@pytest.mark.usefixtures("plugin")
@pytest.mark.fast_cases(0)
def test_the_engine_with_speculation_and_preemption(llm: nc.LLM, method: str | None, fields: dict[str, Any]) -> None:
    config = None if method is None else {"method": method, "adaptive": False}
    long = params_of(fields, 0, max_tokens=80)
    params = [long.replace(seed=seed) for seed in range(4)] + [long.replace(seed=0, n=3)]
    expected = [alone(llm, REPEATS, long.replace(seed=seed)) for seed in range(4)]
    block = BLOCK * llm.model.token_bytes
    engine = llm.new_engine(speculative_config=config, kv_cache_memory=20 * block)
    *single, several = drive(engine, [nc.Request(llm.encode(REPEATS), one) for one in params])
    assert [tokens_of(own) for own in single] == expected
    assert [tokens_of(several, index) for index in range(3)] == expected[:3]
    assert engine.stats.num_preemptions
    if method is not None:
        assert engine.stats.speculative.accepted_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_other_acceptance_rules_keep_the_state_of_the_tokens(llm: nc.LLM, rule: str) -> None:
    """The tokens are others, but the state is that of a request which was given these tokens."""
    config = {"method": "ngram", "adaptive": False, "acceptance_rule": rule}
    params = params_of(FIELDS["stateful"], 5, max_tokens=60, logprobs=0, logprobs_mode="processed")
    engine = llm.new_engine(speculative_config=config)
    [outputs] = drive(engine, [nc.Request(llm.encode(REPEATS), params)])
    steps = [step for output in outputs for step in output.chunk.logprobs or ()]
    assert engine.stats.speculative.accepted_tokens
    sampler, context = nc.Sampler(llm.model.vocab_size), llm.model.begin()
    row = sampler.add(params.build_pipeline(), llm.encode(REPEATS))
    logits = context.forward(llm.encode(REPEATS))
    for step in steps:
        expected = sampler.accept(row, step.chosen.token_id, logits)
        assert expected is not None
        assert step.chosen.logprob == pytest.approx(expected.chosen.logprob, abs=1e-3)
        logits = context.forward([step.chosen.token_id])


@pytest.mark.slow
@with_each
@pytest.mark.usefixtures("plugin")
def test_structured_output_with_forced_tokens(llm: nc.LLM, fields: dict[str, Any]) -> None:
    constraint = nc.StructuredOutputs(regex='\\{"name": "[a-z]{3,9}", "age": [0-9]{1,3}\\}')
    params = [params_of(fields, seed, structured_outputs=constraint, max_tokens=60) for seed in range(3)]
    expected = [alone(llm, REPEATS, one) for one in params]
    for config in (None, {"method": "ngram", "adaptive": False}):
        outputs = drive(
            llm.new_engine(speculative_config=config), [nc.Request(llm.encode(REPEATS), one) for one in params]
        )
        assert [tokens_of(own) for own in outputs] == expected


@pytest.mark.usefixtures("plugin")
def test_beam_search_refuses_stages(llm: nc.LLM) -> None:
    for field, value in (("pipeline", "steep(0.5)"), ("steep", 0.5), ("steady_surprise", 1.0)):
        with pytest.raises(ParameterError, match=f"'{field}'"):
            llm.beam_search(REPEATS, num_beams=2, **{field: value})


@pytest.mark.usefixtures("plugin")
def test_a_pipeline_of_these_stages_and_its_state(llm: nc.LLM) -> None:
    pipeline = (STAGES["steady_surprise"](2.0), STAGES["steep"](0.9))
    params = nc.SamplingParams(pipeline=pipeline, seed=1, max_tokens=TOKENS, ignore_eos=True)
    fields = {"steady_surprise": 2.0, "steep": 0.9}
    expected = alone(llm, REPEATS, params_of(fields, 1))
    assert alone(llm, REPEATS, params) == expected
    sampler, context = nc.Sampler(llm.model.vocab_size), llm.model.begin()
    row = sampler.add(params.build_pipeline(), llm.encode(REPEATS), seed=1)
    logits, tokens = context.forward(llm.encode(REPEATS)), list[int]()
    for step in range(10):
        if step == 5:  # stop, and continue from the printed state
            stages = nc.SamplingParams(pipeline=json.loads(json.dumps(_to_json(sampler.stages(row))))).build_pipeline()
            row = sampler.add(stages, llm.encode(REPEATS), output_ids=tokens, seed=1)
        tokens += sampler(logits[None], [row]).token_ids.tolist()
        logits = context.forward(tokens[-1:])
    assert tokens == expected[:10]


def _to_json(stages: nc.Pipeline) -> Any:
    return nc.SamplingParams(pipeline=stages).to_dict()["pipeline"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_the_command_line_and_the_server(llm: nc.LLM, plugin: Path, fields: dict[str, Any]) -> None:
    [expected] = llm.generate(REPEATS, params_of(fields, 3))[0].outputs
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
    command = ["generate", REPEATS, "--plugin", str(plugin), "--generation-config", "none", "--ignore-eos", *flags]
    command += ["--seed", "3", "--max-tokens", str(TOKENS), "--json"]
    for more in ([], ["--speculative", "ngram"]):
        done = subprocess.run(
            [sys.executable, "-m", "nucleate", *command, *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["outputs"][0]["text"] == expected.text
    with Server("--plugin", str(plugin), "--generation-config", "none", "--speculative", "ngram") as server:
        body = {"prompt": REPEATS, "seed": 3, "max_tokens": TOKENS, "ignore_eos": True, **fields}
        answer = server.request("POST", "/v1/completions", body).json
        assert answer["choices"][0]["text"] == expected.text
        refused = server.request("POST", "/v1/completions", {**body, "use_beam_search": True})
        assert refused.status == 400
        assert refused.json["error"]["param"] in fields


@pytest.mark.slow
@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["steady_surprise", "steep"])
def test_the_stages_pass_their_checks(name: str) -> None:
    assert not [one for one in check_stage(STAGES[name]) if one.holds is False]
    if importlib.util.find_spec("torch"):
        from nucleate.sampling.signature import device_row_spec
        from nucleate.sampling.stages import Gumbel

        assert not isinstance(device_row_spec((STAGES[name](2.0), Gumbel()), 1000), str)
