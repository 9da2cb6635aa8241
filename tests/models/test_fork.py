"""Forked sequences: each continues as if computed separately."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiers
from toy_models import PagedToy, Toy

from nucleate.models.loader import EMBEDDED, runner_of
from nucleate.models.numpy_llama import Llama
from nucleate.models.protocol import Model
from nucleate.models.runner import Fork, ModelInput, Runner, SequentialRunner


def of_transformers(name: str) -> Model:
    pytest.importorskip("transformers", reason="needs the extra 'torch'")
    from test_batched_transformers import ONE_BY_ONE, PACKED, model_of

    return model_of(*(PACKED | ONE_BY_ONE)[name][:2])


def read(runner: Runner, key: int, ids: Sequence[int], start: int, blocks: list[int]) -> np.ndarray:
    """The logits of the last token."""
    return np.array(runner.forward([ModelInput(key, list(ids), start, len(ids), blocks, 1)]))[0]


def fork_everywhere(runner: Runner, model: Model, positions: Sequence[int], atol: float) -> None:
    size = runner.block_size
    prompt = np.random.default_rng(0).integers(3, min(199, runner.vocab_size), 70).tolist()
    free = iter(range(runner.blocks))
    keys = iter(range(1, 1000))
    for position in positions:
        parent, child, grandchild = next(keys), next(keys), next(keys)
        blocks = [next(free) for _ in range(-(-80 // size))]
        read(runner, parent, prompt[:position], 0, blocks)
        full, rest = divmod(position, size)
        others = [[*blocks[:full], *[next(free) for _ in range(-(-80 // size) - full)]] for _ in range(2)]
        pairs = [(blocks[full], own[full]) if rest and runner.paged else None for own in others]
        runner.fork([Fork(parent, child, pairs[0]), Fork(parent, grandchild, pairs[1])])
        for step in range(3):  # continue them alternately with different tokens
            for key, table, token in ((parent, blocks, 7), (child, others[0], 8), (grandchild, others[1], 9)):
                ids = [*prompt[:position], *[token] * (step + 1)]
                ours_V = read(runner, key, ids, len(ids) - 1, table)
                np.testing.assert_allclose(ours_V, model.begin().forward(ids), atol=atol)
        for key in (parent, child, grandchild):
            runner.forget(key)


@pytest.mark.slow
def test_the_embedded_model() -> None:
    model = Llama(EMBEDDED)
    fork_everywhere(runner_of(model, 64 << 20), model, (1, 2, 15, 16, 17, 32, 47), 5e-4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["llama", "mistral", "mamba", "jamba"])
def test_models_of_transformers(name: str) -> None:
    model = of_transformers(name)
    runner = runner_of(model, 64 << 20)
    assert runner.paged == (name in ("llama", "mistral"))
    fork_everywhere(runner, model, (16, 17, 1, 15, 40)[: tiers.count(2, 5)], 2e-3)


@pytest.mark.slow
def test_a_batched_model_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from nucleate.models.transformers import batched_model

    monkeypatch.setattr(batched_model, "has_kernel", lambda *_: False)
    model = of_transformers("llama")
    fork_everywhere(runner_of(model, 64 << 20), model, (1, 16, 21), 2e-3)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_models_without_weights(size: int) -> None:
    model = Toy(lambda seen: np.random.default_rng(seen).normal(size=199).astype(np.float32), 199)
    fork_everywhere(PagedToy(model, 4096, size), model, (1, 2, 3, 16, 40), 0)
    fork_everywhere(SequentialRunner(model, 4096, size), model, (1, 2, 3, 16, 40), 0)


class Counting:
    """A model that counts the tokens computed by its contexts, and their copies."""

    runtime = "counting"
    vocab_size, context_length = 9, 99

    def __init__(self, *, copies: bool = True) -> None:
        self.copies, self.read, self.copied = copies, 0, 0

    def __deepcopy__(self, memo: Any) -> Counting:
        raise AssertionError("weights are not copied")

    def begin(self) -> CountingContext:
        return CountingContext(self)


class CountingContext:
    def __init__(self, model: Counting) -> None:
        self.model, self.seen = model, []

    def __deepcopy__(self, memo: dict[int, Any]) -> CountingContext:
        if not self.model.copies:
            raise TypeError("it cannot be copied")
        made = CountingContext(copy.deepcopy(self.model, memo))
        made.seen = list(self.seen)
        self.model.copied += 1
        return made

    def forward(self, token_ids: Sequence[int]) -> np.ndarray:
        self.model.read += len(token_ids)
        self.seen += token_ids
        return np.full(9, sum(self.seen), np.float32)


@pytest.mark.parametrize("copies", [True, False])
def test_contexts_are_copied_or_recomputed(copies: bool) -> None:
    model = Counting(copies=copies)
    runner = SequentialRunner(model, 9)
    read(runner, 1, [1, 2, 3, 4], 0, [])
    runner.fork([Fork(1, 2, None), Fork(77, 3, None)])  # an unknown (preempted) parent is skipped
    assert read(runner, 2, [1, 2, 3, 4, 5], 4, [])[0] == 15
    assert read(runner, 1, [1, 2, 3, 4, 6], 4, [])[0] == 16
    assert (model.read, model.copied) == ((6, 1) if copies else (10, 0))
    for key in (1, 2, 3):
        runner.forget(key)
    assert not runner._open
