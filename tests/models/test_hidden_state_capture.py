"""The batched Llama captures the hidden states of the unbatched model."""

from __future__ import annotations

import numpy as np
import pytest
from runner_driver import Driver
from toy_models import PagedToy, Toy

from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.numpy_llama import Llama, LlamaContext
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput, SequentialRunner

MEMORY = 8 << 20


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(EMBEDDED)


class LayerwiseLlama(LlamaContext):
    """The unbatched model with access to the hidden state before each layer."""

    def hidden(self, layer: int, ids: list[int]) -> np.ndarray:
        short = object.__new__(Llama)
        short.__dict__.update(self.model.__dict__, layers=self.model.layers[:layer])
        return LlamaContext(short)._forward(ids)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return [0, *np.random.default_rng(seed + length).integers(0, 4096, length - 1).tolist()]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("layers", [(0,), (6,), (2, 4, 6), (5, 1, 5), (0, 1, 2, 3, 4, 5, 6)])
def test_they_equal_those_of_the_unbatched_model(layers: tuple[int, ...], model: Llama) -> None:
    runner = BatchedLlama(model, MEMORY)
    runner.capture_hidden_states(layers)
    texts = [random_ids(length) for length in (1, 5, 17, 40)]
    reads = [(0, 1), (0, 5), (0, 17), (0, 30)], [(30, 40)], []
    for read in reads:
        parts = [
            ModelInput(i, texts[-len(read) + i], *span, [3 * i, 3 * i + 1, 3 * i + 2], i % 2)
            for i, span in enumerate(read)
        ]
        runner.forward(parts)
        expected = [
            np.concatenate(
                [LayerwiseLlama(model).hidden(layer, part.token_ids[: part.stop])[part.start :] for layer in layers], 1
            )
            for part in parts
        ]
        assert runner.hidden_states.dtype == np.float32
        assert runner.hidden_states.shape == (sum(stop - start for start, stop in read), 192 * len(layers))
        if read and read[0][0] == 0:
            np.testing.assert_allclose(runner.hidden_states, np.concatenate(expected), atol=1e-4, rtol=1e-4)


def test_chunks_in_separate_steps(model: Llama) -> None:
    runner, [text] = BatchedLlama(model, MEMORY), [random_ids(40)]
    runner.capture_hidden_states((3, 6))
    got = []
    for start, stop in ((0, 7), (7, 8), (8, 31), (31, 40)):
        runner.forward([ModelInput(0, text, start, stop, [5, 1, 9], 1)])
        got.append(runner.hidden_states)
    reference = LayerwiseLlama(model)
    expected = np.concatenate([reference.hidden(3, text), reference.hidden(6, text)], 1)
    np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-4, rtol=1e-4)


def test_logits_are_bit_equal_with_and_without_capture(model: Llama) -> None:
    one, two = BatchedLlama(model, MEMORY), BatchedLlama(model, MEMORY)
    two.capture_hidden_states((2, 4, 6))
    parts = [ModelInput(0, random_ids(9), 0, 9, [0], 3), ModelInput(1, random_ids(33), 0, 33, [1, 2, 3], 1)]
    np.testing.assert_array_equal(one.forward(parts), two.forward(parts))
    assert one.hidden_states.shape == (0, 0)
    assert two.hidden_states.shape == (42, 576)
    two.capture_hidden_states(())
    two.forward(parts)
    assert two.hidden_states.shape == (0, 0)


def test_hidden_states_are_copies(model: Llama) -> None:
    runner = BatchedLlama(model, MEMORY)
    runner.capture_hidden_states((0, 6))
    runner.forward([ModelInput(0, random_ids(9), 0, 9, [0], 1)])
    before, copy = runner.hidden_states, runner.hidden_states.copy()
    runner.forward([ModelInput(0, random_ids(20), 0, 9, [0], 1)])
    np.testing.assert_array_equal(before, copy)


@pytest.mark.parametrize("layers", [(7,), (-1,), (0, 9)])
def test_invalid_layers(layers: tuple[int, ...], model: Llama) -> None:
    with pytest.raises(ValueError, match=r"the layers must be in 0\.\.6, got"):
        BatchedLlama(model, MEMORY).capture_hidden_states(layers)


def test_runners_without_hidden_state_capture(model: Llama) -> None:
    runner = SequentialRunner(model, 10)
    runner.capture_hidden_states(())
    with pytest.raises(ModelError, match="from a model that runs batched"):
        runner.capture_hidden_states((1,))
    assert runner.hidden_states.size == 0


def test_a_toy_returns_positions_and_ids() -> None:
    runner = PagedToy(Toy(lambda _: np.zeros(9, np.float32), 9), 4)
    runner.capture_hidden_states((3, 1))
    runner.forward([ModelInput(0, [5, 6, 7, 8], 1, 3, [0], 0), ModelInput(1, [4], 0, 1, [1], 1)])
    np.testing.assert_array_equal(runner.hidden_states, [[1, 6, 1, 6], [2, 7, 2, 7], [0, 4, 0, 4]])


def test_capture_with_the_driver(model: Llama) -> None:
    driver = Driver(runner_of(model, MEMORY), 7)
    driver.runner.capture_hidden_states((6,))
    driver.add(random_ids(12))
    driver.add(random_ids(30))
    driver.run(5)
    assert driver.runner.hidden_states.shape[1] == 192
