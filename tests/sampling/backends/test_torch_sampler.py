"""Sampler on a device: the same event log as on the CPU, with tensors and with kernels in Triton's interpreter."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_interpreter as interpreted
from toy_models import Toy

import nucleate as nc
from nucleate.generation.loop import generate
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stages import (
    BadWords,
    Dry,
    Frequency,
    Gumbel,
    LogitBias,
    Logprobs,
    MinTokens,
    Mirostat,
    NoRepeatNgram,
    Presence,
    Repetition,
    Suppress,
    Temperature,
    TopK,
    TopP,
    Typical,
)

torch = pytest.importorskip("torch", reason="rows on a device are tensors")
import sampler_scenarios as scenarios  # noqa: E402

from nucleate.sampling.gpu import batch_state as loops  # noqa: E402
from nucleate.sampling.gpu import batch_state as on_device  # noqa: E402
from nucleate.sampling.gpu import torch_device  # noqa: E402
from nucleate.sampling.gpu.device_batch import LazyDict, LazyList  # noqa: E402
from nucleate.sampling.gpu.torch_device import select_kernels  # noqa: E402


def assert_equal_events(events: list[Any], other: list[Any]) -> None:
    """Check that two event logs are equal."""
    assert len(events) == len(other)
    for step, (one, another) in enumerate(zip(events, other, strict=True)):
        assert scenarios.same(one, another), (step, one, another)


@pytest.fixture(scope="module")
def kernels() -> Iterator[interpreted.Interpreted]:
    pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")
    process = interpreted.Interpreted(str(Path(scenarios.__file__)))
    yield process
    process.close()


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("seed", "size"), [*((seed, 77) for seed in range(5)), (8, 300), (9, 33), (10, 1)])
def test_rows_added_and_removed_equal_the_cpu(seed: int, size: int) -> None:
    assert_equal_events(scenarios.play("torch", seed, 60, size), scenarios.play("reference", seed, 60, size))


@pytest.mark.exhaustive
def test_very_many_scenarios() -> None:
    for seed in range(100, 300):
        assert_equal_events(scenarios.play("torch", seed, 60), scenarios.play("reference", seed, 60))


@pytest.mark.slow
def test_the_host_reads_tokens_before_the_ring_overwrites_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "MIN_RING_SIZE", 8)  # the longest window is 7
    for seed in (20, 21):
        assert_equal_events(scenarios.play("torch", seed, 60), scenarios.play("reference", seed, 60))
    sampler, sampled = nc.Sampler(40, "torch"), [[], []]
    for row in range(2):
        sampler.add((Repetition(1.2, 7), Gumbel(row)), [1] * row)
    for step in range(30):
        for row, token in enumerate(sampler(torch.zeros(2, 40)).token_ids.tolist()):
            sampled[row].append(token)
        if step % 3 == 0:
            sampler.accept(1, step)
            sampled[1].append(step)
    loop = sampler.loop(lambda tokens_R, active_R: torch.zeros(2, 40), [1, 1], steps=7)
    for row, tokens in enumerate(torch.cat([loop(), loop()], 1).tolist()):
        sampled[row] += tokens
    assert [sampler.output_ids(row) for row in range(2)] == [tuple(tokens) for tokens in sampled]


@pytest.mark.slow
def test_scenarios_with_kernels(kernels: interpreted.Interpreted) -> None:
    assert_equal_events(kernels.call("play", "triton", 3, 9), scenarios.play("reference", 3, 9))
    assert_equal_events(kernels.call("play", "triton", 9, 6, 300), scenarios.play("reference", 9, 6, 300))


@pytest.mark.exhaustive
def test_long_scenarios_with_kernels(kernels: interpreted.Interpreted) -> None:
    for seed in range(30, 36):
        assert_equal_events(kernels.call("play", "triton", seed, 40, 300), scenarios.play("reference", seed, 40, 300))


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("window", [None, 9])
def test_entries_grow_with_the_output(window: int | None) -> None:
    """More tokens, and more rows, than the initial capacity."""
    rng, size = np.random.default_rng(1), 400
    both = [nc.Sampler(size, backend) for backend in ("torch", "reference")]
    for step in range(80):
        for sampler in both if step in (0, 1, 2, 70) else ():
            sampler.add((Repetition(1.5, window), Frequency(0.3, window), Gumbel(step)), [1, 2, 1])
            sampler.add((TopP(0.9), Gumbel(step)))
        for sampler in both if 2 < step < 5 else ():
            sampler.remove(step)
        x_RV = rng.normal(size=(len(both[0]), size)).astype(np.float32)
        assert both[0](x_RV).token_ids.tolist() == both[1](x_RV).token_ids.tolist()
    assert [both[0].output_ids(row) for row in both[0].rows] == [both[1].output_ids(row) for row in both[1].rows]


def test_more_tokens_than_the_vocabulary_may_survive() -> None:
    both = [nc.Sampler(3, backend) for backend in ("torch", "reference")]
    for seed in range(40):
        for sampler in both:
            sampler.add((TopK(2**31 - 1), Gumbel(seed)))
    one, other = (sampler(np.zeros((40, 3), np.float32)).token_ids.tolist() for sampler in both)
    assert one == other
    assert set(one) == {0, 1, 2}


def test_logprobs_of_a_row_with_ties() -> None:
    x_RV = np.round(np.random.default_rng(2).normal(size=(3, 300)).astype(np.float32))
    x_RV[1, ::2], x_RV[2] = 0.0, -np.inf
    x_RV[2, [7, 200]] = -0.0, 0.0
    both = [nc.Sampler(300, backend) for backend in ("torch", "reference")]
    for sampler in both:
        for row, case in enumerate([(20, (1, 299)), (400, ()), (3, (7, 8))]):
            sampler.add((Logprobs(*case), Gumbel(row)))
    one, other = (scenarios.as_values(sampler(x_RV)) for sampler in both)
    assert scenarios.same(one, other), (one, other)


@pytest.mark.slow
def test_a_step_does_not_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data: reading a value fails, and so does mixing devices."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from nucleate.sampling.gpu import torch_device

    monkeypatch.setattr(torch_device, "open_device", torch.device)
    monkeypatch.setattr(torch_device, "select_kernels", lambda *given: "torch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler = nc.Sampler(300, device="meta")
        looking = Dry(0.8, breakers=((9,), (1, 2))), NoRepeatNgram(3), BadWords(((3, 4), (5, 6, 7)))
        shifts = LogitBias({3: 2.0}), MinTokens(3, (5,)), Repetition(1.2, 5), Presence(0.3, 5), *looking
        sampler.add((Logprobs(2, (3,)), *shifts, Suppress((7,)), TopP(0.9), Gumbel(5)), [1, 2, 3], output_ids=[4])
        sampler.add((looking[0], TopK(5), Gumbel(5)), [1, 2, 3])
        x_RV = torch.zeros((2, 300), device="meta", dtype=torch.bfloat16)
        mask_RW = torch.zeros((2, 12), device="meta", dtype=torch.int32)
        out = sampler(x_RV, mask=mask_RW)
        sampler(x_RV[:1], [1])
        sampler.accept(0, 5)
        assert (out.token_ids.device.type, out.token_ids.dtype, out.token_ids.shape) == ("meta", torch.int64, (2,))
        assert out.logprobs is not None
        assert len(out.logprobs) == 2
        loop = sampler.loop(lambda tokens_R, active_R: x_RV[:1], [1], [1], steps=1, stop_ids=[2])
        assert loop().shape == (1, 1)
        for read_value in (lambda: out.errors.get(0), lambda: out.logprobs[0], lambda: sampler.output_ids(0)):
            with pytest.raises(DataDependentOutputException):
                read_value()


@pytest.mark.slow
def test_a_loop_equals_the_host(kernels: interpreted.Interpreted) -> None:
    for seed in range(3):
        sampled, ended, reports = scenarios.looped("reference", seed, 40, 4, 3, 4)
        expected = [sampled, [end or row[-1] < 0 for end, row in zip(ended, sampled, strict=True)], reports]
        assert scenarios.looped("torch", seed, 40, 4, 3, 4) == expected
    assert kernels.call("looped", "triton", 3, 40, 2, 2, 2)[::2] == scenarios.looped("reference", 3, 40, 2, 2, 2)[::2]


def test_a_loop_equals_generate(llm: nc.LLM) -> None:
    """A Markov chain as a table, step by step with the full sequence, and in a loop on tensors."""
    size, count = 64, 12
    rows_VV = np.random.default_rng(3).normal(size=(size, size)).astype(np.float32) * 2
    params = nc.SamplingParams(
        temperature=0.9, top_p=0.95, repetition_penalty=1.2, min_tokens=4, max_tokens=count, stop_token_ids=range(9, 24)
    )
    expected, sampler, first = [], nc.Sampler(size, "torch"), [5, 17, 30, 44]
    ends = tuple(llm.tokenizer.eos_token_ids)
    for row, token in enumerate(first):
        model = Toy(lambda sequence: rows_VV[sequence[-1]], size)
        pieces = generate(model, llm.tokenizer, [1, token], params.replace(seed=7), row)
        ids = [*(token for chunk in pieces for token in chunk.token_ids)]
        expected.append(ids + [-1] * (count - len(ids)))
        sampler.add(params.build_pipeline(ends, llm.tokenizer), [1, token], seed=7 + row)
    table_VV, stops = torch.from_numpy(rows_VV), [*ends, *range(9, 24)]
    loop = sampler.loop(lambda tokens_R, active_R: table_VV[tokens_R], first, steps=count // 3, stop_ids=stops)
    assert torch.cat([loop() for _ in range(3)], 1).tolist() == expected
    assert any(-1 in row for row in expected)


class FakeCuda:
    """A stand-in for the device "cuda" so that a loop captures a graph."""

    type = "cuda"


def test_a_loop_is_captured_once_and_again_after_reallocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up runs change nothing. The graph is a stand-in: there is no GPU."""
    captures = []

    def captured(run: Callable[[], None]) -> Callable[[], None]:
        captures.append(1)
        run()
        return run

    table_VV = torch.from_numpy(np.random.default_rng(4).normal(size=(200, 200)).astype(np.float32))
    pairs = []
    for stubborn in (True, False):
        sampler = nc.Sampler(200, "torch")
        sampler.add((Repetition(1.3), TopK(50), Gumbel(1)), [3])
        loop = sampler.loop(lambda tokens_R, active_R: table_VV[tokens_R], [3], steps=4)
        if stubborn:
            monkeypatch.setattr(loops, "capture_graph", captured)
            for module in (loops, on_device):
                monkeypatch.setattr(module, "device_guard", lambda device: contextlib.nullcontext())
            loop._rows.device = FakeCuda()
        pairs.append((sampler, loop))
    for step in range(6):
        assert pairs[0][1]().tolist() == pairs[1][1]().tolist()
        if step == 3:
            assert len(captures) == 1
            pairs[0][0]._device._state.device = torch.device("cpu")
            for sampler, _ in pairs:
                for _ in range(9):  # more rows than there were slots for
                    sampler.add((Gumbel(2),))
            pairs[0][0]._device._state.device = FakeCuda()
        assert pairs[0][1].ended_R.tolist() == [False]
    assert len(captures) == 2


