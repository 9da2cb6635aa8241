"""Random operations on the scheduler, with KV caches from one block to many."""

from __future__ import annotations

import pytest
import tiers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_world import CONFIGURATIONS, RandomDriver, SimulatedEngine, resume_all, run_to_end, simulated_engine_of

from nucleate.engine.scheduler import SchedulerEntry


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.fast_cases(4)
def test_three_thousand_operations(configuration: tuple[int, int, int, int, bool, bool]) -> None:
    world = simulated_engine_of(configuration)
    drive = RandomDriver(world, sum(configuration))
    for _ in range(tiers.count(1000, 3000)):
        drive.act()
        world.check()
    for job in list(world.jobs):
        world.remove(job)
        world.check()
    assert world.pool.num_free_blocks == world.pool.num_blocks
    assert not world.schedule.running
    assert not world.schedule.waiting


class ScheduleMachine(RuleBasedStateMachine):
    late: list[SchedulerEntry]

    @initialize(
        count=st.integers(1, 8),
        size=st.sampled_from((1, 2, 3, 16)),
        sequences=st.integers(1, 5),
        spare=st.integers(0, 5),
        whole=st.booleans(),
        sharing=st.sampled_from((True, True, False)),
    )
    def make(self, count: int, size: int, sequences: int, spare: int, whole: bool, sharing: bool) -> None:
        self.late = []
        self.world = SimulatedEngine(
            count, size, sequences=sequences, tokens=sequences + spare, whole=whole, sharing=sharing
        )

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        output=st.integers(1, 6),
        priority=st.integers(0, 2),
        shares=st.booleans(),
        most=st.sampled_from((1, 3, 1 << 62)),
        num_outputs=st.integers(1, 2),
    )
    def add(self, prompt: list[int], output: int, priority: int, shares: bool, most: int, num_outputs: int) -> None:
        for _ in range(num_outputs):
            self.world.add(prompt, output, priority, all_logits=not shares, max_chunk=most)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.world.remove(data.draw(st.sampled_from(self.world.jobs)))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.world.jobs))
        job.paused = not job.paused

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        child = self.world.fork(data.draw(st.sampled_from(self.world.jobs)))
        if child.num_computed == len(child.token_ids):
            self.late.append(child)

    @rule()
    def plan(self) -> None:
        self.world.plan()

    @precondition(lambda self: self.world.planned)
    @rule()
    def done(self) -> None:
        self.late += self.world.done()

    @precondition(lambda self: self.late)
    @rule(token=st.integers(0, 1))
    def push(self, token: int) -> None:
        job = self.late.pop()
        if job in self.world.jobs and job.num_computed == len(job.token_ids):
            self.world.push(job, token)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


TestSchedule = ScheduleMachine.TestCase
TestSchedule.settings = settings(max_examples=tiers.count(20, 80), stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.fast_cases(36)
def test_every_job_ends(configuration: tuple[int, int, int, int, bool, bool], seed: int) -> None:
    world = simulated_engine_of(configuration)
    drive = RandomDriver(world, seed)
    for _ in range(20):
        drive.add()
    for _ in range(seed):
        drive.act()
    resume_all(drive)
    run_to_end(world, drive.rng)
    world.check()
    assert world.pool.num_free_blocks == world.pool.num_blocks


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_ten_thousand_operations(configuration: tuple[int, int, int, int, bool, bool], seed: int) -> None:
    world = simulated_engine_of(configuration)
    drive = RandomDriver(world, 1000 + seed)
    for _ in range(10_000):
        drive.act()
        world.check()
    resume_all(drive)
    run_to_end(world, drive.rng)
