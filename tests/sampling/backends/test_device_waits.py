"""A decoding step on a device neither waits for it nor copies to the host, and launches a fixed number of kernels.

Without a GPU: tensors without data refuse to be read, and kernels are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request

torch = pytest.importorskip("torch", reason="rows on a device are tensors")
pytest.importorskip("triton", reason="the kernels are Triton's: pip install triton (Linux only)")
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from nucleate.sampling.gpu import torch_device  # noqa: E402

SIZE, ROWS = 300, 3
WORDS = -(-SIZE // 32)
TRUNCATES = ["stats", "finish", "tally", "collect", "resume"]


class Watch(TorchDispatchMode):
    """The launches, and the copies between the host and the device in bytes."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()
        self.up: list[int] = []
        self.down: list[int] = []
        self.launched = launched

    def __enter__(self) -> Self:
        self.up.clear()
        self.down.clear()
        self.launched.clear()
        return super().__enter__()  # type: ignore[no-any-return]

    def __torch_dispatch__(self, call: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        assert call is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        out, named = call(*given, **(named or {})), named or {}
        source = given[1] if call is torch.ops.aten.copy_.default else given[0] if given else None
        if call in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default) and source.device != out.device:
            copies = self.down if out.device.type == "cpu" else self.up
            copies.append(source.numel() * source.element_size())
        return out


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels that were launched on a device without data."""
    names: list[str] = []
    monkeypatch.setattr(torch_device, "open_device", torch.device)
    monkeypatch.setattr(torch_device, "select_kernels", lambda *_: "triton")
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *_, **__: names.append(kernel.fn.__name__))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield names


def sampler_of(**params: Any) -> nc.Sampler:
    sampler = nc.Sampler(SIZE, device="meta")
    for seed in range(ROWS):
        sampler.add(nc.SamplingParams(**params, seed=seed), [1, 2, 3])
    return sampler


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({"temperature": 0.8}, TRUNCATES[:2]),
        ({"temperature": 0.8, "min_p": 0.1}, TRUNCATES[:2]),
        ({"temperature": 0.8, "top_k": 40, "top_p": 0.9}, TRUNCATES),
        ({"temperature": 0.8, "top_p": 0.9, "logprobs": 0}, TRUNCATES),
        ({"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "dry_multiplier": 0.8}, TRUNCATES),
        ({"temperature": 0.8, "typical_p": 0.9}, ["uniforms", "uniforms"]),
    ],
)
def test_a_step_copies_its_mask_up_once_and_nothing_down(
    params: dict[str, Any], kernels: list[str], launched: list[str]
) -> None:
    sampler, watch = sampler_of(**params), Watch(launched)
    logits_RV, mask_RW = torch.empty((ROWS, SIZE), device="meta"), np.full((ROWS, WORDS), -1, np.int32)
    sampler(logits_RV, mask=mask_RW)
    for _ in range(2):
        with watch:
            out = sampler(logits_RV, mask=mask_RW)
        assert watch.down == []
        assert watch.up == [mask_RW.nbytes]
        assert launched == kernels
    with watch:
        sampler(logits_RV)
    assert (watch.up, watch.down) == ([], [])
    with pytest.raises(DataDependentOutputException):  # what such tensors do when they are read
        out.token_ids.tolist()


def test_a_loop_runs_its_steps_without_the_host(launched: list[str]) -> None:
    sampler, watch = sampler_of(temperature=0.8, top_p=0.9), Watch(launched)
    table = torch.empty((SIZE, SIZE), device="meta")
    loop = sampler.loop(lambda ids_R, _: table[ids_R], [7] * ROWS, steps=5, stop_ids=[0])
    with watch:
        loop()
    assert (watch.up, watch.down) == ([], [])
    assert Counter(launched) == dict.fromkeys(TRUNCATES, 5)


def test_a_step_of_the_engine_reads_its_tokens_once(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are read once per step, and masks of grammars are sent once, however many sequences there are."""
    runner = llm.new_engine().runner
    reads: list[int] = []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.numel()) or read(self))
    monkeypatch.setattr(type(runner), "asynchronous", True)
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda inputs: torch.from_numpy(np.array(forward(inputs))))
    engine = Engine(runner, llm.tokenizer, backend="torch")
    for seed in range(4):
        pattern = {"structured_outputs": nc.StructuredOutputs(regex="[a-z ]{60}")} if seed % 2 else {}
        params = nc.SamplingParams(seed=seed, max_tokens=30, temperature=0.8, top_p=0.9, ignore_eos=True, **pattern)
        engine.add(Request(llm.tokenizer.encode("Once upon"), params))
    for _ in range(4):
        engine.step()
    for _ in range(3):
        reads.clear()
        engine.step()
        assert reads == [4]
    while len(engine):
        engine.step()