def test_a_loop_continues_after_a_stop_if_requested() -> None:
    sampler, table_VV = nc.Sampler(50, "torch"), torch.eye(50).roll(1, 1) * 1000
    row = sampler.add((Gumbel(1),), [3])
    loop = sampler.loop(lambda tokens_R, active_R: table_VV[tokens_R], [3], steps=4, stop_ids=[5])
    assert [loop().tolist(), loop().tolist()] == [[[4, 5, -1, -1]], [[-1, -1, -1, -1]]]
    loop.ended_R.fill_(False)
    assert loop().tolist() == [[6, 7, 8, 9]]
    assert sampler.output_ids(row) == (4, 5, 6, 7, 8, 9)
    sampler.remove(row)
    with pytest.raises(ParameterError, match="row 0 has been removed"):
        loop()


def test_a_loop_rejects_rows_that_need_the_host() -> None:
    def forward(tokens_R: Any, active_R: Any) -> Any:
        raise AssertionError

    sampler = nc.Sampler(50, "torch")
    logprobs = Logprobs(1)
    for stages in ((), (Temperature(0.5), Suppress((1,))), (logprobs,), (Typical(0.5), logprobs)):
        sampler.add((*stages, Gumbel(1)))
    cause = "it reports logprobs"
    for rows, message in (
        ([1], "row 1 .* it runs on the CPU"),
        ([0, 2], f"row 2 .* {cause}"),
        ([3], f"row 3 .* {cause}"),
    ):
        with pytest.raises(ParameterError, match=message):
            sampler.loop(forward, [1] * len(rows), rows, steps=2)
    for given in ({"first_ids": [1, 2]}, {"first_ids": [50]}, {"steps": 0}, {"steps": 8192}, {"rows": [0, 0]}):
        with pytest.raises(ValueError):
            sampler.loop(forward, **{"first_ids": [1], "rows": [0], "steps": 1, **given})
    with pytest.raises(ParameterError, match="a loop runs on a device"):
        nc.Sampler(50).loop(forward, [], steps=1)


