"""The NumPy Llama, packed and in blocks, equals itself one sequence at a time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import Driver

from nucleate.models import packed_llama, plain
from nucleate.models.llama import Llama
from nucleate.models.load import EMBEDDED, runner_of
from nucleate.models.model import ModelError
from nucleate.models.packed_llama import PackedLlama, compiled
from nucleate.models.runner import Part

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
    runner = PackedLlama(model, 50 * BLOCK_BYTES)
    for pool in runner.pools:
        for array in pool:
            array[:] = np.nan
    driver = Driver(runner, seed=4)
    for ids in prompts(5, 29):
        driver.add(ids)
    driver.run(6)
    assert_as_alone(driver, model)


def test_the_logits_of_any_number_of_last_tokens(model: Llama) -> None:
    runner = PackedLlama(model, 10 * BLOCK_BYTES)
    one, two, three = prompts(12, 30, 9)
    expected = [model.begin().forward_all(ids) for ids in (one, two, three)]
    none = runner.forward([Part(0, one, 0, 5, [1], 0), Part(1, two, 0, 25, [2, 5], 0)])
    assert none.shape == (0, 4096)
    parts = [Part(0, one, 5, 12, [1], 3), Part(2, three, 0, 9, [8], 9), Part(1, two, 25, 30, [2, 5], 0)]
    wanted = np.concatenate([expected[0][-3:], expected[2]])
    for _ in range(2):  # the same positions once more
        np.testing.assert_allclose(runner.forward(parts), wanted, atol=2e-4)
    assert runner.forward([]).shape == (0, 4096)


@pytest.mark.parametrize(("token", "message"), [(-1, r"in 0\.\.4095"), (4096, r"in 0\.\.4095")])
def test_what_cannot_be_read_is_refused_and_harms_nothing(token: int, message: str, model: Llama) -> None:
    runner = PackedLlama(model, 10 * BLOCK_BYTES)
    [ids] = prompts(12)
    runner.forward([Part(0, ids, 0, 6, [1], 0)])
    with pytest.raises(ValueError, match=message):
        runner.forward([Part(0, ids, 6, 12, [1], 1), Part(1, [token], 0, 1, [2], 1)])
    logits = runner.forward([Part(0, ids, 6, 12, [1], 1)])
    np.testing.assert_allclose(logits[0], model.begin().forward(ids), atol=2e-4)


def test_a_text_past_the_context_is_refused(model: Llama) -> None:
    runner = PackedLlama(model, 100 * BLOCK_BYTES)
    with pytest.raises(ValueError, match="1025 tokens do not fit the context of 1024"):
        runner.forward([Part(0, [5] * 1025, 1024, 1025, list(range(65)), 1)])
    assert runner.forward([Part(0, [5] * 1024, 1000, 1024, list(range(64)), 1)]).shape == (1, 4096)


def test_memory_is_what_was_given(model: Llama) -> None:
    assert PackedLlama(model, 10 * BLOCK_BYTES).blocks == PackedLlama(model, 11 * BLOCK_BYTES - 1).blocks == 10
    with pytest.raises(ModelError, match=f"hold no block of {BLOCK_BYTES}: give more"):
        PackedLlama(model, BLOCK_BYTES - 1)


def test_it_says_what_it_is(model: Llama) -> None:
    runner = runner_of(model, 1 << 20)
    assert (runner.paged, runner.asynchronous, runner.block_size) == (True, False, 16)
    assert (runner.vocab_size, runner.context_length, runner.runtime) == (4096, 1024, "numpy float32")


@pytest.mark.parametrize("shape", ["untied", "one kv head", "no sharing", "own head size", "epsilon"])
def test_every_shape_of_the_architecture(shape: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="makes the weights")
    from test_llama import SHAPES, folder_of

    model = Llama(folder_of(tmp_path, **SHAPES[shape]))
    driver = Driver(runner_of(model, 1 << 20), seed=5)
    for length in (1, 5, 30, 60):
        driver.add(np.random.default_rng(length).integers(0, 97, length).tolist())
    driver.run(12)
    assert_as_alone(driver, model)


@pytest.mark.parametrize("length", [1, 8, 16, 40])
def test_one_alone_is_read_without_kernels_and_with_others_goes_on(length: int, model: Llama) -> None:
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed=length)
    driver.add(prompts(length)[0])
    driver.run(12)
    assert driver.runner.kernels.decode is None
    driver.add(prompts(21)[0])
    driver.run(24)
    assert driver.runner.kernels.decode is not None
    assert_as_alone(driver, model)


def test_with_kernels_a_draft_is_read_to_the_bit_as_token_by_token(model: Llama) -> None:
    together, alone = (PackedLlama(model, 20 * BLOCK_BYTES) for _ in range(2))
    together.kernels = alone.kernels = compiled()
    one, two = prompts(40, 33)
    for runner in (together, alone):
        runner.forward([Part(0, one, 0, 33, [1, 5, 3], 0), Part(1, two, 0, 29, [2, 4, 6], 0)])
    drafts = together.forward([Part(0, one, 33, 40, [1, 5, 3], 7), Part(1, two, 29, 33, [2, 4, 6], 4)])
    for row, place in enumerate(range(33, 40)):
        np.testing.assert_array_equal(alone.forward([Part(0, one, place, place + 1, [1, 5, 3], 1)])[0], drafts[row])
    for row, place in enumerate(range(29, 33)):
        np.testing.assert_array_equal(alone.forward([Part(1, two, place, place + 1, [2, 4, 6], 1)])[0], drafts[7 + row])


def test_one_that_is_alone_has_kernels_from_its_first_draft_on(model: Llama) -> None:
    runner = PackedLlama(model, 10 * BLOCK_BYTES)
    [ids] = prompts(30)
    runner.forward([Part(0, ids, 0, 20, [1, 2], 1)])
    assert runner.kernels.decode is None
    runner.forward([Part(0, ids, 20, 24, [1, 2], 4)])
    assert runner.kernels.decode is not None


@pytest.mark.parametrize("kept", [True, False])
def test_one_that_is_alone_for_long_has_kernels_in_the_end(kept: bool, model: Llama, monkeypatch: Any) -> None:
    compiled()
    monkeypatch.setattr(packed_llama, "PATIENCE", (4, 9))
    monkeypatch.setattr("nucleate.core.kept.holds", lambda place: kept)
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed=1)
    driver.add(prompts(9)[0])
    forwards, end, read = [], 4 if kept else 9, PackedLlama._read

    def watch(own: PackedLlama, packing: Any) -> Any:
        forwards.append(own.kernels.decode is not None)
        return read(own, packing)

    monkeypatch.setattr(PackedLlama, "_read", watch)
    driver.run(12)
    assert forwards == [False] * (end - 1) + [True] * (len(forwards) - end + 1)
    assert len(forwards) > end
    assert_as_alone(driver, model)


def test_meanwhile_all_but_drafts_are_read_without_kernels(model: Llama, monkeypatch: Any) -> None:
    """While another thread compiles; a draft waits, as it is to be read to the bit as token by token."""
    ready, begun, go = compiled(), threading.Event(), threading.Event()

    def wait() -> Any:
        begun.set()
        assert go.wait(30)
        return ready

    monkeypatch.setattr(packed_llama, "compiled", wait)
    monkeypatch.setattr(packed_llama, "PATIENCE", (1, 1))
    driver = Driver(runner_of(model, 100 * BLOCK_BYTES), seed=1)
    runner = driver.runner
    assert isinstance(runner, PackedLlama)
    thread = threading.Thread(target=runner.warm)
    thread.start()
    assert begun.wait(30)
    for prompt in prompts(9, 20, 3):
        driver.add(prompt)
    driver.run(6)
    assert runner.kernels.decode is None
    [ids] = prompts(30)
    blocks = [driver.free.pop(), driver.free.pop()]
    drafted = threading.Thread(target=runner.forward, args=([Part(99, ids, 0, 24, blocks, 4)],))
    drafted.start()
    drafted.join(0.1)
    assert drafted.is_alive()
    go.set()
    drafted.join(30)
    thread.join(30)
    assert runner.kernels is ready
    driver.run(12)
    assert_as_alone(driver, model)


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_one_alone_has_kernels_too_unless_they_failed(fails: bool, model: Llama, monkeypatch: Any) -> None:
    runner = PackedLlama(model, 10 * BLOCK_BYTES)
    if fails:
        with monkeypatch.context() as broken:
            broken.setattr(packed_llama, "compiled", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runner.warm()
    else:
        runner.warm()
    one, two = prompts(5, 6)
    runner.forward([Part(0, one, 0, 5, [1], 1)])
    assert (runner.kernels.decode is None) == fails
    runner.forward([Part(0, one, 4, 5, [1], 1), Part(1, two, 0, 6, [2], 1)])  # who needs them tries again
    assert runner.kernels.decode is not None


@pytest.mark.parametrize(("tokens", "size"), [(1, 2), (7, 62), (33, 192)])
def test_kernels_and_their_twins(tokens: int, size: int) -> None:
    random = np.random.default_rng(size)

    def some(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    kernels = compiled()
    given = some(tokens, size), some(tokens, size), some(size), np.float32(1e-5)
    left, right = ([array.copy() for array in given] for _ in range(2))
    outs = np.empty((tokens, size), np.float32), np.empty((tokens, size), np.float32)
    kernels.normalise(*left, outs[0])
    plain.add_and_normalise(*right, outs[1])
    np.testing.assert_array_equal(left[0], right[0])
    np.testing.assert_allclose(*outs, rtol=2e-5, atol=1e-6)

    heads, angle = some(tokens, 5, size), some(tokens, size // 2)
    turned = heads[:, :3].copy(), heads[:, :3].copy()
    kernels.rotate(turned[0], np.cos(angle), np.sin(angle))
    plain.rotate(turned[1], np.cos(angle), np.sin(angle))
    np.testing.assert_allclose(*turned, rtol=1e-5, atol=1e-6)

    both = some(tokens, 2 * size, scale=40)
    kernels.gate(both, outs[0])
    plain.gate(both, outs[1])
    np.testing.assert_allclose(*outs, rtol=1e-5, atol=1e-6)
