"""Whole steps of rows that edit their scores by what they said: by kernels, and by the tensor operations they replace.

Edits, the draw of the chain, and what follows it: ring, counts, repeats. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import gpu_chains
import numpy as np
import torch
from gpu_chains import Call

import nucleate as nc
from nucleate.backends.cuda.past import Past
from nucleate.backends.cuda.slots import STEP
from nucleate.backends.resident import Resident
from nucleate.dispatch.chain import chain_of
from nucleate.dispatch.device import resident_of
from nucleate.pipeline import simplify

WORDS = ((5, 6), (7, 8, 9))
CHAINS: Mapping[str, Mapping[str, Any]] = {
    "step, penalties": {**gpu_chains.ALL, **gpu_chains.PENALTIES},
    "step, penalties and repeats": {
        **gpu_chains.ALL,
        **gpu_chains.PENALTIES,
        **dict(dry_multiplier=0.8, no_repeat_ngram_size=4, bad_words=WORDS),
    },
}
STEPS = 4000
"""Tokens for which there is room."""


def resident(params: Mapping[str, Any]) -> Resident:
    row = resident_of(chain_of(simplify(nc.SamplingParams(**params).pipeline())))
    assert isinstance(row, Resident), row  # noqa: S101  # they are in the superset
    return row


def pasts(rows: int, size: int, params: Mapping[str, Any], device: str, room: int = STEPS) -> tuple[Past, torch.Tensor]:
    """Rows that have said something, and their slots."""
    past, row = Past(size, torch.device(device), torch.float64, 1 << 13), resident(params)
    said_RS = np.random.default_rng(rows).integers(0, min(size, 2000), (rows, gpu_chains.SEEN)).tolist()
    slots = [past.put(row, seed, [], said) for seed, said in enumerate(said_RS)]
    past.reserve(slots, room)
    return past, torch.tensor(slots, device=device)


def calls(rows: int, size: int, chain: str, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Call]]:
    """A step by kernels, and by tensors but for the draw. Steps go back before each call, so that rings do not fill."""
    from nucleate.backends.cuda.special import edits_launch, launch
    from nucleate.backends.cuda.special.index import Index, index_of

    params = CHAINS[chain]
    looks, logits_RV = resident(params).looks, gpu_chains.made(rows, size, "all", dtype, device).logits_RV
    work, every_R = launch.Workspace(rows, size, device), torch.arange(rows, device=device)
    past, slots_R = pasts(rows, size, params, device)
    numbers_RC, seeds_R, first_R = past.slots.numbers(slots_R), past.slots.seeds(slots_R), past.slots.steps(slots_R)

    def back() -> None:
        past.slots.lines_SC[:, STEP].index_copy_(0, slots_R, first_R)

    def drawn(index: Index) -> torch.Tensor:
        return launch.sample(logits_RV, numbers_RC, seeds_R, past.slots.steps(slots_R), work, index)

    def kernels() -> None:
        drawn_R = drawn(edits_launch.index(past, slots_R, size, looks=looks))
        edits_launch.push(past, slots_R, drawn_R, grows=True, looks=looks)

    def tensors() -> None:
        past.push(slots_R, drawn(index_of(past.edits(slots_R, looks), size)), every_R, looks)

    yield "nucleate", Call(kernels, back)
    yield "tensors", Call(tensors, back)


def check(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Kernels against tensors, step by step, to the last bit: (what, rows that are wrong, rows)."""
    from nucleate.backends.cuda.special import edits_launch
    from nucleate.backends.cuda.special.index import index_of

    numbers, steps = np.random.default_rng(size), 40 if device == "cuda" else 3
    for chain, params in CHAINS.items():
        looks, wrong = resident(params).looks, 0
        (one, slots_R), (other, _) = (pasts(rows, size, params, device, steps) for _ in range(2))
        every_R = torch.arange(rows, device=device)
        for _ in range(steps):
            expected = index_of(one.edits(slots_R, looks), size)
            found = edits_launch.index(other, slots_R, size, looks=looks)
            there_RW1 = expected.words_RW2[:, :, :1] != 0
            words_RW = ((found.words_RW2 != expected.words_RW2) & there_RW1).any(2) | (
                (found.words_RW2[:, :, 0] != 0) & ~there_RW1[:, :, 0]
            )
            known_RK1 = one.entries.ids(slots_R)[:, :, None] < size
            entries_RK3 = (found.entries_RK3 != expected.entries_RK3) & known_RK1
            wrong += int((words_RW.any(1) | entries_RK3.flatten(1).any(1)).sum())
            tokens_R = torch.from_numpy(numbers.integers(-1, 9, rows)).to(device)
            one.push(slots_R, tokens_R, every_R, looks)
            edits_launch.push(other, slots_R, tokens_R, grows=True, looks=looks)
            arrays = ((past.slots.lines_SC, past.entries.state_SKC, past.matches.lengths_SL) for past in (one, other))
            pushed = [a != b for a, b in zip(*arrays, strict=True)]
            wrong += sum(int(each.flatten(1).any(1).sum()) for each in pushed if each.numel())
        yield f"{chain}, {size}", wrong, steps * rows