@pytest.mark.slow
def test_an_engine_samples_on_a_device(llm: nc.LLM) -> None:
    """Also with speculative decoding, whose distributions the host computes."""
    requests = [
        nc.SamplingParams(seed=3, max_tokens=12, temperature=0.8, top_p=0.9, logprobs=2),
        nc.SamplingParams(seed=4, max_tokens=16, repetition_penalty=1.3, n=2, min_tokens=9),
        nc.SamplingParams(seed=6, max_tokens=12, typical_p=0.8),
    ]

    def outputs_of(backend: str, **more: Any) -> dict[tuple[str, int], list[int]]:
        engine = nc.Engine(llm.new_engine().runner, llm.tokenizer, backend=backend, **more)
        for number, params in enumerate(requests):
            engine.add(nc.Request(llm.encode("Once upon a time " + "the fox " * number), params))
        found: dict[tuple[str, int], list[int]] = {}
        while len(engine):
            for event in engine.step():
                logprob_ids = [step.chosen.token_id for step in event.chunk.logprobs or ()]
                found.setdefault((event.request_id, event.chunk.index), []).extend(
                    [*event.chunk.token_ids, *logprob_ids]
                )
        return found

    expected = outputs_of("auto")
    assert outputs_of("torch") == expected
    assert outputs_of("torch", speculative_config="suffix") == expected


