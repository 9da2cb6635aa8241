"""The store of recorded runs: limits, owners, expiry."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import nucleate as nc
from nucleate.engine.request import RecordedStep, SamplingInputs
from nucleate.inspector import store as store_module
from nucleate.inspector.store import InspectionStore, InspectorError, Run

STAGES = (nc.stages.Gumbel(),)
SIZE = 64
ROW_BYTES = 4 * SIZE


def new_run(store: InspectionStore, owner: str = "") -> Run:
    run = Run(owner, nc.SamplingParams(), (1, 2), (), 7, store)
    store.add(run)
    return run


def record(run: Run, count: int) -> None:
    for _ in range(count):
        inputs = SamplingInputs(np.zeros(SIZE, np.float32), STAGES, None)
        run.record(RecordedStep(0, len(run.steps), 5, "sampled", inputs))


def test_the_logits_of_the_oldest_steps_are_dropped_beyond_the_limit() -> None:
    store = InspectionStore(max_bytes=10 * ROW_BYTES)
    first, second = new_run(store), new_run(store)
    record(first, 6)
    record(second, 8)
    assert store.num_bytes == 10 * ROW_BYTES
    assert [step.inputs is not None for step in first.steps] == [False] * 4 + [True] * 2
    with pytest.raises(InspectorError, match="the logits of step 0 are no longer stored") as caught:
        first.inputs(0)
    assert caught.value.code == "step_not_stored"
    assert first.inputs(5).logits.shape == (SIZE,)
    assert first.token_ids == [5] * 6


def test_masks_count_as_well() -> None:
    store = InspectionStore()
    run = new_run(store)
    run.record(
        RecordedStep(0, 0, 1, "sampled", SamplingInputs(np.zeros(SIZE, np.float32), STAGES, np.zeros(2, np.int32)))
    )
    assert store.num_bytes == ROW_BYTES + 8


def test_forced_and_given_tokens_have_no_logits() -> None:
    run = new_run(InspectionStore())
    run.record(RecordedStep(0, 0, 3, "given"))
    with pytest.raises(InspectorError, match="step 0 was given, not sampled"):
        run.inputs(0)
    for position in (-1, 1):
        with pytest.raises(InspectorError, match="the run has 1 steps"):
            run.inputs(position)


def test_only_the_owner_gets_a_run() -> None:
    store = InspectionStore()
    run = new_run(store, "me")
    assert store.get(run.id, "me") is run
    for run_id, owner in ((run.id, "you"), (run.id, ""), ("none", "me"), ("", "")):
        with pytest.raises(InspectorError, match="there is no such run") as caught:
            store.get(run_id, owner)
        assert caught.value.code == "run_not_found"


def test_runs_that_are_not_used_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(store_module, "monotonic", lambda: now)
    store = InspectionStore(max_seconds=10.0)
    old, used = new_run(store), new_run(store)
    record(old, 3)
    record(used, 2)
    now = 9.0
    store.get(used.id, "")
    now = 12.0
    with pytest.raises(InspectorError):
        store.get(old.id, "")
    assert store.get(used.id, "") is used
    assert store.num_bytes == 2 * ROW_BYTES
    record(old, 1)  # its request still runs: nothing is kept for it any more
    assert store.num_bytes == 2 * ROW_BYTES


def test_the_number_of_runs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RUNS", 3)
    store = InspectionStore()
    runs = [new_run(store) for _ in range(5)]
    assert len(store) == 3
    with pytest.raises(InspectorError):
        store.get(runs[1].id, "")
    assert store.get(runs[2].id, "") is runs[2]


def test_rejected_draft_tokens_are_at_the_position_after_the_accepted_ones() -> None:
    run = new_run(InspectionStore())
    run.record_draft(0, 4, 2, [9, 8])
    run.record_draft(0, 7, 0, [])
    assert (run.drafted, run.rejected) == ({4, 5}, {6: (9, 8)})


def test_threads_may_record_and_read() -> None:
    store = InspectionStore(max_bytes=50 * ROW_BYTES)
    runs = [new_run(store) for _ in range(4)]
    threads = [threading.Thread(target=record, args=(run, 200)) for run in runs]
    for thread in threads:
        thread.start()
    for run in runs:
        for _ in range(50):
            store.get(run.id, "")
    for thread in threads:
        thread.join()
    kept = sum(step.inputs is not None for run in runs for step in run.steps)
    assert kept == 50
    assert store.num_bytes == 50 * ROW_BYTES
