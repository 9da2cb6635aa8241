"""Whether a runner computes the same logits in every batch, to the last bit.

Matrix products and attention may use other kernels, or another order of additions, for other numbers of rows. Which do
depends on the processor, the types of the weights and the versions of libraries, so the model itself is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nucleate.models.runner import ModelInput, Runner

LENGTHS = (6, 7, 9, 5, 12)
"""Tokens of the sequences in the test."""
Call = Sequence[tuple[int, int, int, int]]
"""The inputs of a forward pass: sequence, start, stop and number of logits."""
CALLS: Sequence[tuple[Call, Sequence[Call]]] = (
    (
        [(0, 0, 6, 6), (1, 0, 7, 7)],
        [*[[(0, i, i + 1, 1)] for i in range(3)], [(1, 0, 5, 1)], [(0, 3, 5, 2), (1, 5, 6, 1)]],
    ),
    (
        [(2, 0, 9, 9), (3, 0, 5, 5), (4, 0, 12, 12)],
        [
            [(3, 0, 4, 4), (2, 0, 2, 1), (4, 0, 3, 1), (0, 5, 6, 1)],
            [(2, 2, 3, 1), (3, 4, 5, 1), (1, 6, 7, 1), (4, 3, 4, 1)],
            [(4, 4, 12, 8), (2, 3, 9, 1)],
        ],
    ),
)
"""Sequences as a whole, and the calls whose logits must be the same, the most different ones first."""


def is_batch_invariant(runner: Runner, many: int = 0) -> bool:
    """Compare the logits of a batch of whole sequences with those of other batches, down to single tokens.

    Uses the KV cache: call it before the first request. It computes about 100 tokens, fewer if logits differ. many:
    also compare a forward pass of so many tokens with smaller ones: products of many rows may use other kernels.
    """
    many = min(many, runner.blocks * runner.block_size, runner.context_length)
    return _few_rows_agree(runner) and (many < max(LENGTHS) or _many_rows_agree(runner, many))


def _few_rows_agree(runner: Runner) -> bool:
    size = runner.vocab_size
    ids = [[(7919 * row + 104_729 * i + 13) % size for i in range(length)] for row, length in enumerate(LENGTHS)]
    blocks = [-(-length // runner.block_size) for length in LENGTHS]
    if sum(blocks) > runner.blocks or len(LENGTHS) > getattr(runner, "max_sequences", len(LENGTHS)):
        return False
    tables = [[*range(sum(blocks[:row]), sum(blocks[: row + 1]))] for row in range(len(LENGTHS))]

    def compute(call: Call) -> Any:
        inputs = [ModelInput(row, ids[row], start, stop, tables[row], logits) for row, start, stop, logits in call]
        return _bits(runner, inputs)

    expected: dict[tuple[int, int], Any] = {}
    try:
        for whole, calls in CALLS:
            found = iter(compute(whole))
            expected.update({(row, i): next(found) for row, _, stop, _ in whole for i in range(stop)})
            for row, *_ in whole:
                runner.forget(row)
            for call in calls:
                found = iter(compute(call))
                places = [(row, i) for row, _, stop, logits in call for i in range(stop - logits, stop)]
                if any(not np.array_equal(expected[place], next(found)) for place in places):
                    return False
        return True
    finally:
        for row in range(len(LENGTHS)):
            runner.forget(row)


def _many_rows_agree(runner: Runner, count: int) -> bool:
    """Whether the last tokens of a forward pass have the same logits in smaller ones."""
    ids, blocks = [(7919 * i + 13) % runner.vocab_size for i in range(count)], range(runner.blocks)
    many = _bits(runner, [ModelInput(0, ids, 0, count, blocks, 3)])
    try:
        for rows in (1, 2, 3, count // 3):
            few = _bits(runner, [ModelInput(0, ids, count - rows, count, blocks, min(rows, 3))])
            if not np.array_equal(few, many[-len(few) :]):
                return False
        return True
    finally:
        runner.forget(0)


def _bits(runner: Runner, inputs: Sequence[ModelInput]) -> Any:
    """The bits of the logits."""
    logits_LV = runner.forward(inputs)
    return np.array(logits_LV.cpu() if hasattr(logits_LV, "cpu") else logits_LV, np.float32).view(np.int32)
