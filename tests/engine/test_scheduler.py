"""Random operations on the scheduler, with KV caches from one block to many, and single cases."""

from __future__ import annotations

import random
import time

import pytest
import tiers
from scheduler_world import (
    CONFIGURATIONS,
    RandomDriver,
    SimulatedEngine,
    resume_all,
    run_to_end,
)

from nucleate.engine.kv_cache import KVCacheManager
from nucleate.engine.scheduler import Scheduler, SchedulerEntry


def step(schedule: Scheduler, token: int = 7) -> list[tuple[tuple[int, int, int], int, int]]:
    chunks = schedule.schedule()
    last = [chunk.sequence for chunk in chunks if chunk.last]
    schedule.mark_computed(chunks)
    for job in last:
        job.append(token)
    return [(chunk.sequence.order, chunk.start, chunk.stop) for chunk in chunks]


def add_jobs(schedule: Scheduler, *jobs: SchedulerEntry) -> tuple[SchedulerEntry, ...]:
    for job in jobs:
        schedule.add(job)
    return jobs


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.fast_cases(2)
def test_thousands_of_operations(configuration: tuple[int, int, int, int, bool, bool]) -> None:
    world = SimulatedEngine(*configuration)
    drive = RandomDriver(world, sum(configuration))
    for _ in range(tiers.count(1000, 30_000)):
        drive.act()
        world.check()
    for job in list(world.jobs):
        world.remove(job)
        world.check()
    assert world.pool.num_free_blocks == world.pool.num_blocks
    assert not world.schedule.running
    assert not world.schedule.waiting


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.fast_cases(22)
def test_every_job_ends(configuration: tuple[int, int, int, int, bool, bool], seed: int) -> None:
    world = SimulatedEngine(*configuration)
    drive = RandomDriver(world, seed)
    for _ in range(20):
        drive.add()
    for _ in range(seed):
        drive.act()
    resume_all(drive)
    run_to_end(world, drive.rng)
    world.check()
    assert world.pool.num_free_blocks == world.pool.num_blocks


def test_a_job_that_does_not_fit_is_rejected() -> None:
    schedule = Scheduler(KVCacheManager(4, 3), max_num_seqs=2, max_num_batched_tokens=2)
    with pytest.raises(ValueError, match="14 tokens do not fit 4 blocks of 3"):
        schedule.add(SchedulerEntry((0, 0, 0), [1], 14))
    assert schedule.running == schedule.waiting == []
    schedule.add(SchedulerEntry((0, 0, 0), [1], 13))  # its last token is not computed


def test_removing_an_unknown_job_is_an_error() -> None:
    schedule = Scheduler(KVCacheManager(4, 3), max_num_seqs=2, max_num_batched_tokens=4)
    (job,) = add_jobs(schedule, SchedulerEntry((0, 1, 0), [1], 3))
    for unknown in (
        SchedulerEntry((0, 1, 0), [1], 3),
        SchedulerEntry((0, 0, 0), [1], 3),
        SchedulerEntry((0, 2, 0), [1], 3),
    ):
        with pytest.raises(ValueError, match="no sequence"):
            schedule.remove(unknown)
    step(schedule)
    schedule.remove(job)
    with pytest.raises(ValueError, match=r"no sequence \(0, 1, 0\) here"):
        schedule.remove(job)
    assert schedule.kv_cache.num_free_blocks == 4


@pytest.mark.parametrize("spare", [0, 3])
def test_a_better_priority_preempts_the_last_job_of_a_worse_one(spare: int) -> None:
    schedule = Scheduler(KVCacheManager(99, 4), max_num_seqs=3, max_num_batched_tokens=3 + spare)
    jobs = add_jobs(schedule, *[SchedulerEntry((priority, at, 0), [at], 9) for at, priority in enumerate((0, 1, 1))])
    step(schedule)
    add_jobs(schedule, SchedulerEntry((1, 9, 0), [9], 9))
    assert [order for order, _, _ in step(schedule)] == [(0, 0, 0), (1, 1, 0), (1, 2, 0)]  # no better than the last
    add_jobs(schedule, SchedulerEntry((0, 7, 0), [7], 9))
    assert {order for order, _, _ in step(schedule)} == {(0, 0, 0), (0, 7, 0), (1, 1, 0)}
    assert schedule.waiting[0] is jobs[2]
    assert (jobs[2].block_ids, jobs[2].num_computed, jobs[2].token_ids) == ([], 0, [2, 7, 7])
    add_jobs(schedule, *[SchedulerEntry((-1, at, 0), [at], 9) for at in range(4)])
    assert [order for order, _, _ in step(schedule)] == [(-1, at, 0) for at in range(3)]
    assert schedule.num_preemptions == 4


