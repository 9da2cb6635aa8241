"""Rows that come, say something and go, on two ``Past``: as tensors and by kernels. Tells where they differ."""

from __future__ import annotations

import random
import unittest.mock
from typing import Any

import interpreted
import numpy as np
import torch

import nucleate as nc
from nucleate.backends.cuda import rows
from nucleate.backends.cuda.past import Past
from nucleate.backends.resident import Penalties, Repeats, Resident
from nucleate.stages import (
    BadWords,
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    Presence,
    Repetition,
    Temperature,
    TopP,
    Typical,
)

HERE = torch.device("cpu")


def resident(rng: random.Random, size: int) -> Resident:
    """A row with some of all that a device does to its scores."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(size) for _ in range(rng.randrange(1, most)))

    def lists(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(some(5) for _ in range(rng.randrange(most)))

    row = Resident((1.0, 0.0, 0, 0.0, 1.0, 0.0, 1.0))
    if rng.random() < 0.7:
        rules = rng.choice([1.3, 0.7]), rng.uniform(-1, 1), rng.uniform(-1, 1)
        row = row._replace(penalties=Penalties(*rules, rng.choice([None, -1, 0, 1, 2, 5, 30]), counts=True))
    if rng.random() < 0.4:
        added = {token: rng.choice([-np.inf, rng.uniform(-2, 2)]) for token in some(9)}
        row = row._replace(before=added, late=dict.fromkeys(some(4), rng.uniform(-1, 1)))
    if rng.random() < 0.3:
        row = row._replace(until={token: rng.randrange(1, 9) for token in some(5)})
    if rng.random() < 0.4:
        base, least = rng.choice([1.0, 1.000001, 1.75, 11.0]), rng.randrange(1, 4)
        breakers = lists(4)
        row = row._replace(
            repeats=Repeats(0.7, base, 1e37, rng.choice([3, 150, 2**40]), least, rng.choice([-1, 0, 4, 9]), breakers)
        )
    if rng.random() < 0.3:
        row = row._replace(ngram=rng.randrange(1, 5))
    if rng.random() < 0.3:
        row = row._replace(words=tuple(word for word in lists(9) if len(word) > 1))
    return row


def told(edits: Any, size: int) -> list[dict[int, tuple[bytes, ...]]]:
    """What is done to which tokens of each row, bit by bit: of ``Edits``."""
    rows = zip(edits.ids_RK.tolist(), *(column.numpy() for column in edits[1:]), strict=True)
    return [
        {token: tuple(x.tobytes() for x in numbers) for token, *numbers in zip(*row, strict=True) if token < size}
        for row in rows
    ]


def looked_up(index: Any, size: int) -> list[dict[int, tuple[bytes, ...]]]:
    """The same of an ``Index``, as kernels look it up."""
    found = []
    for words_W2, entries_K3 in zip(index.words_RW2.numpy(), index.entries_RK3.numpy(), strict=True):
        row = {}
        for token in range(size):
            word, base = int(words_W2[token // 32, 0]) & 0xFFFFFFFF, int(words_W2[token // 32, 1])
            if word >> token % 32 & 1:
                entry = base + (word & ((1 << token % 32) - 1)).bit_count()
                row[token] = tuple(x.tobytes() for x in entries_K3[entry])
        found.append(row)
    return found


def apart(one: Past, other: Past) -> str:
    """Which arrays of two differ."""
    both = [
        (
            past.slots.lines_SC,
            past.slots.said(torch.arange(len(past.slots)), past.slots.ring - 1),  # the oldest token is of no account
            past.entries.state_SKC,
            past.matches.lengths_SL,
            past.lists.words_FNT,
        )
        for past in (one, other)
    ]
    return ", ".join(str(n) for n, (a, b) in enumerate(zip(*both, strict=True)) if not torch.equal(a, b))


def story(seed: int, steps: int, size: int, prompt: int, block: int) -> str:
    """Where kernels part from tensors, or nothing. prompt: the longest; block: how much a program takes at once."""
    from nucleate.backends.cuda.special import edits_launch

    edits_launch.BLOCK = edits_launch.FAR = block
    rng = random.Random(seed)
    few = min(size, rng.choice([3, size]))  # with few different tokens much is repeated
    pasts = [Past(size, HERE, torch.float64, 4) for _ in range(2)]
    kept: dict[int, Resident] = {}
    for step in range(steps):
        if len(kept) < 2 or (rng.random() < 0.3 and len(kept) < 5):
            row = resident(rng, min(size, 3 * few))
            said = [[rng.randrange(few) for _ in range(rng.randrange(prompt))] for _ in range(2)]
            word = rng.getrandbits(64)
            [slot] = {past.put(row, word, *said) for past in pasts}
            kept[slot] = row
        elif rng.random() < 0.15:
            slot = rng.choice([*kept])
            row = kept.pop(slot)
            for past in pasts:
                past.give_back(slot, row)
        asked = rng.sample([*kept], rng.randrange(1, len(kept) + 1))
        growing = [place for place, slot in enumerate(asked) if kept[slot].grows]
        for past in pasts:
            past.reserve([asked[place] for place in growing], 1)
        slots_R, looks = torch.tensor(asked), any(kept[slot].looks for slot in asked)
        if any(row.edits for row in kept.values()):
            edits = pasts[0].edits(slots_R, looks)
            index = edits_launch.index(pasts[1], slots_R, size, looks=looks)
            if told(edits, size) != looked_up(index, size):
                return f"edits at step {step}"
        tokens_R = torch.tensor([rng.choice([-1, *[rng.randrange(few) for _ in range(4)]]) for _ in asked])
        pasts[0].push(slots_R, tokens_R, torch.tensor(growing) if growing else None, looks)
        edits_launch.push(pasts[1], slots_R, tokens_R, grows=bool(growing), looks=looks)
        if parted := apart(*pasts):
            return f"arrays {parted} at step {step}"
    return ""


def shifts(rng: random.Random, size: int) -> tuple[Any, ...]:
    """What changes scores, with much of it by the order of what was said, in some order."""

    def words(most: int) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(rng.randrange(size) for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, most))
        )

    window = rng.choice([None, -1, 3, 20])
    found = [
        Repetition(rng.choice([0.8, 1.4]), window),
        Frequency(rng.uniform(-0.5, 1.0), window),
        Presence(rng.uniform(-0.5, 1.0), rng.choice([window, 5])),
        Dry(rng.uniform(0.5, 3.0), 1.75, rng.randrange(1, 3), rng.choice([None, words(3)]), rng.choice([-1, 6])),
        NoRepeatNgram(rng.randrange(1, 4)),
        BadWords(words(5)),
        LogitBias({rng.randrange(size): rng.uniform(-2.0, 2.0) for _ in range(3)}),
        MinTokens(3, (0, 1)),
    ]
    some = [one for one in found if rng.random() < 0.6] or found[3:4]
    if rng.random() < 0.4:
        rng.shuffle(some)
    return tuple(some)


def written(backend: str, seed: int, steps: int, size: int, ring: int = 32) -> list[list[int]]:
    """What some rows write, each token by the last: many scores are close, so that edits decide.

    ring: how many tokens of a row a device keeps at first.
    """
    with unittest.mock.patch.object(rows, "RING", ring):
        rng, sampler = random.Random(seed), nc.Sampler(size, backend)
    table_VV = np.random.default_rng(seed).normal(size=(size, size)).astype(np.float32) * 1.5
    last = []
    for row in range(3):
        prompt = [rng.randrange(size) for _ in range(rng.randrange(1, 12))]
        draw = (Temperature(0.5), TopP(0.95), Gumbel(row)) if rng.random() < 0.6 else (Typical(0.9), Gumbel(row))
        sampler.add((*shifts(rng, size), *draw), prompt, seed=row)
        last.append(prompt[-1])
    for step in range(steps):
        if step % 5 == 4:
            sampler.push(1, step % size)
        found = sampler(table_VV[last]).token_ids.tolist()
        last = [max(token, 0) for token in found]
    return [list(sampler.output_ids(row)) for row in sampler.rows]


if __name__ == "__main__":
    interpreted.serve(globals())
