"""Sampler on a device with rows of any pipeline signature: token for token the outputs of the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensor_pipelines as staged
import tiers
import triton_interpreter as interpreted
from custom_stages import Overflowing

import nucleate as nc
from nucleate.sampling.gpu.device_batch import TOO_LARGE
from nucleate.sampling.stages import (
    AdaptiveP,
    Gumbel,
    LogitBias,
    Logprobs,
    Mask,
    Mirostat,
    Suppress,
    Temperature,
    TopK,
    Typical,
)

torch = pytest.importorskip("torch", reason="rows on a device are tensors")

SIZES = (1, 2, 33, 255, 256, 257, 300)


def assert_equals_cpu(seed: int, got: Any, size: int, steps: int, kinds: int = 4) -> None:
    expected = staged.mixed("reference", seed, size, steps, kinds)
    assert len(got) == len(expected)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        if isinstance(one, tuple) and any(why == TOO_LARGE for _, why in one[1]):
            return  # the CPU samples in float64, and continues: see docs/cuda.md
        assert staged.near(one, other, 1e-8), (seed, step, one, other)


@pytest.mark.parametrize("size", SIZES)
def test_rows_of_many_signatures_equal_the_cpu(size: int) -> None:
    for seed in range(100 * size, 100 * size + tiers.count(1, 4)):
        assert_equals_cpu(seed, staged.mixed("torch", seed, size, 4), size, 4)


@pytest.mark.exhaustive
def test_very_many_rows_of_many_signatures() -> None:
    for seed in range(10_000, 11_000):
        size = SIZES[seed % len(SIZES)]
        assert_equals_cpu(seed, staged.mixed("torch", seed, size, 4), size, 4)


@pytest.mark.slow
def test_rows_of_many_signatures_with_kernels() -> None:
    """With noise computed by a kernel."""
    pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")
    kernels = interpreted.Interpreted(str(Path(staged.__file__)))
    for seed, size in ((5, 257), (6, 33)):
        assert_equals_cpu(seed, kernels.call("mixed", "triton", seed, size, 2, 3), size, 2, 3)
    kernels.close()


ORDERS = {
    "vllm": nc.SamplingParams(temperature=0.8, min_p=0.05, top_k=20, top_p=0.9, order="vllm", seed=1),
    "hf": nc.SamplingParams(temperature=0.7, top_k=9, top_p=0.9, typical_p=0.8, eta_cutoff=0.01, order="hf", seed=2),
    "llama.cpp": nc.SamplingParams(
        top_n_sigma=1.5, top_k=30, typical_p=0.9, top_p=0.9, min_p=0.01, xtc_probability=0.5, temperature=0.7,
        frequency_penalty=0.3, order="llama.cpp", seed=3,
    ),
    "akunu": nc.SamplingParams(temperature=1.2, min_p=0.02, top_p=0.8, repetition_penalty=1.1, order="akunu", seed=4),
    "canonical": nc.SamplingParams(dynamic_temperature_low=0.5, dynamic_temperature_high=1.5, top_h=0.5, seed=5),
}  # fmt: skip


def test_every_preset_order_runs_on_the_device() -> None:
    assert ORDERS.keys() == nc.PRESETS.keys()
    sampler, other = nc.Sampler(400, "torch"), nc.Sampler(400, "reference")
    for params in ORDERS.values():
        assert nc.explain(params, device="mps").backend == "torch", nc.explain(params, device="mps").why
        for one in (sampler, other):
            one.add(params, [1, 2, 3])
    assert all(row in sampler._device for row in sampler.rows)
    rng = np.random.default_rng(0)
    for _ in range(12):
        x_RV = (rng.normal(size=(5, 400)) * 2).astype(np.float32)
        got, expected = sampler(torch.from_numpy(x_RV)), other(x_RV)
        assert got.token_ids.tolist() == expected.token_ids.tolist()


def test_states_stay_on_the_device_until_they_are_read() -> None:
    stages = (Mirostat(3.0), AdaptiveP(0.2), Logprobs(2), Gumbel(7))
    sampler, other = nc.Sampler(60, "torch"), nc.Sampler(60, "reference")
    rows = [one.add(stages, seed=5) for one in (sampler, other)]
    assert rows == [0, 0]
    rng = np.random.default_rng(1)
    for step in range(30):
        x_RV = (rng.normal(size=(1, 60)) * 3).astype(np.float32)
        if step == 9:
            x_RV[0, 5] = np.nan  # a row without a token does not change
        if step % 7 == 3:
            tokens = [int(np.argmax(one.distributions(0, torch.from_numpy(x_RV))[0])) for one in (sampler, other)]
            given = [one.accept(0, tokens[1], x_RV[0]) for one in (sampler, other)]
            assert staged.near(staged.logprobs_as_lists([given[0]]), staged.logprobs_as_lists([given[1]]))
        elif step % 7 == 5:
            for one in (sampler, other):
                one.accept(0, step)
        else:
            got, expected = sampler(torch.from_numpy(x_RV)), other(x_RV)
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            assert staged.near(staged.logprobs_as_lists(got.logprobs), staged.logprobs_as_lists(expected.logprobs))
            assert dict(got.errors) == dict(expected.errors)
        if step % 4 == 0:
            assert staged.near(staged.parameters(sampler.stages(0)), staged.parameters(other.stages(0)))
    assert sampler.output_ids(0) == other.output_ids(0)


def test_a_nan_state_is_an_error_of_its_row() -> None:
    stages = (Overflowing(), Gumbel(1))
    out = []
    for backend in ("torch", "reference"):
        sampler = nc.Sampler(9, backend)
        sampler.add(stages)
        step = sampler(torch.zeros(1, 9))
        out.append((step.token_ids.tolist(), dict(step.errors), sampler.output_ids(0)))
    assert out[0] == out[1]
    assert out[0][0] == [-1]


def test_a_mask_follows_leading_logprobs_and_precedes_the_rest() -> None:
    """The position that ``with_mask`` chooses."""
    ways = (
        (LogitBias({1: 2.0}), Logprobs(3, (1, 2)), Gumbel(1)),
        (LogitBias({1: 2.0}), Mask(), Logprobs(3), Gumbel(1)),
        (Suppress((1,)), Temperature(0.5), Logprobs(3, (0,)), TopK(4), Gumbel(1)),
        (Typical(0.9), Logprobs(40), Gumbel(1)),
        (Logprobs(3), Typical(0.9), Gumbel(1)),
    )
    sampler, other = nc.Sampler(40, "torch"), nc.Sampler(40, "reference")
    for stages in ways:
        sampler.add(stages)
        other.add(stages)
    assert all(row in sampler._device for row in sampler.rows)
    x_RV = np.random.default_rng(3).normal(size=(5, 40)).astype(np.float32)
    for mask in (None, np.full((5, 2), 0x0F0F0F0F, np.int32)):
        got, expected = sampler(x_RV, mask=mask), other(x_RV, mask=mask)
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert staged.near(staged.logprobs_as_lists(got.logprobs), staged.logprobs_as_lists(expected.logprobs))


def test_a_loop_samples_rows_of_any_signature_and_states_stop_where_rows_end() -> None:
    table_VV = torch.from_numpy(np.random.default_rng(5).normal(size=(40, 40)).astype(np.float32) * 2)
    ways = ((Mirostat(2.0), Gumbel(1)), (Typical(0.8), Temperature(0.7), Gumbel(2)), (TopK(5), Gumbel(3)))
    sampler, other = nc.Sampler(40, "torch"), nc.Sampler(40, "reference")
    for stages in ways:
        sampler.add(stages)
        other.add(stages)
    loop = sampler.loop(lambda tokens_R, active_R: table_VV[tokens_R], [7, 8, 9], steps=6, stop_ids=range(3))
    sampled = torch.cat([loop(), loop(), loop()], 1).tolist()
    for row, first in enumerate((7, 8, 9)):
        last, output = first, []
        while len(output) < 18 and not (output and output[-1] < 3):
            last = int(other(table_VV[last][None], [row]).token_ids[0])
            output.append(last)
        assert sampled[row] == [*output, *[-1] * (18 - len(output))]
        assert staged.near(staged.parameters(sampler.stages(row)), staged.parameters(other.stages(row)))