def test_wrong_arguments_change_nothing() -> None:
    sampler = nc.Sampler(40, "torch")
    sampler.add((Gumbel(1),))
    x_RV = np.zeros((1, 40), np.float32)
    for logits, mask, error in (
        (np.zeros((2, 40), np.float32), None, ValueError),
        (np.zeros((1, 41), np.float32), None, ValueError),
        (np.zeros(40, np.float32), None, ValueError),
        (np.zeros((1, 40), np.int64), None, TypeError),
        (torch.zeros((1, 40), dtype=torch.int32), None, TypeError),
        (x_RV, np.zeros((1, 1), np.int32), ValueError),
        (x_RV, np.zeros((1, 2), np.int64), TypeError),
        (x_RV, torch.zeros((1, 2)), TypeError),
    ):
        with pytest.raises(error):
            sampler(logits, mask=mask)
    with pytest.raises(ValueError, match="one row twice"):
        sampler(np.zeros((2, 40), np.float32), [0, 0])
    assert sampler.output_ids(0) == ()
    assert sampler(x_RV, mask=np.array([[1 << 3, 0]], np.uint32)).token_ids.tolist() == [3]
    assert nc.Sampler(40, "torch")(np.zeros((0, 40), np.float32)).token_ids.tolist() == []


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble, ">f4"])
def test_numpy_floats_of_any_type(kind: Any) -> None:
    x_RV = np.random.default_rng(5).normal(size=(2, 80)).astype(np.float16)
    mask_RW = np.full((2, 6), -2, np.int32)[:, ::2]
    expected = []
    for given, masks in ((x_RV, mask_RW), (x_RV.astype(kind)[:, ::-1][:, ::-1], mask_RW.copy())):
        given.flags.writeable = masks.flags.writeable = False
        sampler = nc.Sampler(80, "torch")
        for seed in range(2):
            sampler.add((Gumbel(seed),))
        expected.append(sampler(given, mask=masks).token_ids.tolist())
    assert expected[0] == expected[1]
    assert expected[0] == nc.sample(x_RV, [(Gumbel(0),), (Gumbel(1),)], mask=mask_RW).tolist()


