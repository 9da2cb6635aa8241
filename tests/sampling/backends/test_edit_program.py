"""Edit programs: the compiled form of a row's Shifts has the effect of the Shifts, step after step."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import param
from nucleate.sampling import reference
from nucleate.sampling.cpu.fused_runner import EditProgram, count_table
from nucleate.sampling.history import History
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.maths import INFINITY, where
from nucleate.sampling.pipeline import as_pipeline, has_constant_listing, simplify, to_fused_pipeline
from nucleate.sampling.stage import Shift, TokenInfo
from nucleate.sampling.stages import (
    Allowed,
    BadWords,
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    Presence,
    Repetition,
    Suppress,
)

SIZE = 1000


class Every(Shift):
    """Bans the tokens with even ids: the rule depends on the id, so it is not a plain ban."""

    touches = "listed"

    def apply(self, x, token):
        return where(token.id % 2 == 0, -INFINITY, x)

    def listing(self, history):
        return dict.fromkeys(range(20), 0.0)


class Twice(Shift):
    """Adds its listing, as LogitBias does, but lists something else each time."""

    touches = "listed"
    size: float = param("what is added", default=1.0, low=-5.0, high=5.0)

    def apply(self, x, token):
        return x + token.listed

    def listing(self, history):
        return {len(history.output): self.size, len(history.output) + 1: 2 * self.size}


class Beyond(Shift):
    """Lists a token that may be outside the vocabulary."""

    touches = "listed"
    at: int = param("which", default=0, low=-10)

    def apply(self, x, token):
        return x + token.listed

    def listing(self, history):
        return {self.at: 1.0}


class Once(Shift):
    """A custom penalty."""

    touches = "output"

    def apply(self, x, token):
        return x - 1.0 / (1.0 + token.output_count)


class Fails(Shift):
    touches = "listed"

    def apply(self, x, token):
        return x + token.listed

    def listing(self, history):
        raise RuntimeError("out of order")


def read(address, count):
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


def counted(table):
    ids, prompt, output, n = (int(one) for one in table)
    columns = zip(read(prompt, n), read(output, n), strict=True)
    return dict(zip(read(ids, n), columns, strict=True))


@pytest.mark.parametrize("window", [None, -1, 0, 1, 7, 100])
def test_the_count_table_points_to_the_current_counts(window):
    rng = random.Random(1)
    prompt, output = ([rng.randrange(40) for _ in range(30)] for _ in range(2))
    memory = IncrementalHistory((Frequency(0.4),), prompt, output)
    table = memory.table(window)
    for _ in range(200):
        fixed, owner = count_table(History(prompt, memory.output), window)
        assert counted(table) == counted(fixed)
        assert table is memory.table(window)
        assert owner is not None
        memory.push(rng.randrange(rng.choice((3, 40, 400))))


STAGES = [
    (Repetition(1.3), Frequency(0.4), Presence(-0.3)),
    (Presence(0.2, 5), Repetition(0.7, 5), LogitBias({3: 2.0, 999: -1.0}), Frequency(1.0, -1)),
    (LogitBias({1: 30.0}), Repetition(1.5), LogitBias({1: -30.0, 2: 1.0})),
    (Suppress((0, 1, 2)), Allowed(tuple(range(0, 999, 3))), NoRepeatNgram(2)),
    (Dry(0.8), BadWords(((3,), (6, 9))), MinTokens(12, (5, 6))),
    (Twice(3.0), Repetition(2.0)),
    (Allowed((7,)),),
]


@pytest.mark.parametrize("stages", STAGES, ids=lambda stages: "+".join(stage.name for stage in stages))
def test_edits_of_a_growing_row_equal_the_reference(stages):
    """With scores where few tokens are likely, so that lists and counts matter; also without a history."""
    pipeline = (*stages, Gumbel(7))
    assert not isinstance(to_fused_pipeline(simplify(pipeline)), str)
    sampler = nc.Sampler(SIZE, backend="cpu")
    row = sampler.add(pipeline, [3, 6, 3], output_ids=[6, 3])
    history, changed, rng = [6, 3], 0, np.random.default_rng(3)
    for step in range(2, 30):
        x = rng.normal(size=(1, SIZE)).astype(np.float32)
        x[:, [1, 3, 6, 7, 9]] += 7
        past = History([3, 6, 3], history)
        expected = reference.draw(x[0], pipeline, 7, step, past)
        changed += expected != reference.draw(x[0], pipeline[-1:], 7, step, past)
        given = dict(step=step, prompt_ids=[[3, 6, 3]], output_ids=[history])
        assert nc.sample(x, pipeline, backend="cpu", **given).tolist() == [expected]
        assert sampler(x).token_ids.tolist() == [expected]
        history.append(expected)
    assert sampler.output_ids(row) == tuple(history)
    assert changed > 3


def test_constant_lists_are_built_once():
    fixed = [LogitBias({3: 2.0}), Suppress((1,)), Allowed((1, 2)), Beyond(3)]
    moving = [MinTokens(3, (1,)), Twice(), NoRepeatNgram(2), BadWords(((1,),)), Dry(1.0), Fails()]
    assert [has_constant_listing(stage) for stage in (*fixed, *moving)] == [True] * 4 + [False] * 6


@pytest.mark.parametrize("token", [-1, -10, SIZE, 2**40])
def test_a_token_outside_the_vocabulary_is_an_error_of_its_row(token):
    x = np.zeros((2, SIZE), np.float32)
    sampler = nc.Sampler(SIZE, backend="cpu")
    sampler.add((Beyond(token), Gumbel(1)))
    sampler.add((Beyond(5), Gumbel(1)))
    result = sampler(x)
    assert result.token_ids[0] == -1 < result.token_ids[1]
    assert list(result.errors) == [0]
    assert f"token {token}" in result.errors[0]


def test_an_exception_in_a_listing_is_raised_by_the_fallback():
    with pytest.raises(RuntimeError, match="out of order"):
        nc.sample(np.zeros((1, SIZE), np.float32), (Fails(), Gumbel(1)), backend="cpu")


def test_only_the_exact_known_rules_are_compiled_to_edits():
    assert isinstance(to_fused_pipeline((Every(), Gumbel(1))), str)
    assert isinstance(to_fused_pipeline((Once(), Gumbel(1))), str)
    assert not isinstance(to_fused_pipeline((Twice(), Gumbel(1))), str)

    class Far(Shift):
        """The same rule with a different infinity."""

        touches = "masked"

        def apply(self, x: float, token: TokenInfo) -> float:
            return x - FAR

    def rule(far):
        return lambda self, x, token: x - far

    for stage in (Far(), type("Closed", (Shift,), {"touches": "masked", "apply": rule(3.0)})()):
        assert isinstance(to_fused_pipeline((stage, Gumbel(1))), str)


FAR = 3.0


def test_consecutive_penalties_over_the_same_counts_are_one_edit():
    def edits(*stages):
        return to_fused_pipeline(simplify(as_pipeline(stages))).edits

    [one] = edits(Repetition(1.3), Frequency(0.4), Presence(0.3))
    assert len(one.rules) == 3
    assert one.window is None
    assert [edit.window for edit in edits(Repetition(1.3, 5), Frequency(0.4, 5), Presence(0.3, 6))] == [5, 6]
    assert len(edits(Repetition(1.3), LogitBias({1: 2.0}), Frequency(0.4))) == 3


def test_a_program_keeps_its_address():
    memory = IncrementalHistory((Twice(), Frequency(1.0)), [1], [2])
    program = EditProgram(to_fused_pipeline((Twice(), Frequency(1.0), Gumbel(1))).edits, memory, SIZE)
    at = program.commands_at
    for token in range(50):
        memory.push(token)
        program.refresh()
        assert program.commands_at == at == (program.commands.ctypes.data, 2)
        assert read(int(program.commands[0, 1]), 2) == [len(memory.output), len(memory.output) + 1]
