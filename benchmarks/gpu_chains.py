"""The samplers that are timed on a GPU: nucleate, plain torch, and the kernels of FlashInfer and vLLM if installed.

A contender returns a callable for a pipeline, or None if it does not support the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import nucleate as nc
from nucleate.sampling.gpu.batch_state import BatchState
from nucleate.sampling.gpu.batch_view import BatchView
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.signature import DeviceRowSpec, device_row_spec
from nucleate.sampling.stage import Pipeline

ALL: Mapping[str, Any] = dict(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05)
PENALTIES: Mapping[str, Any] = dict(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.2)
WORDS = ((5, 6), (7, 8, 9))
CHAINS: Mapping[str, Mapping[str, Any]] = {
    "greedy": dict(temperature=0),
    "temperature": dict(temperature=0.8),
    "top_k 50": dict(top_k=50),
    "top_p .9": dict(top_p=0.9),
    "min_p .05": dict(min_p=0.05),
    "all": ALL,
    "flat, top_p .9": dict(temperature=5.0, top_p=0.9),
    "flat, top_k 3000": dict(temperature=5.0, top_k=3000),
    "flat, both": dict(temperature=5.0, top_k=3000, top_p=0.9),
    "penalties, all": {**ALL, **PENALTIES},
    "penalties, repeats": {**ALL, **PENALTIES, **dict(dry_multiplier=0.8, no_repeat_ngram_size=4, bad_words=WORDS)},
}
STEPS = 4000
"""Capacity of a row in tokens."""
SEEN = 512
"""Number of previous output tokens in pipelines with penalties."""


@dataclass(frozen=True)
class Call:
    """The call that is timed; ``before`` is not timed and restores its inputs."""

    run: Callable[[], object]
    before: Callable[[], object] | None = None


@dataclass(frozen=True)
class Case:
    """Rows of logits and their previous output."""

    logits_RV: torch.Tensor
    output_RS: np.ndarray  #: int64 [R, SEEN]: the output of each row
    params: Mapping[str, Any]

    @property
    def penalised(self) -> bool:
        return "repetition_penalty" in self.params


def make_case(rows: int, size: int, chain: str, dtype: torch.dtype, device: str) -> Case:
    """Noise with a peaked head, like the logits of a confident model. Deterministic in its arguments."""
    numbers = torch.Generator(device).manual_seed(rows * size)
    x_RV = torch.randn(rows, size, generator=numbers, device=device) * 2.5
    head_R = torch.randint(size, (rows, 40), generator=numbers, device=device)
    x_RV.scatter_add_(1, head_R, torch.linspace(2.0, 20.0, 40, device=device).expand(rows, -1))
    output_RS = np.random.default_rng(rows).integers(0, size, (rows, min(SEEN, size)))
    return Case(x_RV.to(dtype), output_RS, CHAINS[chain])


def rows_of(
    pipelines: Sequence[Pipeline],
    seeds: Sequence[int],
    size: int,
    device: str,
    outputs: Sequence[list[int]] = (),
    backend: str = "triton",
) -> tuple[BatchState, BatchView]:
    """Rows as a Sampler stores them for a backend. outputs: the output of each."""
    rows = BatchState(size, torch.empty(0, device=device).device, backend, lambda *_: None)
    for number, (stages, seed) in enumerate(zip(pipelines, seeds, strict=True)):
        row = device_row_spec(simplify(stages), size)
        assert isinstance(row, DeviceRowSpec), row  # noqa: S101  # all pipelines above run on a device
        rows.add(number, row, seed, [], outputs[number] if outputs else [])
    part = rows.view(range(len(pipelines)))
    rows.reserve(part, STEPS)
    return rows, part


def ours(case: Case, backend: str = "triton") -> Call:
    """A sampling step: logit adjustments as tensors, the kernels of a backend, and the state updates."""
    (rows, size), outputs = case.logits_RV.shape, case.output_RS.tolist() if case.penalised else ()
    stages = nc.SamplingParams(**case.params, seed=0).build_pipeline()
    device_rows, part = rows_of([stages] * rows, range(rows), size, str(case.logits_RV.device), outputs, backend)
    return Call(lambda: device_rows.sample(part, case.logits_RV))


def read(case: Case) -> Call:
    """One read of the logits with torch, without sampling."""
    return Call(lambda: case.logits_RV.amax(1))


def race(p_RV: torch.Tensor) -> torch.Tensor:
    """Sample by an exponential race: the smallest exponential variate divided by the probability wins."""
    return (p_RV / torch.empty_like(p_RV).exponential_()).argmax(1)


def of_torch(case: Case) -> Call | None:
    """Plain torch: topk where that suffices, else sorting; no repetition penalties."""
    if "dry_multiplier" in case.params:
        return None
    params, logits_RV = case.params, case.logits_RV
    counts_RV = counted(case) if case.penalised else None

    def draw() -> torch.Tensor:
        x_RV = logits_RV.float()
        if counts_RV is not None:
            seen_RV, (r, f, a) = counts_RV > 0, (params[name] for name in PENALTIES)
            x_RV = torch.where(seen_RV, torch.where(x_RV > 0, x_RV / r, x_RV * r), x_RV) - f * counts_RV - a * seen_RV
        if params.get("temperature") == 0:
            return x_RV.argmax(1)
        x_RV, ids_RV = x_RV / params.get("temperature", 1.0), None
        if "top_k" in params:
            x_RV, ids_RV = x_RV.topk(params["top_k"])
        elif "top_p" in params:
            x_RV, ids_RV = x_RV.sort(descending=True)
        p_RV = x_RV.softmax(1)
        if "min_p" in params:
            p_RV = torch.where(p_RV < params["min_p"] * p_RV.amax(1, keepdim=True), 0.0, p_RV)
        if "top_p" in params:
            p_RV = torch.where(p_RV.cumsum(1) - p_RV >= params["top_p"] * p_RV.sum(1, keepdim=True), 0.0, p_RV)
        place_R = race(p_RV)
        return place_R if ids_RV is None else ids_RV.gather(1, place_R[:, None])[:, 0]

    return Call(draw)


def counted(case: Case) -> torch.Tensor:
    """The count of each token in the output, dense."""
    output_RS = torch.from_numpy(case.output_RS).to(case.logits_RV.device)
    counts_RV = torch.zeros(case.logits_RV.shape, device=output_RS.device)
    return counts_RV.scatter_add_(1, output_RS, torch.ones(output_RS.shape, device=output_RS.device))


def of_flashinfer(case: Case) -> Call | None:
    """FlashInfer: float32 only, no min-p together with top-p, no penalties."""
    sampling, x_RV, params = import_module("flashinfer.sampling"), case.logits_RV.float(), dict(case.params)
    if case.penalised or params.get("temperature") == 0:
        return None
    t = params.pop("temperature", 1.0)
    match params:
        case {"top_k": k, "top_p": p}:
            return Call(lambda: sampling.top_k_top_p_sampling_from_logits(x_RV / t, k, p))
        case {"top_k": k}:
            return Call(lambda: sampling.top_k_sampling_from_probs(x_RV.softmax(1), k))
        case {"top_p": p}:
            return Call(lambda: sampling.top_p_sampling_from_probs(x_RV.softmax(1), p))
        case {"min_p": m}:
            return Call(lambda: sampling.min_p_sampling_from_probs(x_RV.softmax(1), m))
    return Call(lambda: sampling.sampling_from_logits(x_RV / t))


def of_vllm(case: Case) -> Call | None:
    """vLLM's Triton kernel masks the logits in place; they are restored before each call, untimed."""
    mask = import_module("vllm.v1.sample.ops.topk_topp_triton").apply_top_k_top_p_triton
    params = case.params
    if case.penalised or not {"top_k", "top_p"} & params.keys():
        return None
    rows, source = len(case.logits_RV), case.logits_RV.float() / params.get("temperature", 1.0)
    x_RV, device = source.clone(), source.device
    k = torch.full((rows,), params["top_k"], dtype=torch.int32, device=device) if "top_k" in params else None
    p = torch.full((rows,), params["top_p"], device=device) if "top_p" in params else None
    return Call(lambda: race(mask(x_RV, k, p).softmax(1)), lambda: x_RV.copy_(source))


CONTENDERS: Mapping[str, Callable[[Case], Call | None]] = {
    "nucleate": ours,
    "one read (amax)": read,
    "nucleate, torch": lambda case: ours(case, "torch"),
    "torch": of_torch,
    "FlashInfer": of_flashinfer,
    "vLLM Triton": of_vllm,
}
PACKAGES: Mapping[str, str] = {
    "FlashInfer": "flashinfer.sampling",
    "vLLM Triton": "vllm.v1.sample.ops.topk_topp_triton",
}


def is_missing(name: str) -> bool:
    """Whether the package of a contender is not installed."""
    return find_spec(PACKAGES.get(name, "torch").partition(".")[0]) is None
