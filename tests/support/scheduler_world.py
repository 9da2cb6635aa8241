"""A scheduler and its jobs, and checks of its invariants at every step.

``tests/engine/test_kv_cache.py`` checks the contents of blocks; engines with a model that reads them, the outputs.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from nucleate.engine.kv_cache import START, KVCacheManager
from nucleate.engine.scheduler import ScheduledSequence, Scheduler, SchedulerEntry

ByJob = dict[SchedulerEntry, ScheduledSequence]


class SimulatedEngine:
    """A scheduler and its jobs."""

    def __init__(
        self, count: int, size: int, sequences: int, tokens: int, whole: bool = False, sharing: bool = True
    ) -> None:
        self.pool = KVCacheManager(count, size, prefix_caching=sharing)
        self.schedule = Scheduler(self.pool, max_num_seqs=sequences, max_num_batched_tokens=tokens, whole_prompts=whole)
        self.jobs: list[SchedulerEntry] = []
        self.truth: dict[SchedulerEntry, list[int]] = {}  # the expected tokens
        self.fresh: dict[SchedulerEntry, int] = {}  # how many of its first tokens were never computed
        self.arrivals = self.forwards = 0
        self.planned: list[ScheduledSequence] = []
        self.gone: list[SchedulerEntry] = []  # preempted by the last plan
        self.preempt, self.schedule._preempt = self.schedule._preempt, self.check_preempt

    # operations

    def add(self, prompt: Any, output: int, priority: int = 0, **options: Any) -> SchedulerEntry:
        limit = len(prompt) + output
        job = SchedulerEntry((priority, self.arrivals, self.arrivals % 3), prompt, limit, **options)
        self.arrivals += 1
        if self.pool.blocks_needed(limit - 1) > self.pool.num_blocks:  # the last token is not computed
            with pytest.raises(ValueError, match="do not fit"):
                self.schedule.add(job)
            return job
        self.schedule.add(job)
        self.jobs.append(job)
        self.truth[job], self.fresh[job] = list(prompt), limit
        return job

    def push(self, job: SchedulerEntry, token: int) -> None:
        job.append(token)
        self.truth[job].append(token)

    def fork(self, parent: SchedulerEntry) -> SchedulerEntry:
        """Fork a job."""
        schedule, pool, size = self.schedule, self.pool, self.pool.block_size
        free_slot, available = len(schedule.running) < schedule.max_num_seqs, pool.num_free_blocks
        order = parent.order[0], self.arrivals, self.arrivals % 3
        child = SchedulerEntry(order, (), parent.max_length, parent.max_chunk)
        pair = schedule.fork(parent, child)
        self.arrivals += 1
        needed = pool.blocks_needed(parent.num_computed) if schedule.whole_prompts else parent.num_computed % size > 0
        assert bool(child.block_ids) == (free_slot and parent.num_computed > 0 and available >= needed)
        assert pool.num_free_blocks == available - (needed if child.block_ids else 0)
        assert (pair is None) == (not child.block_ids or schedule.whole_prompts or not parent.num_computed % size)
        self.jobs.append(child)
        self.truth[child] = list(self.truth[parent])
        self.fresh[child] = child.max_length
        users = self.users()
        copied = zip(parent.block_ids, child.block_ids, strict=False) if schedule.whole_prompts else [pair]
        assert all(users[target] == [child] for _, target in filter(None, copied))
        assert child.token_ids == parent.token_ids
        assert child.token_ids is not parent.token_ids
        return child

    def remove(self, job: SchedulerEntry) -> None:
        self.schedule.remove(job)
        self.jobs.remove(job)
        self.planned = [chunk for chunk in self.planned if chunk.sequence is not job]
        assert not job.block_ids

    def plan(self) -> None:
        """Plan, check the plan, and plan again as after a failed step."""
        before = PlanState.of(self)
        self.gone = []
        plan = self.schedule.schedule()
        check_plan(self, before, plan)
        state = PlanState.of(self)
        again = self.schedule.schedule()
        assert len(again) == len(plan)
        spans = [{(one.sequence, one.start, one.stop, one.last) for one in each} for each in (again, plan)]
        assert spans[0] == spans[1]
        assert PlanState.of(self) == state
        self.planned = again

    def done(self) -> list[SchedulerEntry]:
        """Execute the plan. Returns the jobs whose last token was computed."""
        chunks, self.planned = self.planned, []
        users = self.users()
        size = self.pool.block_size
        for chunk in chunks:
            job, start, stop = chunk.sequence, chunk.start, chunk.stop
            self.fresh[job] = min(self.fresh[job], start)
            for block in job.block_ids[start // size : -(-stop // size)]:
                assert users[block] == [job], "only a job's own blocks are written"
        self.forwards += bool(chunks)
        last = [chunk.sequence for chunk in chunks if chunk.last]
        assert last == [chunk.sequence for chunk in chunks if chunk.stop == len(self.truth[chunk.sequence])]
        self.schedule.mark_computed(chunks)
        return last

    def check_preempt(self) -> SchedulerEntry:
        """Check a preemption: paused jobs first, then the last one, and only without free blocks."""
        schedule = self.schedule
        ready = [job for job in schedule.waiting if not job.idle]
        assert self.pool.num_free_blocks == 0 or not all(can_start(self, job) for job in ready)
        last = max(schedule.running, key=lambda job: (job.paused, job.order))
        assert self.preempt() is last
        assert last in schedule.waiting
        self.gone.append(last)
        return last

    # invariants

    def users(self) -> list[list[SchedulerEntry]]:
        users: list[list[SchedulerEntry]] = [[] for _ in range(self.pool.num_blocks)]
        for job in self.jobs:
            for block in job.block_ids:
                users[block].append(job)
        return users

    def check(self) -> None:
        self.check_lists()
        self.check_pool()
        for job in self.jobs:
            self.check_job(job)

    def check_lists(self) -> None:
        running, waiting = self.schedule.running, self.schedule.waiting
        assert len(running) <= self.schedule.max_num_seqs
        assert len(self.jobs) == len(running) + len(waiting)
        assert {*running, *waiting} == set(self.jobs)
        for jobs in (running, waiting):
            assert [job.order for job in jobs] == sorted(job.order for job in jobs)
        for job in running:
            assert job.block_ids
        for job in waiting:
            assert (job.block_ids, job.num_computed, job.num_cached_blocks, job.prefix_node) == ([], 0, 0, START)

    def check_pool(self) -> None:
        users = self.users()
        assert self.pool.num_used_blocks == sum(map(bool, users))
        for block, jobs in enumerate(users):
            for job in jobs if len(jobs) > 1 else []:
                assert (job.block_ids.index(block) + 1) * self.pool.block_size <= job.num_computed

    def check_job(self, job: SchedulerEntry) -> None:
        assert list(job.token_ids) == self.truth[job]
        assert 0 <= job.num_computed <= len(job.token_ids) <= job.max_length
        assert len(job.block_ids) <= self.pool.blocks_needed(len(job.token_ids))
        assert job.num_cached_blocks == job.num_computed // self.pool.block_size
        assert job.num_cached <= self.fresh[job]
        if job.block_ids and not job.preempted:
            assert job.num_cached == min(self.fresh[job], job.num_computed)
            assert job.num_cached == 0 or not job.all_logits


class PlanState(NamedTuple):
    """The state that a plan may change."""

    running: list[SchedulerEntry]
    waiting: list[SchedulerEntry]
    blocks: list[list[int]]  #: of each job
    read: list[int]  #: of each job
    num_preemptions: int

    @classmethod
    def of(cls, world: SimulatedEngine) -> PlanState:
        schedule, jobs = world.schedule, world.jobs
        blocks, read = [list(job.block_ids) for job in jobs], [job.num_computed for job in jobs]
        return cls(list(schedule.running), list(schedule.waiting), blocks, read, schedule.num_preemptions)


def check_plan(world: SimulatedEngine, before: PlanState, plan: list[ScheduledSequence]) -> None:
    schedule, pool = world.schedule, world.pool
    by_job = {chunk.sequence: chunk for chunk in plan}
    assert len(by_job) == len(plan)
    assert by_job.keys() <= set(schedule.running)
    for chunk in plan:
        job, start, stop = chunk.sequence, chunk.start, chunk.stop
        assert not job.paused
        assert len(job.token_ids) < job.max_length
        assert start == job.num_computed < stop <= len(job.token_ids)
        assert pool.blocks_needed(len(job.token_ids)) <= len(job.block_ids)
        assert stop - start <= job.max_chunk
        assert not schedule.whole_prompts or stop == len(job.token_ids) or stop - start == job.max_chunk
    check_budget(world, by_job)
    check_started(world, before, by_job)
    check_preempted(world, before)
    if any(not job.idle for job in world.jobs) and not any(awaits_token(job) for job in schedule.running):
        assert plan, "a plan is empty only if all running jobs wait for a token or for their end"


def check_budget(world: SimulatedEngine, by_job: ByJob) -> None:
    """The budget goes to decodes first, then to prompts in order."""
    schedule = world.schedule
    ready = [job for job in schedule.running if num_uncomputed(job) and not job.idle]
    singles = [job for job in ready if num_uncomputed(job) == 1]
    prompts = [job for job in ready if num_uncomputed(job) > 1]
    sizes = [by_job[job].stop - by_job[job].start for job in prompts if job in by_job]
    total = sum(job in by_job for job in singles) + sum(sizes)
    assert all(job in by_job for job in singles)
    if schedule.whole_prompts:
        assert total <= schedule.max_num_batched_tokens or len(sizes) == 1
        left = schedule.max_num_batched_tokens - len(singles)
        for at, job in enumerate(prompts):
            part = min(num_uncomputed(job), job.max_chunk)
            if at and part > left:
                assert not any(other in by_job for other in prompts[at:])
                break
            if left <= 0:
                assert job not in by_job
                break
            assert job in by_job
            left -= part
        return
    assert total <= schedule.max_num_batched_tokens
    left = schedule.max_num_batched_tokens - len(singles)
    for job in prompts:
        part = min(left, num_uncomputed(job), job.max_chunk)
        assert (by_job[job].stop - by_job[job].start if job in by_job else 0) == part
        left -= part
    assert left == schedule.max_num_batched_tokens - total


def check_started(world: SimulatedEngine, before: PlanState, by_job: ByJob) -> None:
    """Jobs start in order; the first waiting job starts unless there are no tokens or blocks left."""
    schedule = world.schedule
    begun = [job for job in schedule.running if job not in before.running]
    first = next((job for job in schedule.waiting if not job.idle), None)
    for job in begun:
        assert not job.all_logits or job.num_computed == 0
        assert not job.paused
        assert job in by_job or schedule.whole_prompts
    if first is None:
        return
    assert all(job.order < first.order for job in begun)
    if schedule.whole_prompts and any(
        num_uncomputed(job) > 1 and not job.idle and job not in by_job for job in schedule.running
    ):
        return  # no tokens are left for an earlier prompt
    sizes = {job: chunk.stop - chunk.start for job, chunk in by_job.items()}
    tried = sum(sizes.values()) < schedule.max_num_batched_tokens or (
        not begun and all(num_uncomputed(job) == 1 for job in sizes)
    )
    if tried or any(size > 1 and job.order > first.order for job, size in sizes.items()):
        assert not can_start(world, first)
        assert not any(job.paused or job.order[0] > first.order[0] for job in schedule.running)


def awaits_token(job: SchedulerEntry) -> bool:
    """Whether a running job waits for its next token or its end."""
    return not job.paused and (job.idle or not num_uncomputed(job))


def num_uncomputed(job: SchedulerEntry) -> int:
    return len(job.token_ids) - job.num_computed


def can_start(world: SimulatedEngine, job: SchedulerEntry) -> bool:
    """Whether a job can start: a free sequence slot, and free blocks for what is not in the prefix cache."""
    pool = world.pool
    shared = pool.match_prefix(job.token_ids).block_ids if not job.all_logits else []
    fits = pool.blocks_needed(len(job.token_ids)) - len(shared) <= pool.num_free_blocks
    pool.free(shared)
    return fits and len(world.schedule.running) < world.schedule.max_num_seqs


def check_preempted(world: SimulatedEngine, before: PlanState) -> None:
    """Preemption happens only for a growing job, or for a job of better priority that starts or waits."""
    schedule, size = world.schedule, world.pool.block_size
    assert schedule.num_preemptions - before.num_preemptions == len(world.gone)
    blocks = dict(zip(world.jobs, before.blocks, strict=True))
    grow = [job for job in before.running if len(job.token_ids) > len(blocks[job]) * size]
    begin = [job for job in before.waiting if job in schedule.running]
    begin += [job for job in schedule.waiting if not job.idle][:1]
    for job in world.gone:
        assert job.preempted
        assert any(other.order <= job.order or job.paused for other in grow) or any(
            other.order[0] < job.order[0] or job.paused for other in begin
        )


# configurations: blocks, block size, sequences, tokens per step, whole prompts, prefix caching

CONFIGURATIONS = [
    (1, 1, 1, 1, False, True),
    (1, 16, 3, 4, False, True),
    (4, 1, 2, 2, False, True),
    (6, 3, 4, 4, False, True),
    (6, 3, 4, 5, True, True),
    (9, 3, 8, 8, False, True),
    (9, 3, 5, 7, False, False),
    (12, 1, 8, 9, True, False),
    (20, 3, 8, 16, False, True),
    (30, 3, 8, 11, True, True),
    (12, 16, 8, 40, False, True),
    (60, 3, 8, 64, False, True),
]


class RandomDriver:
    """Random operations on few tokens with shared prefixes, so that there is much sharing and preemption."""

    def __init__(self, world: SimulatedEngine, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.late: list[SchedulerEntry] = []  # jobs that wait for their next token
        self.most = min(world.pool.num_blocks * world.pool.block_size, 60)
        self.stems = [[self.rng.randrange(2) for _ in range(self.most + 1)] for _ in range(2)]

    def add(self) -> None:
        rng = self.rng
        length = rng.randrange(1, self.most + 2)
        if rng.random() < 0.5:
            length = min(length, rng.randrange(1, 8))
        prompt: Any = rng.choice(self.stems)[:length]
        if rng.random() < 0.3:
            prompt[-1] ^= 1
        output = rng.randrange(1, max(2, min(self.most - length + 3, 20)))
        for _ in range(rng.choice((1, 1, 1, 3))):  # several outputs of one prompt share one list of tokens
            self.world.add(
                prompt,
                output,
                rng.choice((0, 0, 0, 1, 2)),
                all_logits=rng.random() >= 0.8,
                max_chunk=rng.choice((1, 2, 5, 1 << 62)),
                paused=rng.random() < 0.1,
            )

    def step(self) -> None:
        self.world.plan()
        while self.world.planned and self.rng.random() < 0.1:  # removed during the step
            self.world.remove(self.rng.choice(self.world.planned).sequence)
        if self.world.planned and self.rng.random() < 0.1:
            self.fork(self.rng.choice(self.world.planned).sequence)
        self.finish()

    def fork(self, job: SchedulerEntry) -> None:
        if len(self.world.jobs) < 25:
            child = self.world.fork(job)
            if child.num_computed == len(child.token_ids):
                self.late.append(child)

    def finish(self) -> None:
        for job in self.world.done():
            if self.rng.random() < 0.15:
                self.fork(job)
            if self.rng.random() < 0.1:
                self.late.append(job)
                continue
            for _ in range(min(job.max_length - len(job.token_ids), self.rng.choice((1, 1, 1, 1, 2)))):
                self.world.push(job, self.rng.randrange(2))
            if len(job.token_ids) == job.max_length and self.rng.random() < 0.8:
                self.world.remove(job)

    def write(self) -> None:
        """Append the delayed tokens."""
        late, self.late = self.late, []
        for job in late:
            if job in self.world.jobs and job.num_computed == len(job.token_ids):
                self.world.push(job, self.rng.randrange(2))

    def act(self) -> None:
        world, rng = self.world, self.rng
        choice = rng.random()
        if rng.random() < 0.5:
            self.write()
        if choice < 0.15 and len(world.jobs) < 25:
            self.add()
        elif choice < 0.20 and world.jobs:
            world.remove(rng.choice(world.jobs))
        elif choice < 0.30 and world.jobs:
            job = rng.choice(world.jobs)
            job.paused = not job.paused
        elif choice < 0.32 and world.jobs:
            self.fork(rng.choice(world.jobs))
        elif choice < 0.34:
            world.plan()
            world.planned = []  # a failed step
        elif choice < 0.36:
            world.plan()
            world.check()
        else:
            self.step()
        world.planned = []


def resume_all(drive: RandomDriver) -> None:
    """Resume all paused jobs."""
    drive.write()
    world = drive.world
    for job in list(world.jobs):
        job.paused = False
        if job.idle:
            world.remove(job)


def run_to_end(world: SimulatedEngine, rng: random.Random) -> None:
    """Run until all jobs have ended, with a limit on the steps."""
    bound = 2 * sum(job.max_length for job in world.jobs) + len(world.jobs)
    for _ in range(bound + 1):
        if not world.jobs:
            return
        world.plan()
        assert world.planned
        for job in world.done():
            world.push(job, rng.randrange(2))
            if len(job.token_ids) == job.max_length:
                world.remove(job)
    pytest.fail(f"{len(world.jobs)} jobs have not ended after {bound} steps")
