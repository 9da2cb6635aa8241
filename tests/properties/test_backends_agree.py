"""Incremental and full computation agree bit for bit, and rows do not affect each other, for every stage."""

from __future__ import annotations

import dataclasses
import random
import threading

import numpy as np
import pytest
import stage_examples as examples
from stage_examples import KINDS, SHIFTS, SIZE, assert_logprobs_close

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Draw, History
from nucleate.sampling.stages import Categorical, DynamicTemperature, Gumbel, Logprobs, Temperature, TopP


def random_text(seed, length, tokens):
    """A random text of few different tokens, so that it contains many repeats."""
    rng = random.Random(seed)
    return [rng.choice(tokens) for _ in range(length)]


def as_dicts(counts):
    """Counts by token, without order."""
    ids, *columns = (column.tolist() for column in counts)
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize("kind", SHIFTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", [(0, 0), (30, 0), (0, 30), (17, 23)], ids=str)
@pytest.mark.fast_cases(8)
def test_incremental_history_equals_history(kind, split):
    """For the same prompt and output, however much of it existed at the start."""
    for number, stage in enumerate(examples.examples(kind)):
        prompt, output = (random_text(number + 100 * n, n, (1, 2, 7)) for n in split)
        memory = IncrementalHistory((stage, Gumbel(1)), prompt, output)
        for token in [None, *random_text(number, 60, (1, 2, 7) if number % 2 else (1, 7, 1, 1, 5))]:
            if token is not None:
                memory.push(token)
                output.append(token)
            history = History(prompt, output)
            assert as_dicts(memory.counts(stage.window)) == as_dicts(history.counts(stage.window))
            assert stage.neutral or memory.listing(stage) == history.listing(stage)
        assert memory.output == output
        assert memory.prompt == prompt


class FullRecomputation:
    """A reference for one row of a Sampler that recomputes every step from the full history."""

    def __init__(self, stages, prompt, seed):
        self.stages, self.prompt, self.output, self.seed = stages, prompt, [], seed

    def step(self, logits, mask=None):
        past = History(self.prompt, self.output, mask)
        stages = self.stages if mask is None else with_mask(self.stages)
        try:
            result = reference.run(logits, stages, self.seed, len(self.output), past)
        except reference.RowError as error:
            return str(error)
        self.output.append(result.token)
        self.stages = result.stages if stages is self.stages else without_mask(result.stages)
        return result


def with_draw(stage, seed):
    if isinstance(stage, Draw):
        return (dataclasses.replace(stage, seed=seed) if "seed" in stage.parameters else stage,)
    return (stage, Logprobs(2, (3,)), Gumbel(seed)) if seed % 3 else (Temperature(1.5), stage, Categorical(seed))


def requests():
    """A pipeline for every kind of stage, several for most, with prompts."""
    made = []
    for kind in KINDS:
        for stage in examples.examples(kind, most=3):
            if kind.name != "logprobs":
                made.append((with_draw(stage, len(made)), random_text(len(made), len(made) % 19, (1, 2, 7))))
    dense = [k for k in KINDS if not issubclass(k, Draw) and k.name != "logprobs"]
    for turn in range(6):  # many rows at once
        rng = random.Random(turn)
        stages = [rng.choice(examples.on(kind)) for kind in dense if rng.random() < 0.4 and examples.on(kind)]
        made.append(((*stages, Gumbel(turn)), random_text(turn, 9, (1, 2, 7))))
    return made


def logits(step, count, narrow=True):
    """Rows in which few tokens are likely, so that texts repeat themselves."""
    x = np.random.default_rng(step).normal(size=(count, SIZE)).astype(np.float32) * 2
    if narrow:
        x[:, [1, 2, 7, 30]] += 6
    return x


STEPS = 13

on_every_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])


def run_references():
    """The outputs of each request from its own reference."""
    batch = requests()
    references = [
        FullRecomputation(simplify(stages), prompt, getattr(stages[-1], "seed", 0)) for stages, prompt in batch
    ]
    masks = [examples.masks(step, len(batch)) if step % 4 == 3 else None for step in range(STEPS)]
    outputs = []
    for step, mask in enumerate(masks):
        x = logits(step, len(batch))
        outputs.append(
            [row_reference.step(x[i], None if mask is None else mask[i]) for i, row_reference in enumerate(references)]
        )
    return batch, masks, references, outputs


@pytest.fixture(scope="module")
def references():
    return run_references()


NUMBERS = ("mu", "mean")
"""State attributes that may differ in their last digits, because backends sum in different orders."""


def near(one, other):
    return one == other or one == pytest.approx(other, rel=1e-9, abs=1e-12)