def test_paused_jobs_are_preempted_first_and_not_computed() -> None:
    schedule = Scheduler(KVCacheManager(4, 1), max_num_seqs=3, max_num_batched_tokens=9)
    best, second, worst = add_jobs(schedule, *[SchedulerEntry((at, at, 0), [at], 4) for at in range(3)])
    step(schedule)
    best.paused = True
    assert step(schedule) == [((1, 1, 0), 1, 2), ((2, 2, 0), 1, 2)]  # preempted for the growth of the last job
    assert schedule.running == [second, worst]
    assert schedule.num_preemptions == 1
    best.paused = False
    assert step(schedule) == [((0, 0, 0), 0, 2)]  # with the blocks of both: the second job would need three
    assert (schedule.running, schedule.waiting) == ([best], [second, worst])


def test_the_last_job_is_preempted_for_one_that_grows() -> None:
    schedule = Scheduler(KVCacheManager(4, 2), max_num_seqs=4, max_num_batched_tokens=9)
    first, second = add_jobs(
        schedule, SchedulerEntry((0, 0, 0), [1, 2, 3, 4], 8), SchedulerEntry((0, 1, 0), [5, 6, 7, 8], 8)
    )
    step(schedule)
    assert step(schedule) == [((0, 0, 0), 4, 5)]
    assert (schedule.running, schedule.waiting, schedule.num_preemptions) == ([first], [second], 1)
    assert step(schedule) == [((0, 0, 0), 5, 6)]
    schedule.remove(first)
    assert step(schedule) == [((0, 1, 0), 2, 5)]  # one of its two cached blocks was evicted
    assert (second.token_ids, second.num_cached, schedule.num_preemptions) == ([5, 6, 7, 8, 7, 7], 0, 1)


def test_num_cached_counts_tokens_never_computed() -> None:
    schedule = Scheduler(KVCacheManager(20, 2), max_num_seqs=4, max_num_batched_tokens=99)
    prompt = [1, 2, 3, 4, 5, 6]
    (first,) = add_jobs(schedule, SchedulerEntry((0, 0, 0), prompt, 9))
    step(schedule)
    same, other, own, longer = add_jobs(
        schedule,
        SchedulerEntry((0, 1, 0), prompt, 9),
        SchedulerEntry((0, 2, 0), [1, 2, 3, 9, 5, 6], 9),
        SchedulerEntry((0, 3, 0), prompt, 9, all_logits=True),
        SchedulerEntry((-1, 4, 0), [*prompt, 8, 8, 8], 10),
    )
    assert step(schedule) == [
        ((0, 0, 0), 6, 7),
        ((-1, 4, 0), 6, 9),
        ((0, 1, 0), 4, 6),
        ((0, 2, 0), 2, 6),
    ]
    assert [job.num_cached for job in (first, same, other, own, longer)] == [0, 4, 2, 0, 6]
    schedule.remove(first)
    assert ((0, 3, 0), 0, 6) in step(schedule)
    schedule.max_num_seqs = 2
    assert own.num_cached == 0
    assert same.block_ids[:2] == other.block_ids[:1] + same.block_ids[1:2] == longer.block_ids[:2]
    assert not {*own.block_ids} & {*same.block_ids, *other.block_ids, *longer.block_ids}


def test_a_small_pool_preempts_only_when_needed() -> None:
    """Eight jobs grow to half of the pool; a preempted job waits until there are blocks for it."""
    world = SimulatedEngine(16, 4, sequences=8, tokens=32)
    for at in range(8):
        world.add([at] * 4, 28)
    run_to_end(world, random.Random(0))
    assert world.schedule.num_preemptions <= 16
    assert world.forwards <= 4 * 32


# speed


def seconds(steps: int, running: int, waiting: int) -> float:
    """The fastest of some steps in which all running jobs decode one token."""
    schedule = Scheduler(KVCacheManager(running * 40, 16), max_num_seqs=running, max_num_batched_tokens=2 * running)
    add_jobs(schedule, *[SchedulerEntry((0, at, 0), [at], 600) for at in range(running + waiting)])
    times = []
    for _ in range(steps):
        began = time.thread_time()
        chunks = schedule.schedule()
        schedule.mark_computed(chunks)
        times.append(time.thread_time() - began)
        assert len(chunks) == running
        for chunk in chunks:
            chunk.sequence.append(7)
    return min(times)


def test_step_time_does_not_depend_on_the_queue() -> None:
    assert seconds(50, 256, 0) < 256 * 5e-6  # 0.5 us per job
    assert seconds(50, 256, 10_000) < 256 * 5e-6


def test_a_long_queue_is_added_and_removed_fast() -> None:
    rng = random.Random(0)
    schedule = Scheduler(KVCacheManager(9, 16), max_num_seqs=2, max_num_batched_tokens=9)
    jobs = [SchedulerEntry((rng.randrange(3), at, 0), [1], 9) for at in range(10_000)]
    rng.shuffle(jobs)
    began = time.thread_time()
    add_jobs(schedule, *jobs)
    rng.shuffle(jobs)
    for job in jobs:
        schedule.remove(job)
    assert time.thread_time() - began < 1.0  # 0.07 s
    assert schedule.running == schedule.waiting == []
