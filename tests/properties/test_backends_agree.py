"""Fast and slow are equal, and rows do not know of each other: bit for bit, for every stage, over long histories."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import stage_examples as examples
from stage_examples import KINDS, SHIFTS, SIZE

import nucleate as nc
from nucleate.sampling.backends import reference
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Draw, History
from nucleate.sampling.stages import Categorical, DynamicTemperature, Gumbel, Logprobs, Temperature, TopP


def said(seed, length, tokens):
    """A random text of few different tokens, so that much of it comes again."""
    numbers = random.Random(seed)
    return [numbers.choice(tokens) for _ in range(length)]


def as_dicts(counts):
    """Counts by token, in no order."""
    ids, *columns = (column.tolist() for column in counts)
    assert len(set(ids)) == len(ids)
    return dict(zip(ids, zip(*columns, strict=True), strict=True))


@pytest.mark.parametrize("kind", SHIFTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("split", [(0, 0), (30, 0), (0, 30), (17, 23)], ids=str)
@pytest.mark.fast_cases(22)
def test_a_memory_that_grows_says_what_a_history_says(kind, split):
    """Of the same prompt and output, whatever of it was there at the start."""
    for number, stage in enumerate(examples.examples(kind)):
        prompt, output = (said(number + 100 * n, n, (1, 2, 7)) for n in split)
        memory = IncrementalHistory((stage, Gumbel(1)), prompt, output)
        for token in [None, *said(number, 60, (1, 2, 7) if number % 2 else (1, 7, 1, 1, 5))]:
            if token is not None:
                memory.push(token)
                output.append(token)
            history = History(prompt, output)
            assert as_dicts(memory.counts(stage.window)) == as_dicts(history.counts(stage.window))
            assert stage.neutral or memory.listing(stage) == history.listing(stage)
        assert memory.output == output
        assert memory.prompt == prompt


class Slow:
    """What a Sampler does for one row, worked out anew at every step from all of the history."""

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
        return (type(stage)(seed) if "seed" in stage.parameters else stage,)
    return (stage, Logprobs(2, (3,)), Gumbel(seed)) if seed % 3 else (Temperature(1.5), stage, Categorical(seed))


def requests():
    """A pipeline for every kind of stage, several of most, with prompts."""
    made = []
    for kind in KINDS:
        for stage in examples.examples(kind, most=3):
            if kind.name != "logprobs":
                made.append((with_draw(stage, len(made)), said(len(made), len(made) % 19, (1, 2, 7))))
    dense = [k for k in KINDS if not issubclass(k, Draw) and k.name != "logprobs"]
    for turn in range(6):  # many at once
        numbers = random.Random(turn)
        stages = [numbers.choice(examples.on(kind)) for kind in dense if numbers.random() < 0.4 and examples.on(kind)]
        made.append(((*stages, Gumbel(turn)), said(turn, 9, (1, 2, 7))))
    return made


def logits(step, count, narrow=True):
    """Rows in which few tokens are likely, so that texts repeat themselves."""
    x = np.random.default_rng(step).normal(size=(count, SIZE)).astype(np.float32) * 2
    if narrow:
        x[:, [1, 2, 7, 30]] += 6
    return x


STEPS = 13

on_every_backend = pytest.mark.parametrize("backend", ["reference", "cpu"])


def alone():
    """Each request by the slow way, on its own."""
    batch = requests()
    twins = [Slow(simplify(stages), prompt, getattr(stages[-1], "seed", 0)) for stages, prompt in batch]
    masks = [examples.masks(step, len(batch)) if step % 4 == 3 else None for step in range(STEPS)]
    told = []
    for step, mask in enumerate(masks):
        x = logits(step, len(batch))
        told.append([twin.step(x[i], None if mask is None else mask[i]) for i, twin in enumerate(twins)])
    return batch, masks, twins, told


@pytest.fixture(scope="module")
def twins():
    return alone()


NUMBERS = ("mu", "mean")
"""What a state is made of, and equal but for the last digits where a backend adds up in another order."""


def near(one, other):
    return one == other or one == pytest.approx(other, rel=1e-9, abs=1e-12)


def assert_told_alike(one, other):
    """Reports: the same tokens and ranks, logprobs that are ``near``. The compiled chain tells them in float32."""
    assert (one is None) == (other is None)
    for ours, theirs in zip(*((r.chosen, *r.top, *r.requested) for r in (one, other)), strict=True) if one else ():
        assert ours[::2] == theirs[::2]
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)


def assert_moved_alike(one, other):
    """Pipelines: the same stages, states that are ``near``."""
    for ours, theirs in zip(one, other, strict=True):
        assert type(ours) is type(theirs)
        for attribute in ours.parameters:
            pair = getattr(ours, attribute), getattr(theirs, attribute)
            assert near(*pair) if attribute in NUMBERS else pair[0] == pair[1]


def assert_step(sampled, expected):
    for place, one in enumerate(expected):
        if isinstance(one, str):
            assert (sampled.token_ids[place], sampled.errors[place]) == (-1, one)
        else:
            assert place not in sampled.errors
            assert sampled.token_ids[place] == one.token
            assert_told_alike(None if sampled.logprobs is None else sampled.logprobs[place], one.logprobs)


def run_batch(backend, batch, masks, told, order, split=False):
    """A Sampler with some of the requests, in some order, in one call per step or in two."""
    sampler = nc.Sampler(SIZE, backend=backend)
    numbers = [sampler.add(*batch[i]) for i in order]
    for step, mask in enumerate(masks):
        x = logits(step, len(batch))
        half = len(order) // 2
        for part in (slice(half, None), slice(0, half)) if split else (slice(None),):
            chosen = order[part]
            given = None if mask is None else mask[chosen]
            rows = numbers[part] if split else None
            assert_step(sampler(x[chosen], rows, mask=given), [told[step][i] for i in chosen])
    return {i: (sampler.output_ids(n), sampler.stages(n)) for i, n in zip(order, numbers, strict=True)}


@on_every_backend
@pytest.mark.fast_cases(1)
def test_a_sampler_draws_what_the_slow_way_draws(twins, backend):
    batch, masks, slow, told = twins
    ended = run_batch(backend, batch, masks, told, list(range(len(batch))))
    for i, twin in enumerate(slow):
        assert ended[i][0] == tuple(twin.output)
        assert_moved_alike(ended[i][1], twin.stages)
    assert sum(not isinstance(one, str) for step in told for one in step) > 0.8 * STEPS * len(batch)
    repeats = [twin.output for twin in slow if len(set(twin.output)) < 8]
    assert len(repeats) > len(batch) // 2  # the histories are such that stages have something to find


@on_every_backend
@pytest.mark.fast_cases(1)
def test_neighbours_and_batch_size_and_slots_do_not_matter(twins, backend):
    batch, masks, _, told = twins
    for seed in range(2):
        order = random.Random(seed).sample(range(len(batch)), len(batch) // (1 + seed))
        run_batch(backend, batch, masks, told, order, split=bool(seed))
    for i in range(0, len(batch), 11):
        run_batch(backend, batch, masks, told, [i])


@on_every_backend
@pytest.mark.fast_cases(1)
def test_rows_that_come_and_go_at_any_time_do_not_matter(twins, backend):
    """Each row starts when it comes, and sees the logits of its own steps."""
    batch, masks, _, told = twins
    numbers, sampler, live, waiting = random.Random(4), nc.Sampler(SIZE, backend), {}, list(range(len(batch)))
    numbers.shuffle(waiting)
    x = [logits(step, len(batch)) for step in range(STEPS)]
    done = 0
    while waiting or live:
        while waiting and numbers.random() < 0.9:
            i = waiting.pop()
            live[sampler.add(*batch[i])] = [i, 0]
        turn = [row for row in live if numbers.random() < 0.7]
        numbers.shuffle(turn)
        turn = [row for row in turn if masks[live[row][1]] is None] if numbers.random() < 0.5 else turn
        plain, masked = ([row for row in turn if (masks[live[row][1]] is None) == none] for none in (True, False))
        for rows in (plain, masked):  # one call has a mask for all of its rows or for none
            if rows:
                at = [live[row] for row in rows]
                mask = np.stack([masks[step][i] for i, step in at]) if rows is masked else None
                assert_step(
                    sampler(np.stack([x[step][i] for i, step in at]), rows, mask=mask), [told[s][i] for i, s in at]
                )
                for one in at:
                    one[1] += 1
        for row, (_, step) in list(live.items()):
            if step == STEPS or (step > 5 and numbers.random() < 0.05):
                sampler.remove(row)
                del live[row]
                done += 1
    assert done == len(batch)
    assert sampler.rows == ()


@on_every_backend
@pytest.mark.fast_cases(1)
def test_threads_with_samplers_of_their_own_do_not_matter(twins, backend):
    batch, masks, _, told = twins
    failures, parts = [], [list(range(n, len(batch), 4)) for n in range(4)]

    def work(order):
        try:
            run_batch(backend, batch, masks, told, order)
        except BaseException as error:  # noqa: BLE001  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@on_every_backend
def test_stateful_stages_are_as_of_their_own_row_only(backend):
    """Two rows that share the very same stage objects, and one that has them alone."""
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