def assert_stages_close(one, other):
    """Check pipelines for equal stages with ``near`` states."""
    for actual, expected in zip(one, other, strict=True):
        assert type(actual) is type(expected)
        for attribute in actual.parameters:
            pair = getattr(actual, attribute), getattr(expected, attribute)
            assert near(*pair) if attribute in NUMBERS else pair[0] == pair[1]


def assert_step(sampled, expected):
    for position, one in enumerate(expected):
        if isinstance(one, str):
            assert (sampled.token_ids[position], sampled.errors[position]) == (-1, one)
        else:
            assert position not in sampled.errors
            assert sampled.token_ids[position] == one.token
            assert_logprobs_close(None if sampled.logprobs is None else sampled.logprobs[position], one.logprobs)


def run_batch(backend, batch, masks, outputs, order):
    """Run a Sampler with some of the requests, in a given order."""
    sampler = nc.Sampler(SIZE, backend=backend)
    row_ids = [sampler.add(*batch[i]) for i in order]
    for step, mask in enumerate(masks):
        x = logits(step, len(batch))
        given = None if mask is None else mask[order]
        assert_step(sampler(x[order], mask=given), [outputs[step][i] for i in order])
    return {i: (sampler.output_ids(n), sampler.stages(n)) for i, n in zip(order, row_ids, strict=True)}


@on_every_backend
@pytest.mark.fast_cases(0)
def test_a_sampler_equals_the_reference_implementation(references, backend):
    batch, masks, slow, outputs = references
    ended = run_batch(backend, batch, masks, outputs, list(range(len(batch))))
    for i, row_reference in enumerate(slow):
        assert ended[i][0] == tuple(row_reference.output)
        assert_stages_close(ended[i][1], row_reference.stages)
    assert sum(not isinstance(one, str) for step in outputs for one in step) > 0.8 * STEPS * len(batch)
    repeats = [row_reference.output for row_reference in slow if len(set(row_reference.output)) < 8]
    assert len(repeats) > len(batch) // 2  # the histories contain what the stages look for


@on_every_backend
@pytest.mark.fast_cases(0)
def test_adding_and_removing_rows_does_not_matter(references, backend):
    """Each row starts at its own step and gets the logits of its own steps."""
    batch, masks, _, outputs = references
    rng, sampler, live, waiting = random.Random(4), nc.Sampler(SIZE, backend), {}, list(range(len(batch)))
    rng.shuffle(waiting)
    x = [logits(step, len(batch)) for step in range(STEPS)]
    done = 0
    while waiting or live:
        while waiting and rng.random() < 0.9:
            i = waiting.pop()
            live[sampler.add(*batch[i])] = [i, 0]
        turn = [row for row in live if rng.random() < 0.7]
        rng.shuffle(turn)
        turn = [row for row in turn if masks[live[row][1]] is None] if rng.random() < 0.5 else turn
        plain, masked = ([row for row in turn if (masks[live[row][1]] is None) == none] for none in (True, False))
        for rows in (plain, masked):  # one call has a mask for all of its rows or for none
            if rows:
                at = [live[row] for row in rows]
                mask = np.stack([masks[step][i] for i, step in at]) if rows is masked else None
                assert_step(
                    sampler(np.stack([x[step][i] for i, step in at]), rows, mask=mask), [outputs[s][i] for i, s in at]
                )
                for one in at:
                    one[1] += 1
        for row, (_, step) in list(live.items()):
            if step == STEPS or (step > 5 and rng.random() < 0.05):
                sampler.remove(row)
                del live[row]
                done += 1
    assert done == len(batch)
    assert sampler.rows == ()


@on_every_backend
@pytest.mark.fast_cases(0)
def test_threads_with_their_own_samplers_do_not_matter(references, backend):
    batch, masks, _, outputs = references
    failures, parts = [], [list(range(n, len(batch), 4)) for n in range(4)]

    def work(order):
        try:
            run_batch(backend, batch, masks, outputs, order)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@on_every_backend
def test_stateful_stages_keep_one_state_per_row(backend):
    """Two rows that share the same stage objects, and one row that has its own."""
    stages = (nc.stages.Mirostat(3.0), DynamicTemperature(0.5, 1.5), nc.stages.AdaptiveP(0.3), TopP(0.95), Gumbel(5))
    both, single = nc.Sampler(SIZE, backend), nc.Sampler(SIZE, backend)
    first, second = both.add(stages), both.add(stages, index=1)
    only = single.add(stages)
    for step in range(20):
        x = logits(step, 2)
        token = both(x, [second, first]).token_ids[1]
        assert token == single(x[1:]).token_ids[0]
        assert both.stages(first) == single.stages(only)
    assert both.stages(first) != both.stages(second)
    assert stages[0].mu == 6.0