def test_a_score_beyond_float32_is_sampled_as_on_the_cpu() -> None:
    for backend in ("torch", "reference"):
        sampler = nc.Sampler(40, backend)
        sampler.add((LogitBias({1: 3e38}), Gumbel(1)))
        out = sampler(np.full((1, 40), 3e38, np.float32))
        assert out.token_ids.tolist() == [1]
        assert not out.errors


def test_unsupported_rows_run_on_the_host_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = nc.Sampler(40, "torch")
    with caplog.at_level(logging.WARNING, "nucleate"):
        for stages in ((), (Typical(0.5), Suppress((1,))), (Mirostat(3.0),), (TopK(5), Suppress((2,)))):
            sampler.add((*stages, Gumbel(1)))
    why = "Suppress((1,)) comes after a stage that uses the whole row"
    messages = [f"a row runs on the CPU, because {why}; further rows are not logged"]
    assert [record.message for record in caplog.records] == messages


def test_a_missing_device_and_an_unsupported_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("tpu", "cuda:77", "meta", 3.5, None):
        with pytest.raises(ParameterError, match="device must "):
            nc.Sampler(5, device=device)
    with pytest.raises(ParameterError, match="backend 'triton' needs"):
        nc.Sampler(5, "triton")
    with pytest.raises(ParameterError, match="backend must be one of"):
        nc.Sampler(5, "tensor")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ParameterError, match="needs torch"):
        nc.Sampler(5, device="cuda")
    with pytest.raises(ParameterError, match="needs torch"):
        nc.Sampler(5, "torch")


def test_kernels_run_on_cuda_if_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, mps = torch.device("cuda", 0), torch.device("mps")
    assert select_kernels(mps, "auto") == "torch"
    for there, hip, expected in ((None, None, "torch"), ("", "6.2", "torch"), ("", None, "triton")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, there=there: there)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert select_kernels(cuda, "auto") == expected
        assert select_kernels(cuda, "torch") == "torch"
    assert select_kernels(cuda, "triton") == "triton"


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.3.5", True), ("3.6.1", "2.4.0", False), ("3.7.1", "2.10.0", True)]
)
def test_the_interpreter_names_the_versions_that_it_needs(
    triton: str, numpy: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the interpreter is Triton's: pip install triton (Linux only)")
    monkeypatch.setattr(torch_device, "triton_interpreted", lambda: True)
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr("numpy.__version__", numpy)
    if works:
        assert select_kernels(torch.device("cpu"), "triton") == "triton"
    else:
        with pytest.raises(ParameterError, match=r"needs Triton 3\.7 or newer, or a NumPy older than 2\.4"):
            select_kernels(torch.device("cpu"), "triton")


@pytest.mark.slow
def test_lazy_values_are_computed_once() -> None:
    made = []
    items = LazyList(2, lambda: made.append(1) or [4, 5])
    assert len(items) == 2
    assert not made
    assert (list(items), items[1], items == [4, 5], items == 3, repr(items)) == (*([4, 5], 5, True, False, "[4, 5]"),)
    found = LazyDict(lambda: made.append(2) or {1: "a"})
    assert (dict(found), len(found), 1 in found, found.get(2), repr(found)) == ({1: "a"}, 1, True, None, "{1: 'a'}")
    assert made == [1, 2]
