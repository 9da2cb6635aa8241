"""nc.warm: afterwards nothing is compiled or loaded any more; until then, the reference samples without waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import nucleate as nc
from nucleate.jit import kernel_libraries, native_library
from nucleate.jit.kernel_libraries import ALL, SAMPLER
from nucleate.jit.native_library import KernelError, KernelLibrary
from nucleate.jit.thread_pool import cores, pool
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference

LOGITS = np.random.default_rng(0).normal(0, 2, (2, 20_000)).astype(np.float32)
PARAMS = nc.SamplingParams(temperature=0.9, top_p=0.95, seed=5)


@pytest.fixture
def uncompiled(monkeypatch, tmp_path):
    """An uncached library whose compilation waits for an event."""
    go = threading.Event()
    library = KernelLibrary("unmade", (), ())
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_libraries, "KERNELS", kernel_libraries.KernelReadiness((library,)))

    def compile_(one, progress, *, background):
        assert one is library
        assert background
        go.wait(30)
        one.ready = True

    monkeypatch.setattr(native_library, "_compile", compile_)
    yield library, go
    go.set()


def sample_and_count(monkeypatch, backend="auto"):
    """The tokens, and the number of rows that the reference sampled."""
    rows, run = [], reference.run
    monkeypatch.setattr(reference, "run", lambda *given: rows.append(1) or run(*given))
    return nc.sample(LOGITS, PARAMS, backend=backend), len(rows)


def test_the_reference_samples_until_the_kernels_are_ready(uncompiled, monkeypatch):
    library, go = uncompiled
    thread = native_library.load_in_background([library])
    meanwhile, by_reference = sample_and_count(monkeypatch)
    assert by_reference == 2
    go.set()
    thread.join(30)
    afterwards, by_reference = sample_and_count(monkeypatch)
    assert by_reference == 0
    assert meanwhile.tolist() == afterwards.tolist()


def test_a_sampler_switches_to_kernels_in_the_middle_of_an_output(uncompiled):
    library, go = uncompiled
    thread = native_library.load_in_background([library])
    sampler, fixed = nc.Sampler(20_000), nc.Sampler(20_000, backend="reference")
    params = PARAMS.replace(repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2)
    for one in (sampler, fixed):
        one.add(params, [1, 2, 3])
        one.add(params.replace(seed=6, top_p=0.5))
    for step in range(6):
        if step == 3:
            go.set()
            thread.join(30)
        actual, expected = sampler(LOGITS), fixed(LOGITS)
        assert actual.token_ids.tolist() == expected.token_ids.tolist()
        for one, other in zip(actual.logprobs, expected.logprobs, strict=True):
            assert [each.token_id for each in one.top] == [each.token_id for each in other.top]


def test_the_cpu_backend_always_uses_kernels(uncompiled, monkeypatch):
    assert sample_and_count(monkeypatch, backend="cpu")[1] == 0


def test_an_unknown_backend(uncompiled):
    with pytest.raises(ValueError, match="backend must be one of auto, reference, cpu"):
        kernel_libraries.compiled("gpu", 1)


def record_loads(monkeypatch):
    """Record background loads: (names, whether to compile)."""
    found = []
    monkeypatch.setattr(
        native_library,
        "load_in_background",
        lambda some, *, compiling: found.append(([one.name for one in some], compiling)),
    )
    return found


def test_kernels_are_loaded_early_and_compiled_much_later(monkeypatch, tmp_path):
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    library, found = KernelLibrary("unmade", (), ()), record_loads(monkeypatch)
    library.record_fallback(native_library.LOAD_AFTER / 2)
    assert found == []
    library.record_fallback(native_library.LOAD_AFTER / 2)
    assert found == [(["unmade"], False)]
    library.mark_started(compiling=False)  # as the background thread would
    assert not library.load()
    library.record_fallback(native_library.COMPILE_AFTER / 2)
    assert len(found) == 1
    library.record_fallback(native_library.COMPILE_AFTER / 2)
    assert found[1:] == [(["unmade"], True)]


def test_a_load_in_progress_is_not_started_again(monkeypatch):
    library, found = KernelLibrary("unmade", (), ()), record_loads(monkeypatch)
    library.mark_started(compiling=True)
    library.mark_started(compiling=False)  # by another thread
    assert not library.load()
    library.record_fallback(100 * native_library.COMPILE_AFTER)
    assert found == []


def test_two_threads_compile_once(uncompiled, monkeypatch, tmp_path):
    library, go = uncompiled
    monkeypatch.undo()
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    ran = []

    def run(one, progress, *, background):
        ran.append(background)
        go.wait(30)
        one.ready = True

    monkeypatch.setattr(native_library, "_run", run)
    threads = [native_library.load_in_background([library]), native_library.load_in_background([library])]
    go.set()
    native_library.ensure_loaded([library])
    for thread in threads:
        thread.join(30)
    assert len(ran) == 1


@pytest.mark.slow
def test_the_cost_of_small_calls_adds_up(uncompiled, monkeypatch):
    found = record_loads(monkeypatch)
    row = LOGITS[:1, :1000]
    calls = 0
    while not found:
        nc.sample(row, PARAMS)
        calls += 1
    assert calls == pytest.approx(native_library.LOAD_AFTER / kernel_libraries.SECONDS_PER_LOGIT / 1000, abs=1)


def test_a_compiler_error_is_logged_and_blocks_nothing(uncompiled, monkeypatch, caplog):
    def fail(library, progress, *, background):
        raise KernelError("no such register")

    monkeypatch.setattr(native_library, "_compile", fail)
    library, _ = uncompiled
    native_library.load_in_background([library]).join(30)
    assert "no such register" in caplog.text
    assert not kernel_libraries.compiled("auto", 10**6)
    with pytest.raises(KernelError, match="no such register"):
        native_library.ensure_loaded([library])


@pytest.mark.parametrize("background", [False, True])
def test_the_additional_function_runs_after_the_kernels(background, caplog):
    ready_before = []

    def also():
        ready_before.append(all(library.ready for library in ALL))
        raise RuntimeError("the model's")

    if background:
        nc.warm(background=True, also=also).join(30)
        assert "the model's" in caplog.text
    else:
        with pytest.raises(RuntimeError, match="the model's"):
            nc.warm(also=also)
    assert ready_before == [True]


def test_progress_names_every_library():
    lines = []
    assert nc.warm(on_progress=lines.append) is None
    assert [line.partition(":")[0] for line in lines] == [library.name for library in ALL]


def test_every_kernel_is_in_a_library():
    """Other kernels would be compiled in the process that needs them."""
    root = Path(nc.__file__).parent
    declared = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts)
        for path in root.rglob("*.py")
        if "\n@kernel(" in path.read_text("utf-8")
    }
    assert declared == {module for library in ALL for module in library.modules}


AFTERWARDS = """
import random, sys
import numpy as np, nucleate as nc
from nucleate.jit import native_library
from nucleate.sampling.presets import PRESETS, REQUESTABLE
from nucleate.sampling.stages import STAGES
sys.path.insert(0, sys.argv[1])
from stalls import STAGES as ON, DRAWS
nc.warm()
def fail(*given):
    raise AssertionError(f"{given} is read or compiled after warm")
