"""nc.warm: afterwards nothing waits for the compiler; beside it, the reference answers."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import nucleate as nc
from nucleate import kernels, warming
from nucleate.backends import reference
from nucleate.backends.cpu.compile import folder
from nucleate.core.kept import Patience
from nucleate.stages import Gumbel, LogitBias, Repetition, TopK, Typical

LOGITS = np.random.default_rng(0).normal(0, 2, (2, 20_000)).astype(np.float32)
PARAMS = nc.SamplingParams(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture
def held(monkeypatch):
    """A compiler that waits until it is told to go on."""
    go = threading.Event()
    monkeypatch.setattr(warming, "_compile", lambda pipelines: go.wait(30))
    yield go
    go.set()


def who_drew(monkeypatch, backend="auto"):
    """How many rows of a call the reference draws, and the tokens."""
    rows, run = [], reference.run
    monkeypatch.setattr(reference, "run", lambda *given: rows.append(1) or run(*given))
    return nc.sample(LOGITS, PARAMS, backend=backend), len(rows)


def test_the_reference_answers_meanwhile_and_kernels_afterwards(held, monkeypatch):
    thread = nc.warm(background=True)
    meanwhile, by_reference = who_drew(monkeypatch)
    assert by_reference == 2
    held.set()
    thread.join(30)
    assert kernels.KERNELS.warming == []
    afterwards, by_reference = who_drew(monkeypatch)
    assert by_reference == 0
    assert meanwhile.tolist() == afterwards.tolist()


def test_a_sampler_moves_over_in_the_middle_of_its_answers(held):
    thread = nc.warm(background=True)
    sampler, fixed = nc.Sampler(20_000), nc.Sampler(20_000, backend="reference")
    params = PARAMS.replace(repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2)
    for one in (sampler, fixed):
        one.add(params, [1, 2, 3])
        one.add(params.replace(seed=6, top_p=0.5))
    for step in range(6):
        if step == 3:
            held.set()
            thread.join(30)
        told, meant = sampler(LOGITS), fixed(LOGITS)
        assert told.token_ids.tolist() == meant.token_ids.tolist()
        for one, other in zip(told.logprobs, meant.logprobs, strict=True):
            assert [each.token_id for each in one.top] == [each.token_id for each in other.top]


def test_the_cpu_backend_waits_if_it_is_asked_for(held, monkeypatch):
    nc.warm(background=True)
    assert who_drew(monkeypatch, backend="cpu")[1] == 0


def test_afterwards_small_rows_are_drawn_by_kernels_too(monkeypatch):
    small = LOGITS[:1, :100]
    before = nc.sample(small, PARAMS)
    assert not kernels.compiled("auto", small.size)
    nc.warm()
    assert kernels.compiled("auto", small.size)
    monkeypatch.setattr(reference, "run", None)
    assert nc.sample(small, PARAMS).tolist() == before.tolist()


@pytest.mark.parametrize(("backend", "ends"), [("auto", True), ("reference", False)])
def test_many_small_calls_are_worth_kernels_too(backend, ends, monkeypatch):
    monkeypatch.setattr(kernels.KERNELS, "patience", Patience(folder, 1000, 1000))
    sampler, twin = nc.Sampler(100, backend=backend), nc.Sampler(100, backend="reference")
    rows = [one.add((TopK(20), Gumbel(3)), [1]) for one in (sampler, twin)]
    assert rows == [0, 0]
    for step in range(15):
        assert kernels.compiled("auto", 100) == (ends and step >= 10)
        x = np.random.default_rng(step).normal(size=(1, 100)).astype(np.float32)
        assert sampler(x).token_ids.tolist() == twin(x).token_ids.tolist()


def test_patience_does_not_end_what_is_being_compiled(held, monkeypatch):
    monkeypatch.setattr(kernels.KERNELS, "patience", Patience(folder, 1, 1))
    thread = nc.warm(background=True)
    kernels.KERNELS.missed(5)
    assert not kernels.KERNELS.warm
    held.set()
    thread.join(30)
    kernels.KERNELS.missed(5)
    assert kernels.KERNELS.warm


def test_two_at_once_are_awaited_both(held):
    one, other = nc.warm(background=True), nc.warm(background=True)
    assert [one, other] == kernels.KERNELS.warming
    assert not kernels.compiled("auto", 10**6)
    held.set()
    one.join(30)
    other.join(30)
    assert kernels.compiled("auto", 10**6)


def test_a_compiler_that_fails_is_logged_and_holds_up_nobody(monkeypatch, caplog):
    def fail(pipelines):
        raise RuntimeError("no such register")

    monkeypatch.setattr(warming, "_compile", fail)
    nc.warm(background=True).join(30)
    assert kernels.KERNELS.warming == []
    assert "no such register" in caplog.text
    with pytest.raises(RuntimeError, match="no such register"):
        nc.warm()


@pytest.mark.parametrize("background", [False, True])
def test_what_else_is_to_be_warmed_comes_afterwards(background, held, caplog):
    came = []

    def also():
        came.append((list(kernels.KERNELS.warming), kernels.compiled("auto", 10**6)))
        raise RuntimeError("the model's")

    if background:
        thread = nc.warm(background=True, also=also)
        assert not came
        held.set()
        thread.join(30)
        assert "the model's" in caplog.text
    else:
        held.set()
        with pytest.raises(RuntimeError, match="the model's"):
            nc.warm(also=also)
    assert came == [([], True)]


@pytest.mark.parametrize("background", [False, True])
def test_wrong_parameters_are_an_error_at_once(background):
    with pytest.raises(ValueError, match="one draw"):
        nc.warm((Gumbel(1), Gumbel(1)), background=background)
    with pytest.raises(TypeError, match="SamplingParams or a tuple"):
        nc.warm({"top_p": 0.5}, background=background)
    assert kernels.KERNELS.warming == []


def test_what_was_warmed_compiles_nothing_more():
    """In a process of its own: the second call of each kind takes as long as the first one after warm."""
    code = """
import time, numpy as np, nucleate as nc
from nucleate.stages import *
from numba.core import event
chains = [(Repetition(1.2), LogitBias({3000: 1.0}), Typical(0.9), Gumbel(1)), nc.SamplingParams(top_h=0.5, logprobs=2)]
nc.warm(*chains)
with event.install_recorder("numba:compile") as told:
    sampler = nc.Sampler(5000, backend="cpu")
    for one in chains:
        sampler.add(one, [1, 2], output_ids=[2, 3])
    sampler(np.random.default_rng(0).normal(size=(2, 5000)).astype(np.float32))
print(len(told.buffer))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.strip() == "0"


def test_a_large_token_id_in_the_parameters_is_no_obstacle():
    assert nc.warm((LogitBias({300_000: 1.0}), Repetition(1.1), Typical(0.5), TopK(5), Gumbel(1))) is None
