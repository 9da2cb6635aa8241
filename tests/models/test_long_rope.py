"""LongRoPE models: a sequence that crosses ``original_max_position_embeddings`` gets the tokens of ``generate``.

Transformers recomputes a sequence with the long factors once it is longer than the original context. The logits after
a token therefore depend on the sequence up to that token only: not on chunks, preemption or other sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import runner_of
from nucleate.models.transformers.transformers_model import TransformersModel

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")

from random_models import greedy  # noqa: E402
from toy_requests import run_tokens  # noqa: E402

ORIGINAL, OUTPUTS = 32, 24
LENGTHS = (2, 12, 31, 32, 33, 50)


@pytest.fixture(scope="module")
def model() -> TransformersModel:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=ORIGINAL,
        initializer_range=0.2, bos_token_id=0, eos_token_id=1, pad_token_id=0,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8,
            "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0],
        },
    )  # fmt: skip
    return TransformersModel.of(transformers.Phi3ForCausalLM(config))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(3, 199, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: TransformersModel, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(model.model, ids, OUTPUTS) for ids in prompts]


@pytest.fixture(scope="module")
def stock_logits(model: TransformersModel, prompts: list[list[int]]) -> Any:
    """The logits after each beginning of the longest prompt, without a cache."""
    ids = prompts[-1]
    with torch.inference_mode():
        begun = [model.model(input_ids=torch.tensor([ids[: end + 1]]), use_cache=False) for end in range(len(ids))]
    return np.stack([one.logits[0, -1].numpy() for one in begun])


def run(engine: Engine, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    greedy = nc.SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True, **params)
    return run_tokens(engine, [Request(ids, greedy) for ids in prompts])


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(
    ("blocks", "options"),
    [(None, {}), (6, {}), (None, {"max_num_seqs": 4, "max_num_batched_tokens": 4})],
    ids=["a batch", "preemption", "a small token budget"],
)
def test_tokens_equal_generate(
    model: TransformersModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    llm: nc.LLM,
    blocks: Any,
    options: Any,
) -> None:
    runner = runner_of(model, 32 << 20 if blocks is None else blocks * 16 * model.token_bytes)
    engine = Engine(runner, llm.tokenizer, **options)
    assert run(engine, prompts) == expected
    assert blocks is None or engine.stats.num_preemptions > 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("cuts", [(), (10,), (31,), (32,), (33,), (20, 40), (1, 31, 32, 33, 34)])
def test_logits_do_not_depend_on_chunks(
    model: TransformersModel,
    prompts: list[list[int]],
    stock_logits: Any,
    cuts: tuple[int],
) -> None:
    ids = prompts[-1]
    context, parts = model.begin(), []
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        parts.append(context.forward_all(ids[start:stop]))
    np.testing.assert_allclose(np.concatenate(parts), stock_logits, atol=1e-3)
    last = model.begin()
    for start, stop in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        np.testing.assert_allclose(last.forward(ids[start:stop]), stock_logits[stop - 1], atol=1e-3)


def test_a_prefill_beyond_the_limit_takes_one_pass(
    model: TransformersModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, stock = [], model.model.forward

    def counted(**named: Any) -> Any:
        lengths.append(named["input_ids"].shape[1])
        return stock(**named)

    monkeypatch.setattr(model.model, "forward", counted)
    context = model.begin()
    context.forward(prompts[-1])
    context.forward([5])
    assert lengths == [50, 1]
    crossing = model.begin()
    crossing.forward(prompts[-1][:32])
    crossing.forward([5])
    crossing.forward([6])
    assert lengths[2:] == [32, 33, 1]
