"""The NumPy Llama, packed and in blocks, equals itself one sequence at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runner_driver import Driver

from nucleate.models.kernels import numpy_fallback
from nucleate.models.llama import batched_llama
from nucleate.models.llama.batched_llama import BatchedLlama, compiled
from nucleate.models.llama.numpy_llama import Llama
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput

BLOCK_BYTES = 6 * 2 * 2 * 16 * 32 * 4  # layers, keys and values, heads, tokens, size, bytes


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(EMBEDDED)


def prompts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(sum(lengths))
    return [[0, *random.integers(0, 4096, length - 1).tolist()] for length in lengths]


def assert_as_alone(driver: Driver, model: Llama) -> None:
    for one in driver.sequences:
        context = model.begin()
        logits_V = context.forward(one.ids[: one.prompt])
        for token, ours_V in zip(one.ids[one.prompt :], one.logits, strict=True):
            np.testing.assert_allclose(ours_V, logits_V, atol=2e-4)
            assert logits_V[token] >= logits_V.max() - 1e-4
            logits_V = context.forward([token])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_say_what_each_says_alone(seed: int, model: Llama) -> None:
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed)
    for ids in prompts(1, 2, 8, 9, 16, 17, 40, 130):
        driver.add(ids)
    driver.run(20)
    assert_as_alone(driver, model)


def test_a_prefix_is_read_once_for_many(model: Llama) -> None:
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed=3)
    [common, *ends] = prompts(35, 4, 1, 20)
    first = driver.add(common + ends[0])
    driver.step({0: 1000})
    others = [driver.add(common + end, sharing=first) for end in ends[1:]]
    others.append(driver.add(common[:32], sharing=first))
    assert [one.shared for one in others] == [2, 2, 1]
    driver.run(10)
    assert_as_alone(driver, model)


def test_what_lies_in_unused_places_does_no_harm(model: Llama) -> None:
    runner = BatchedLlama(model, 50 * BLOCK_BYTES)
    for pool in runner.caches:
        for array in pool:
            array[:] = np.nan
    driver = Driver(runner, seed=4)
    for ids in prompts(5, 29):
        driver.add(ids)
    driver.run(6)
    assert_as_alone(driver, model)


def test_the_logits_of_any_number_of_last_tokens(model: Llama) -> None:
    runner = BatchedLlama(model, 10 * BLOCK_BYTES)
    one, two, three = prompts(12, 30, 9)
    expected = [model.begin().forward_all(ids) for ids in (one, two, three)]
    none = runner.forward([ModelInput(0, one, 0, 5, [1], 0), ModelInput(1, two, 0, 25, [2, 5], 0)])
    assert none.shape == (0, 4096)
    parts = [
        ModelInput(0, one, 5, 12, [1], 3),
        ModelInput(2, three, 0, 9, [8], 9),
        ModelInput(1, two, 25, 30, [2, 5], 0),
    ]
    wanted = np.concatenate([expected[0][-3:], expected[2]])
    for _ in range(2):  # the same positions once more
        np.testing.assert_allclose(runner.forward(parts), wanted, atol=2e-4)
    assert runner.forward([]).shape == (0, 4096)


@pytest.mark.parametrize(("token", "message"), [(-1, r"in 0\.\.4095"), (4096, r"in 0\.\.4095")])
def test_what_cannot_be_read_is_refused_and_harms_nothing(token: int, message: str, model: Llama) -> None:
    runner = BatchedLlama(model, 10 * BLOCK_BYTES)
    [ids] = prompts(12)
    runner.forward([ModelInput(0, ids, 0, 6, [1], 0)])
    with pytest.raises(ValueError, match=message):
        runner.forward([ModelInput(0, ids, 6, 12, [1], 1), ModelInput(1, [token], 0, 1, [2], 1)])
    logits = runner.forward([ModelInput(0, ids, 6, 12, [1], 1)])
    np.testing.assert_allclose(logits[0], model.begin().forward(ids), atol=2e-4)


def test_a_text_past_the_context_is_refused(model: Llama) -> None:
    runner = BatchedLlama(model, 100 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="1025 tokens exceed the context length 1024"):
        runner.forward([ModelInput(0, [5] * 1025, 1024, 1025, list(range(65)), 1)])
    assert runner.forward([ModelInput(0, [5] * 1024, 1000, 1024, list(range(64)), 1)]).shape == (1, 4096)


def test_memory_is_what_was_given(model: Llama) -> None:
    assert BatchedLlama(model, 10 * BLOCK_BYTES).blocks == BatchedLlama(model, 11 * BLOCK_BYTES - 1).blocks == 10
    with pytest.raises(ModelError, match=f"needs at least {BLOCK_BYTES} bytes"):
        BatchedLlama(model, BLOCK_BYTES - 1)


def test_it_says_what_it_is(model: Llama) -> None:
    runner = runner_of(model, 1 << 20)
    assert (runner.paged, runner.asynchronous, runner.block_size) == (True, False, 16)
    assert (runner.vocab_size, runner.context_length, runner.runtime) == (4096, 1024, "numpy float32")


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("shape", ["untied", "one kv head", "no sharing", "own head size", "epsilon"])
def test_every_shape_of_the_architecture(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="makes the weights")
    from test_numpy_llama import SHAPES, folder_of

    model = Llama(folder_of(tmp_path, **SHAPES[shape]))
    driver = Driver(runner_of(model, 1 << 20), seed=5)
    for length in (1, 5, 30, 60):
        driver.add(np.random.default_rng(length).integers(0, 97, length).tolist())
    driver.run(12)
    assert_as_alone(driver, model)


class Later:
    """Kernels that are not there yet."""

    ready = False

    def __init__(self) -> None:
        self.lost: list[float] = []

    def record_fallback(self, seconds: float) -> None:
        self.lost.append(seconds)


@pytest.mark.parametrize("length", [1, 8, 16, 40])
@pytest.mark.fast_cases(2)
def test_it_goes_on_without_kernels_until_they_are_there(length: int, model: Llama, monkeypatch: Any) -> None:
    library = Later()
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
    assert_as_alone(driver, model)


def test_with_kernels_a_draft_is_read_to_the_bit_as_token_by_token(model: Llama) -> None:
    together, alone = (BatchedLlama(model, 20 * BLOCK_BYTES) for _ in range(2))
    together.kernels = alone.kernels = compiled()
    one, two = prompts(40, 33)
    for runner in (together, alone):
        runner.forward([ModelInput(0, one, 0, 33, [1, 5, 3], 0), ModelInput(1, two, 0, 29, [2, 4, 6], 0)])
    drafts = together.forward([ModelInput(0, one, 33, 40, [1, 5, 3], 7), ModelInput(1, two, 29, 33, [2, 4, 6], 4)])
    for row, place in enumerate(range(33, 40)):
        np.testing.assert_array_equal(
            alone.forward([ModelInput(0, one, place, place + 1, [1, 5, 3], 1)])[0], drafts[row]
        )
    for row, place in enumerate(range(29, 33)):
        np.testing.assert_array_equal(
            alone.forward([ModelInput(1, two, place, place + 1, [2, 4, 6], 1)])[0], drafts[7 + row]
        )


def test_who_drafts_has_kernels_before_the_first_forward(model: Llama) -> None:
    runner = BatchedLlama(model, 10 * BLOCK_BYTES)
    assert runner.kernels is batched_llama.NUMPY
    runner.warm()
    assert runner.kernels is not batched_llama.NUMPY


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (7, 62), (33, 192)])
def test_kernels_and_their_twins(tokens: int, size: int) -> None:
    random = np.random.default_rng(size)

    def some(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    kernels = compiled()
    given = some(tokens, size), some(tokens, size), some(size), np.float32(1e-5)
    left, right = ([array.copy() for array in given] for _ in range(2))
    outs = np.empty((tokens, size), np.float32), np.empty((tokens, size), np.float32)
    kernels.add_and_normalise(*left, outs[0])
    numpy_fallback.add_and_normalise(*right, outs[1])
    np.testing.assert_array_equal(left[0], right[0])
    np.testing.assert_allclose(*outs, rtol=2e-5, atol=1e-6)

    heads, angle = some(tokens, 5, size), some(tokens, size // 2)
    turned = heads[:, :3].copy(), heads[:, :3].copy()
    kernels.rotate(turned[0], np.cos(angle), np.sin(angle))
    numpy_fallback.rotate(turned[1], np.cos(angle), np.sin(angle))
    np.testing.assert_allclose(*turned, rtol=1e-5, atol=1e-6)

    both = some(tokens, 2 * size, scale=40)
    kernels.gate(both, outs[0])
    numpy_fallback.gate(both, outs[1])
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)