native_library._functions = native_library._compile = fail
sys.modules["numba"] = None  # importing it is an error
numbers = random.Random(1)
x = np.random.default_rng(0).normal(0, 2, (1, 4096)).astype(np.float32)
words = {"bad_words"}
names = sorted(set(ON) - words)
sampler = nc.Sampler(4096)
for turn in range(120):
    some = numbers.sample(names, numbers.choice((1, 2, 4)))
    fields = {name: value for one in some for name, value in ON[one].items()}
    if "logit_bias" in fields:
        fields["logit_bias"] = {40: 2.0}
    fields |= {"order": numbers.choice(list(PRESETS)), "draw": numbers.choice(DRAWS), "seed": turn}
    try:
        params = nc.SamplingParams(**fields, logprobs=turn % 3 or None)
    except ValueError:  # an order without one of the stages
        continue
    row = sampler.add(params, [1, 2, 3], eos_token_ids=[9])
    out = sampler(x, [row])
    assert not out.errors, (fields, out.errors)
    sampler.remove(row)
print("done")
"""


@pytest.mark.slow
def test_after_warm_no_pipeline_of_built_in_stages_compiles_or_loads_anything():
    """In a separate process, where Numba cannot even be imported."""
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    command = [sys.executable, "-c", AFTERWARDS, str(benchmarks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout.strip() == "done", ran.stderr[-3000:]


@pytest.mark.slow
def test_importing_the_package_imports_no_compiler():
    code = "import nucleate.llm, sys; print(sorted({'numba', 'llvmlite', 'llvmlite.binding'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_sampler_needs_only_some_libraries():
    assert set(SAMPLER) < set(ALL)


@pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5"])
def test_an_invalid_number_of_threads_is_an_explained_error(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", setting)
    with pytest.raises(ParameterError, match=f"NUCLEATE_THREADS must be an integer >= 1, got '{setting}'"):
        cores.__wrapped__()


def test_the_number_of_threads_is_configured_or_that_of_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_THREADS", "3")
    assert cores.__wrapped__() == 3
    monkeypatch.setenv("NUCLEATE_THREADS", " ")
    assert 1 <= cores.__wrapped__() <= (os.cpu_count() or 1)


def test_a_process_has_one_pool() -> None:
    assert pool() is pool()
    assert pool().submit(os.getpid).result() == os.getpid()
