"""Columns: the parameters of rows of one structure, equal to those of the stages after anything that happens."""

from __future__ import annotations

import random

import numpy as np
import pytest

import nucleate as nc
from nucleate.columns import Columns, lines_of, structure_of
from nucleate.stages import (
    AdaptiveP,
    Dry,
    Frequency,
    Greedy,
    Gumbel,
    Logprobs,
    MinTokens,
    Mirostat,
    NoRepeatNgram,
    Temperature,
    TopK,
    TopP,
    Typical,
    Xtc,
)

V = 37


def logits(seed, rows):
    return np.random.default_rng(seed).normal(size=(rows, V)).astype(np.float32) * 3


def assert_columns(sampler):
    """The columns say what the stages say."""
    assert {structure_of(sampler.stages(row)) for row in sampler._rows} == set(sampler.groups)
    for structure, group in sampler.groups.items():
        assert group.structure == structure
        assert group.lines == lines_of(structure)
        assert sorted(group.rows) == sorted(r for r in sampler._rows if structure_of(sampler.stages(r)) == structure)
        assert group.values.shape == (len(group.lines), len(group.rows))
        for place, row in enumerate(group.rows):
            stages = sampler.stages(row)
            given = [getattr(stages[line.place], line.attribute) for line in group.lines]
            np.testing.assert_array_equal(group.values[:, place], [np.nan if v is None else float(v) for v in given])


def test_the_lines_are_every_number_but_the_seed():
    lines = lines_of(structure_of((Temperature(1.5), Xtc(0.5), Mirostat(2.0), TopK(3, with_ties=True), Gumbel(1))))
    assert [tuple(line) for line in lines] == [
        *[(0, "t"), (1, "probability"), (1, "threshold"), (2, "tau"), (2, "eta"), (2, "mu"), (3, "k"), (3, "with_ties")]
    ]


@pytest.mark.parametrize("seed", range(4))
def test_columns_are_the_parameters_after_any_sequence_of_events(seed):
    numbers, sampler, live = random.Random(seed), nc.Sampler(V), []
    kinds = [
        lambda: (
            Temperature(numbers.random() + 0.1),
            TopP(0.5 + numbers.random() / 2),
            Gumbel(numbers.getrandbits(64)),
        ),
        lambda: (Mirostat(5 * numbers.random() + 0.1, numbers.random()), Gumbel(1)),
        lambda: (AdaptiveP(numbers.random(), 0.5), Mirostat(3.0), Gumbel(2)),
        lambda: (Frequency(1.0, numbers.choice([None, -1, 5])), Dry(numbers.random() + 0.1), Gumbel(3)),
        lambda: (NoRepeatNgram(numbers.randrange(1, 9)), Temperature(0.0)),
        lambda: (TopK(numbers.randrange(1, 9)), TopP(1.0), Typical(0.5), Gumbel(4)),
        lambda: (Logprobs(numbers.choice([None, 2]), (1,)), Gumbel(5)),
        lambda: (Greedy(),),
    ]
    for step in range(120):
        for _ in range(numbers.choice([0, 0, 1, 3])):
            live.append(sampler.add(numbers.choice(kinds)(), [1, 2]))
        for _ in range(numbers.choice([0, 0, 1, 2]) if step < 100 else 9):
            if live:
                sampler.remove(live.pop(numbers.randrange(len(live))))
        chosen = [row for row in live if numbers.random() < 0.5]
        x = logits(step, len(chosen))
        x[: numbers.randrange(3), 0] = np.nan
        sampler(x, chosen)
        assert_columns(sampler)


@pytest.mark.parametrize("number", [2**53 + 1, 2**70, 10**400], ids=["not a float64", "not 64 bits", "not a float"])
def test_numbers_that_no_column_holds_exactly_are_a_row_or_an_error_but_nothing_between(number):
    sampler = nc.Sampler(V)
    for stages in (
        (MinTokens(number, (1,)), Gumbel(0)),
        (NoRepeatNgram(number), Gumbel(0)),
        (Dry(1.0, last_n=number), Gumbel(0)),
    ):
        known = list(sampler._rows)
        try:
            row = sampler.add(stages)
        except ValueError:
            assert list(sampler._rows) == known
        else:
            assert list(sampler._rows) == [*known, row]
        assert sorted(r for group in sampler.groups.values() for r in group.rows) == list(sampler._rows)
    assert sampler(logits(0, len(sampler._rows))).errors == {}


def test_a_column_that_goes_leaves_its_place_to_the_last():
    columns = Columns((Temperature(1.0),))
    for row in range(9):
        columns.add(10 + row, (Temperature(float(row)),))
    for gone, rows in (
        (13, [10, 11, 12, 18, 14, 15, 16, 17]),
        (17, [10, 11, 12, 18, 14, 15, 16]),
        (18, [10, 11, 12, 16, 14, 15]),
    ):
        columns.remove(gone)
        assert columns.rows == rows
        assert columns.values.tolist() == [[row - 10 for row in rows]]
        assert len(columns) == len(rows)
    columns.update(16, (Temperature(0.25),))
    assert columns.values[0, 3] == 0.25
    columns.add(99, (Temperature(7.0),))
    assert (columns.rows[-1], columns.values[0, -1]) == (99, 7.0)
