"""Rows on a device whose Shifts depend on the history: their outputs equal those on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiers
from triton_interpreter import Interpreted

import nucleate as nc
from nucleate.sampling.stages import BadWords, Dry, Gumbel, LogitBias, MinTokens, NoRepeatNgram, Repetition

torch = pytest.importorskip("torch", reason="rows on a device are tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")
import sampler_scenarios as pasts  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from nucleate.sampling.gpu import torch_device  # noqa: E402
from nucleate.sampling.gpu.torch_device import COLUMNS  # noqa: E402


@pytest.fixture(scope="module")
def kernels() -> Iterator[Interpreted]:
    process = Interpreted(str(Path(pasts.__file__)))
    yield process
    process.close()


@pytest.mark.slow
def test_outputs_equal_the_cpu(kernels: Interpreted, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(tiers.count(2, 4)):
        expected = pasts.written("reference", seed, 25, 30)
        assert pasts.written("torch", seed, 25, 30) == expected, seed
    assert caplog.records == []  # none runs on the host
    assert kernels.call("written", "triton", 1, 4, 30) == pasts.written("reference", 1, 4, 30)


@pytest.mark.exhaustive
def test_long_outputs_equal_the_cpu(kernels: Interpreted) -> None:
    for seed in range(10, 40):
        assert pasts.written("torch", seed, 60, 30) == pasts.written("reference", seed, 60, 30), seed
    for seed in range(10, 14):
        assert kernels.call("written", "triton", seed, 12, 40) == pasts.written("reference", seed, 12, 40), seed


class Copies(TorchDispatchMode):
    """Counts copies from the host to the device."""

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


def test_adding_a_row_takes_one_copy_and_removing_it_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without data."""
    monkeypatch.setattr(torch_device, "open_device", torch.device)
    monkeypatch.setattr(torch_device, "select_kernels", lambda *given: "torch")
    words = ((3, 4), (5, 6, 7))
    pipelines = [
        (Gumbel(1),),
        (LogitBias({3: 2.0}), Repetition(1.2, 5), MinTokens(3, (5,)), Gumbel(2)),
        (Repetition(1.2), NoRepeatNgram(3), BadWords(words), Dry(0.8, breakers=((9,), (1, 2))), Gumbel(3)),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler = nc.Sampler(300, device="meta")
        for stages in pipelines:
            with Copies() as copies:
                row = sampler.add(stages, [1, 2, 3], output_ids=[4] * 9)
            assert len(copies.bytes) == 1, (row, copies.bytes)
        assert copies.bytes[0] == 8 * (COLUMNS + 12 + 12)  # line; tokens; lengths of repeats
        with Copies() as copies:
            for row in range(3):
                sampler.remove(row)
        assert copies.bytes == []
