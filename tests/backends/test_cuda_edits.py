"""The kernels of a step's edits and of what follows a draw, in Triton's interpreter: bit by bit what tensors give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interpreted import Interpreted

import nucleate as nc
from nucleate.stages import BadWords, Dry, Gumbel, LogitBias, MinTokens, NoRepeatNgram, Repetition

torch = pytest.importorskip("torch", reason="rows on a device are tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")
import pasts  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from nucleate.backends.cuda import device  # noqa: E402
from nucleate.backends.cuda.entries import WIDTH  # noqa: E402
from nucleate.backends.cuda.slots import COLUMNS  # noqa: E402


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreted]:
    process = Interpreted(str(Path(pasts.__file__)))
    yield process
    process.close()


STORIES = [
    (0, 4, 40, 30, 32),
    (1, 7, 33, 9, 16),
    (2, 9, 70, 60, 16),
    (3, 9, 5, 9, 8),
    (4, 5, 1, 5, 256),
    (17, 5, 9, 6, 16),
]


@pytest.mark.parametrize(("seed", "steps", "size", "prompt", "block"), STORIES)
def test_kernels_keep_what_tensors_keep(
    kernels: Interpreted, seed: int, steps: int, size: int, prompt: int, block: int
) -> None:
    assert kernels.call("story", seed, steps, size, prompt, block) == ""


def test_rows_write_what_they_write_on_the_cpu(kernels: Interpreted, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(4):
        expected = pasts.written("reference", seed, 25, 30)
        assert pasts.written("torch", seed, 25, 30) == expected, seed
    assert caplog.records == []  # none runs on the host
    assert kernels.call("written", "triton", 1, 4, 30) == pasts.written("reference", 1, 4, 30)


@pytest.mark.slow
def test_rows_write_the_same_for_long(kernels: Interpreted) -> None:
    for seed in range(10, 40):
        assert pasts.written("torch", seed, 60, 30) == pasts.written("reference", seed, 60, 30), seed
    for seed in range(10, 14):
        assert kernels.call("written", "triton", seed, 12, 40) == pasts.written("reference", seed, 12, 40), seed


@pytest.mark.slow
def test_many_stories(kernels: Interpreted) -> None:
    for seed in range(10, 40):
        size, block = (7, 40, 300, 700)[seed % 4], (16, 32, 64, 256)[seed // 4 % 4]
        assert kernels.call("story", seed, 12, size, (9, 40, 300)[seed % 3], block) == "", seed


# (kernel, with what is there where rows look back): the most registers, the most instructions
BUDGET = {
    ("fill", True): (72, 800),
    ("fill", False): (48, 340),
    ("look", True): (72, 1850),
    ("go_on", True): (72, 1050),
    ("go_on", False): (64, 880),
    ("match", True): (48, 400),
}


def compiled(capability: int, kernels: Iterable[tuple[str, bool]] = BUDGET) -> None:
    """In a process of its own, where nothing says that kernels are interpreted."""
    kernels = list(kernels)
    asked = json.dumps([(*kernel, capability) for kernel in kernels])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-W", "error", str(Path(__file__).with_name("compiled_edits.py")), asked]
    done = subprocess.run(script, env=environment, check=True, capture_output=True, text=True)
    for kernel, found in zip(kernels, json.loads(done.stdout), strict=True):
        registers, instructions = BUDGET[kernel]
        print(capability, kernel, found)
        assert found["stack"] == 0, (capability, kernel, found)
        assert 0 < found["registers"] <= registers, (capability, kernel, found)
        assert 0 < found["instructions"] <= instructions, (capability, kernel, found)


def test_the_kernels_stay_within_the_budget() -> None:
    compiled(90, [kernel for kernel in BUDGET if kernel[1]])


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_all_kernels_stay_within_the_budget_on_all_gpus(capability: int) -> None:
    compiled(capability)


class Copies(TorchDispatchMode):
    """Counts what goes from the host to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        out, named = call(*given, **(named or {})), named or {}
        if call is torch.ops.aten._to_copy.default and out.device != given[0].device:
            self.bytes.append(given[0].numel() * given[0].element_size())
        elif call is torch.ops.aten.copy_.default and given[0].device != given[1].device and given[1].dim():
            self.bytes.append(given[1].numel() * given[1].element_size())
        return out


def test_a_row_comes_in_one_copy_and_goes_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without numbers."""
    monkeypatch.setattr(device, "opened", torch.device)
    monkeypatch.setattr(device, "kernels_on", lambda *given: "torch")
    words = ((3, 4), (5, 6, 7))
    pipelines = [
        (Gumbel(1),),
        (LogitBias({3: 2.0}), Repetition(1.2, 5), MinTokens(3, (5,)), Gumbel(2)),
        (Repetition(1.2), NoRepeatNgram(3), BadWords(words), Dry(0.8, breakers=((9,), (1, 2))), Gumbel(3)),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler = nc.Sampler(300, device="meta")
        for stages in pipelines * 2:  # the second time the lists and the room are there
            with Copies() as copies:
                row = sampler.add(stages, [1, 2, 3], output_ids=[4] * 9)
            assert len(copies.bytes) - 2 * (row == 2) == 1, (row, copies.bytes)
        assert copies.bytes[0] == 8 * (COLUMNS + 12 + 12 + 5 * WIDTH)  # line; tokens; lengths; entries of 1, 2, 3, 4, 7
        with Copies() as copies:
            for row in range(3):
                sampler.remove(row)
        assert copies.bytes == []
