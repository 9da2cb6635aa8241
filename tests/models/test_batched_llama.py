"""The batched, paged NumPy Llama equals the unbatched one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_driver import Driver

from nucleate.models import batched_llama, cpu_operations
from nucleate.models.batched_llama import BatchedLlama, compiled
from nucleate.models.loader import runner_of
from nucleate.models.numpy_llama import Llama
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput

BLOCK_BYTES = 6 * 2 * 2 * 16 * 32 * 4  # layers, K and V, heads, tokens, head size, bytes


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(sum(lengths))
    return [[0, *random.integers(0, 4096, length - 1).tolist()] for length in lengths]


def assert_equals_unbatched(driver: Driver, model: Llama) -> None:
    for one in driver.sequences:
        context = model.begin()
        logits_V = context.forward(one.ids[: one.prompt])
        for token, ours_V in zip(one.ids[one.prompt :], one.logits, strict=True):
            np.testing.assert_allclose(ours_V, logits_V, atol=2e-4)
            assert logits_V[token] >= logits_V.max() - 1e-4
            logits_V = context.forward([token])


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("seed", range(3))
def test_batched_outputs_equal_unbatched_ones(seed: int, model: Llama) -> None:
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed)
    for ids in prompts(1, 2, 8, 9, 16, 17, 40, 130):
        driver.add(ids)
    driver.run(20)
    assert_equals_unbatched(driver, model)


@pytest.mark.parametrize(("token", "message"), [(-1, r"in 0\.\.4095"), (4096, r"in 0\.\.4095")])
def test_invalid_inputs_are_rejected_without_effect(token: int, message: str, model: Llama) -> None:
    runner = BatchedLlama(model, 10 * BLOCK_BYTES)
    [ids] = prompts(12)
    runner.forward([ModelInput(0, ids, 0, 6, [1], 0)])
    with pytest.raises(ValueError, match=message):
        runner.forward([ModelInput(0, ids, 6, 12, [1], 1), ModelInput(1, [token], 0, 1, [2], 1)])
    logits = runner.forward([ModelInput(0, ids, 6, 12, [1], 1)])
    np.testing.assert_allclose(logits[0], model.begin().forward(ids), atol=2e-4)


def test_inputs_beyond_the_context_are_rejected(model: Llama) -> None:
    runner = BatchedLlama(model, 100 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="1025 tokens exceed the context length 1024"):
        runner.forward([ModelInput(0, [5] * 1025, 1024, 1025, list(range(65)), 1)])
    assert runner.forward([ModelInput(0, [5] * 1024, 1000, 1024, list(range(64)), 1)]).shape == (1, 4096)


def test_the_kv_cache_fits_the_given_memory(model: Llama) -> None:
    assert BatchedLlama(model, 10 * BLOCK_BYTES).blocks == BatchedLlama(model, 11 * BLOCK_BYTES - 1).blocks == 10
    with pytest.raises(ModelError, match=f"needs at least {BLOCK_BYTES} bytes"):
        BatchedLlama(model, BLOCK_BYTES - 1)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shape", ["untied", "one kv head", "no sharing", "own head size", "epsilon"])
def test_all_shapes_of_the_architecture(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="makes the weights")
    from test_numpy_llama import SHAPES, folder_of

    model = Llama(folder_of(tmp_path, **SHAPES[shape]))
    driver = Driver(runner_of(model, 1 << 20), seed=5)
    for length in (1, 5, 30, 60):
        driver.add(np.random.default_rng(length).integers(0, 97, length).tolist())
    driver.run(12)
    assert_equals_unbatched(driver, model)


class NotCompiled:
    """Kernels that are not compiled yet."""

    ready = False

    def __init__(self) -> None:
        self.lost: list[float] = []

    def record_fallback(self, seconds: float) -> None:
        self.lost.append(seconds)


@pytest.mark.parametrize("length", [1, 8, 16, 40])
@pytest.mark.fast_cases(0)
def test_numpy_is_used_until_the_kernels_are_compiled(length: int, model: Llama, monkeypatch: Any) -> None:
    library = NotCompiled()
    monkeypatch.setattr(batched_llama, "MODELS", library)
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed=length)
    for prompt in prompts(length, 21):
        driver.add(prompt)
    driver.run(12)
    assert driver.runner.kernels is batched_llama.NUMPY
    forwards = len(library.lost)
    assert forwards >= 12
    assert min(library.lost) > 0
    monkeypatch.undo()
    driver.run(24)
    assert driver.runner.kernels is not batched_llama.NUMPY
    assert len(library.lost) == forwards
    assert_equals_unbatched(driver, model)


def test_drafts_are_bit_equal_to_single_tokens_with_kernels(model: Llama) -> None:
    together, separate = (BatchedLlama(model, 20 * BLOCK_BYTES) for _ in range(2))
    together.kernels = separate.kernels = compiled()
    one, two = prompts(40, 33)
    for runner in (together, separate):
        runner.forward([ModelInput(0, one, 0, 33, [1, 5, 3], 0), ModelInput(1, two, 0, 29, [2, 4, 6], 0)])
    drafts = together.forward([ModelInput(0, one, 33, 40, [1, 5, 3], 7), ModelInput(1, two, 29, 33, [2, 4, 6], 4)])
    for row, position in enumerate(range(33, 40)):
        np.testing.assert_array_equal(
            separate.forward([ModelInput(0, one, position, position + 1, [1, 5, 3], 1)])[0], drafts[row]
        )
    for row, position in enumerate(range(29, 33)):
        np.testing.assert_array_equal(
            separate.forward([ModelInput(1, two, position, position + 1, [2, 4, 6], 1)])[0], drafts[7 + row]
        )


def test_speculation_loads_kernels_before_the_first_step(model: Llama) -> None:
    runner = BatchedLlama(model, 10 * BLOCK_BYTES)
    assert runner.kernels is batched_llama.NUMPY
    runner.warm()
    assert runner.kernels is not batched_llama.NUMPY


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (7, 62), (33, 192)])
def test_kernels_equal_numpy(tokens: int, size: int) -> None:
    random = np.random.default_rng(size)

    def random_array(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    kernels = compiled()
    given = random_array(tokens, size), random_array(tokens, size), random_array(size), np.float32(1e-5)
    left, right = ([array.copy() for array in given] for _ in range(2))
    outs = np.empty((tokens, size), np.float32), np.empty((tokens, size), np.float32)
    kernels.add_and_normalise(*left, outs[0])
    cpu_operations.add_and_normalise(*right, outs[1])
    np.testing.assert_array_equal(left[0], right[0])
    np.testing.assert_allclose(*outs, rtol=2e-5, atol=1e-6)

    heads, angle = random_array(tokens, 5, size), random_array(tokens, size // 2)
    turned = heads[:, :3].copy(), heads[:, :3].copy()
    kernels.rotate(turned[0], np.cos(angle), np.sin(angle))
    cpu_operations.rotate(turned[1], np.cos(angle), np.sin(angle))
    np.testing.assert_allclose(*turned, rtol=1e-5, atol=1e-6)

    both = random_array(tokens, 2 * size, scale=40)
    kernels.gate(both, outs[0])
    cpu_operations.gate(both, outs[1])
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)
