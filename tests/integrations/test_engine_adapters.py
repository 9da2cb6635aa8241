"""nucleate inside vLLM and SGLang, driven as they document it: the tokens of LLM, seed for seed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine_interfaces
import numpy as np
import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

pytest.importorskip("torch", reason="vLLM and SGLang pass tensors: needs the extra 'torch'")

import torch
from fake_engines import FakeRequest, FirstRunner, SecondRunner, SGLangRunner, expected, llm, logits_after

FIELDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 0},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "penalty_last_n": 20},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "temperature": 0.7},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.02},
    {"mirostat_tau": 3.0},
    {"top_n_sigma": 1.0, "order": "llama.cpp", "top_k": 30},
    {"pipeline": "typical(0.9) | temperature(1.2)"},
    {"bad_words": [" was", " the"], "min_tokens": 8, "adaptive_p_target": 0.4},
]
PROMPTS = [
    "Once upon a time",
    "The fox",
    "One day, Lily and Tom went to the park to play with",
    "A",
    "Tim had a ball. " * 3,
]


@pytest.fixture(params=["plain", pytest.param("real", id="real")])
def is_real(request: pytest.FixtureRequest) -> bool:
    return request.param == "real"


@pytest.fixture
def vllm(is_real: bool) -> Iterator[Any]:
    if is_real and not engine_interfaces.is_fetched("vllm"):
        pytest.skip(engine_interfaces.HINT)
    with engine_interfaces.vllm_interfaces(real=is_real) as adapter:
        yield adapter


@pytest.fixture
def sglang(is_real: bool) -> Iterator[Any]:
    if is_real:
        pytest.importorskip("dill", reason="SGLang needs dill")
        pytest.importorskip("orjson", reason="SGLang needs orjson")
        if not engine_interfaces.is_fetched("sglang"):
            pytest.skip(engine_interfaces.HINT)
    with engine_interfaces.sglang_interfaces(real=is_real) as adapter:
        server = SimpleNamespace(model_path=str(EMBEDDED), tokenizer_path=None, sampling_defaults="model")
        sys.modules["sglang.srt.runtime_context"] = SimpleNamespace(get_server_args=lambda: server)  # type: ignore[assignment]
        yield adapter


def config() -> Any:
    size = llm().model.vocab_size
    model = SimpleNamespace(model=str(EMBEDDED), tokenizer=str(EMBEDDED), get_vocab_size=lambda: size)
    return SimpleNamespace(model_config=model, instance_id="abc")


def requests_of(params: Any, count: int = 12) -> list[FakeRequest]:
    """A request per entry of FIELDS, and two of the engine's own."""
    made = []
    for at, fields in enumerate([*FIELDS, None, None]):
        prompt = llm().tokenizer.encode(PROMPTS[at % len(PROMPTS)])
        made.append(FakeRequest(f"r{at}", prompt, params(fields, at), count, arrives=at // 2))
    return made


def vllm_params(fields: dict[str, Any] | None, seed: int) -> engine_interfaces.EngineParams:
    if fields is None:
        return engine_interfaces.EngineParams(temperature=0.0)
    if seed % 2:
        return engine_interfaces.EngineParams(extra_args={"nucleate": {**fields, "seed": seed}})
    own = {name: value for name, value in fields.items() if name in ("temperature", "top_p", "top_k", "min_p")}
    rest = {name: value for name, value in fields.items() if name not in own}
    return engine_interfaces.EngineParams(seed=seed, **own, extra_args={"nucleate": rest, "other": 1})


def check(requests: list[FakeRequest]) -> None:
    for seed, (request, fields) in enumerate(zip(requests, [*FIELDS, None, None], strict=True)):
        fields = {"temperature": 0, "order": "canonical"} if fields is None else {**fields, "seed": seed}
        assert request.output == expected(request.prompt, fields, request.count), fields


@pytest.mark.parametrize("drafts", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_second_runner_of_vllm(vllm: Any, drafts: int, seed: int) -> None:
    runner = SecondRunner(vllm, config(), np.random.default_rng(seed), drafts=drafts)
    requests = requests_of(vllm_params)
    if drafts:
        for at, (request, fields) in enumerate(zip(requests, FIELDS, strict=False)):
            runner.oracle[request.name] = expected(request.prompt, {**fields, "seed": at}, request.count)
    runner.run(requests)
    for request in requests:
        del request.output[request.count :]
    check(requests)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_first_runner_of_vllm(vllm: Any, seed: int) -> None:
    interface = sys.modules["vllm.v1.sample.logits_processor"]
    requests = requests_of(vllm_params)
    FirstRunner(vllm, config(), np.random.default_rng(seed), interface).run(requests)
    check(requests)


def sglang_params(module: Any) -> Any:
    def params(fields: dict[str, Any] | None, seed: int) -> Any:
        own = {"temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "n": 1, "sampling_seed": None}
        if fields is None:
            return SimpleNamespace(**own, custom_params=None)
        if seed % 2:
            return SimpleNamespace(**own, custom_params=module.nucleate_params(**fields, seed=seed))
        if fields.get("temperature") == 0:
            own |= {"temperature": 1.0, "top_k": 1}
        return SimpleNamespace(**{**own, "sampling_seed": seed}, custom_params={"nucleate": fields})

    return params


@pytest.mark.parametrize(
    ("overlap", "drafts"), [(True, 0), *(pytest.param(False, count, marks=pytest.mark.slow) for count in (0, 3))]
)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_sglang(sglang: Any, overlap: bool, drafts: int, seed: int) -> None:
    runner = SGLangRunner(sglang, np.random.default_rng(seed), overlap=overlap, drafts=drafts)
    requests = requests_of(sglang_params(sglang))
    for at, (request, fields) in enumerate(zip(requests, FIELDS, strict=False)):
        runner.oracle[request.name] = expected(request.prompt, {**fields, "seed": at}, request.count)
    runner.run(requests)
    for request in requests:
        del request.output[request.count :]
    check(requests)
    gc.collect()
    assert [len(engine) for engine in sglang._engines.values()] == [0], "rows end with their requests"
    assert all(len(engine.sampler) == 0 for engine in sglang._engines.values())


@pytest.mark.parametrize(
    ("own", "fields", "message"),
    [
        ({}, {"temprature": 1}, "unknown parameter 'temprature'; did you mean temperature"),
        ({}, {"temperature": -1}, "temperature must be a number >= 0"),
        ({}, {"stop": ["x"]}, "stop cannot be in extra_args.'nucleate'.: set the engine's own parameter"),
        ({}, {"max_tokens": 5}, "max_tokens cannot be in"),
        ({}, {"logprobs": 5}, "logprobs cannot be in .* it needs the engine"),
        ({}, {"guidance_scale": 2}, "guidance_scale cannot be in .* it needs a second sequence"),
        ({}, {"structured_outputs": {"json": {}}}, "structured_outputs cannot be in"),
        ({"repetition_penalty": 1.1}, {}, "the engine's repetition_penalty must be 1, .* set it in extra_args"),
        ({"presence_penalty": 0.5}, {}, "the engine's presence_penalty must be 0"),
        ({"temperature": 0.5}, {"temperature": 0.6}, "temperature is 0.5 as the engine's parameter and 0.6 in"),
        ({"top_p": 0.5}, {"pipeline": "min_p(0.1)"}, "top_p cannot be set with pipeline"),
        ({"n": 2}, {"seed": 3}, "seed cannot be in extra_args.'nucleate'. with n = 2"),
        ({}, "{", "must be JSON"),
        ({}, [1], "must be an object with fields of SamplingParams"),
    ],
)
@pytest.mark.parametrize("is_real", [False], indirect=True)
def test_what_cannot_be_had_is_refused_by_name(vllm: Any, own: Any, fields: Any, message: str) -> None:
    params = engine_interfaces.EngineParams(**own, extra_args={"nucleate": fields})
    with pytest.raises(ValueError, match=message):
        vllm.NucleateLogitsProcessor.validate_params(params)


@pytest.mark.parametrize("is_real", [False], indirect=True)
def test_valid_parameters_of_vllm(vllm: Any) -> None:
    validate = vllm.NucleateLogitsProcessor.validate_params
    validate(engine_interfaces.EngineParams(repetition_penalty=1.5))  # not ours
    validate(engine_interfaces.EngineParams(n=3, seed=4, top_k=-1, extra_args={"nucleate": '{"min_p": 0.1}'}))
    processor = vllm.NucleateLogitsProcessor(None, torch.device("cpu"), False)
    logits = torch.zeros(2, 5)
    assert processor.apply(logits) is logits
    processor.update_state(None)


@pytest.mark.parametrize("is_real", [False], indirect=True)
def test_requests_without_a_seed_differ_but_ranks_agree(vllm: Any) -> None:
    found = []
    for instance in ("abc", "abc", "xyz"):
        own = config()
        own.instance_id = instance
        requests = [
            FakeRequest(f"r{at}", [5, 6], engine_interfaces.EngineParams(extra_args={"nucleate": {}}), 8)
            for at in range(3)
        ]
        SecondRunner(vllm, own, np.random.default_rng(0)).run(requests)
        found.append([request.output for request in requests])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("is_real", [False], indirect=True)
def test_a_request_that_does_not_fit_the_model_does_not_end_the_engine(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    interface = sys.modules["vllm.v1.sample.logits_processor"]
    for second in (False, True):
        params = [{"logit_bias": {10**6: 1.0}}, {"temperature": 0}]
        requests = [
            FakeRequest(f"r{at}", [5, 6], engine_interfaces.EngineParams(extra_args={"nucleate": fields}), 5)
            for at, fields in enumerate(params)
        ]
        rng = np.random.default_rng(0)
        runner: Any = SecondRunner(vllm, config(), rng) if second else FirstRunner(vllm, config(), rng, interface)
        runner.run(requests)
        assert requests[0].output == requests[1].output == expected([5, 6], {"temperature": 0}, 5)
    assert caplog.text.count("a request is sampled by vLLM: logit_bias names token 1000000") >= 2


@pytest.mark.parametrize("is_real", [False], indirect=True)
def test_an_invalid_row_is_left_to_the_engine(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = sglang_params(sglang)
    good, bad = (
        SimpleNamespace(rid=f"q{at}", origin_input_ids=[1], output_ids=[], decode_batch_idx=0) for at in range(2)
    )
    logits = torch.from_numpy(np.stack([logits_after((1,))] * 2).copy())
    logits[1, 9] = float("nan")
    rows = []
    for at, request in enumerate((good, bad)):
        request.sampling_params = params({"temperature": 0}, 2 * at)
        rows.append(request.sampling_params.custom_params | {"__req__": request})
    out = sglang.NucleateLogitProcessor()(logits.clone(), rows)
    assert int(out[0].argmax()) == int(logits[0].argmax())
    assert int((out[0] > -np.inf).sum()) == 1
    assert torch.equal(out[1].isnan(), logits[1].isnan())
    assert "is left to the engine: NaN at token 9" in caplog.text
    refused = SimpleNamespace(**vars(good) | {"rid": "q3"})
    del refused.nucleate_row
    refused.sampling_params = params({"stop": ["x"]}, 0)
    same = sglang.NucleateLogitProcessor()(
        logits[:1].clone(), [refused.sampling_params.custom_params | {"__req__": refused}]
    )
    assert torch.equal(same, logits[:1])
    assert "request q3 is sampled by SGLang: stop cannot be in custom_params" in caplog.text
    with pytest.raises(nc.ParameterError, match="stop cannot be in custom_params"):
        sglang.nucleate_params(stop=["x"])
