"""The other samplers in the benchmarks. Each runs the stages of a pipeline as its users would, or reports no support.

A contender is built from the logits, the stages in order, and the output so far of every row. It is a callable that
samples one token per row. Nothing is built or installed here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import nucleate as nc
from nucleate.cli.bench import CHAINS, Call, history, logits, medians, sampler_call
from nucleate.sampling.stage import Pipeline, Stage
from nucleate.sampling.stages import Frequency, Gumbel, MinP, Repetition, Temperature, TopK, TopNSigma, TopP, Typical

Maker = Callable[[NDArray[np.float32], Pipeline, Sequence[int]], Call | None]


def by_torch(x_BV: NDArray[np.float32], stages: Pipeline, before: Sequence[int]) -> Call | None:
    """Handwritten torch: topk or sort, softmax, cumsum, multinomial."""
    import torch

    known = (Repetition, Frequency, Temperature, TopK, MinP, TopP, TopNSigma, Gumbel)
    if not all(isinstance(stage, known) for stage in stages):
        return None
    rows = torch.from_numpy(x_BV)
    if stages[0] == Temperature(0):
        return lambda: rows.argmax(-1)
    history_RS = torch.tensor(before, dtype=torch.long).repeat(len(rows), 1)

    def run() -> object:
        x, ids = rows, None
        for stage in stages[:-1]:
            if isinstance(stage, TopK):
                x, ids = x.topk(stage.k)
            elif isinstance(stage, TopP) and ids is None:
                x, ids = x.sort(descending=True)
            x = apply_stage(x, stage, history_RS)
        drawn = x.softmax(-1).multinomial(1)
        return drawn if ids is None else ids.gather(-1, drawn)

    return run


def apply_stage(x: Any, stage: Stage, history_RS: Any) -> Any:
    """A stage over torch logits [rows, V or fewer]; for top-p, in descending order."""
    import torch

    match stage:
        case Repetition(r):
            old = x.gather(1, history_RS)
            x = x.scatter(1, history_RS, torch.where(old > 0, old / r, old * r))
        case Frequency(f):
            x = x.scatter_add(1, history_RS, torch.full(history_RS.shape, -f))
        case Temperature(t):
            x = x / t
        case TopNSigma(n):
            x = x.masked_fill(x < x.amax(-1, keepdim=True) - n * x.std(-1, correction=0, keepdim=True), -np.inf)
        case MinP(m):
            p = x.softmax(-1)
            x = x.masked_fill(p < m * p.amax(-1, keepdim=True), -np.inf)
        case TopP(p):
            chances = x.softmax(-1)
            x = x.masked_fill(chances.cumsum(-1) - chances >= p, -np.inf)
    return x


def by_transformers(x_BV: NDArray[np.float32], stages: Pipeline, before: Sequence[int]) -> Call | None:
    """The logits processors of Transformers as in ``generate``, and its sampling. Greedy is torch's argmax."""
    import torch
    import transformers as hf

    kinds: dict[type, Callable[[Any], Any]] = {
        Repetition: lambda stage: hf.RepetitionPenaltyLogitsProcessor(stage.r),
        Temperature: lambda stage: hf.TemperatureLogitsWarper(stage.t),
        TopK: lambda stage: hf.TopKLogitsWarper(stage.k),
        TopP: lambda stage: hf.TopPLogitsWarper(stage.p),
        MinP: lambda stage: hf.MinPLogitsWarper(stage.m),
        Typical: lambda stage: hf.TypicalLogitsWarper(stage.p),
    }
    if stages[0] == Temperature(0) or not all(type(stage) in kinds for stage in stages[:-1]):
        return None
    rows = torch.from_numpy(x_BV)
    processors = hf.LogitsProcessorList(kinds[type(stage)](stage) for stage in stages[:-1])
    ids = torch.tensor(before or [0], dtype=torch.long).repeat(len(rows), 1)
    return lambda: torch.multinomial(processors(ids, rows).softmax(-1), 1)


def by_llama_cpp(x_BV: NDArray[np.float32], stages: Pipeline, before: Sequence[int]) -> Call | None:
    """The sampler chain of llama.cpp: for each row, fill the array of candidates, apply, accept."""
    import llama_chain

    return llama_chain.contender(x_BV, stages, before)


PEERS: dict[str, tuple[Maker, str, str]] = {
    "llama.cpp": (by_llama_cpp, "llama_chain", "llama-cpp-python"),
    "torch": (by_torch, "torch", "torch"),
    "Transformers": (by_transformers, "transformers", "transformers"),
}
"""Each contender: its factory, its module, its package."""


def present() -> tuple[dict[str, Maker], list[str]]:
    """The contenders that can be imported, on one thread and without logging; the packages of the others."""
    makers, missing = {}, []
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name, (maker, module, package) in PEERS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(package)
        else:
            makers[name] = maker
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
    return makers, missing


def check(makers: dict[str, Maker]) -> None:
    """Check that every contender runs the same pipelines: its tokens must have a nonzero probability.

    Raises RuntimeError for a token of probability 0. Peaked logits have no ties, which contenders treat differently.
    """
    x_BV = logits("peaked", 16, 8192)
    for processors, params in CHAINS.items():
        sampling_params, before = nc.SamplingParams(seed=1, **params), history(params, x_BV.shape[1])
        chances = [nc.probabilities(x_V[None], sampling_params, output_ids=[before])[0] for x_V in x_BV]
        contenders = {name: make(x_BV, sampling_params.build_pipeline(), before) for name, make in makers.items()}
        for name, call in {"nucleate": sampler_call(x_BV, params), **contenders}.items():
            if call is not None:
                tokens = np.asarray(call()).reshape(-1)
                if not all(p[token] > 0 for p, token in zip(chances, tokens, strict=True)):
                    raise RuntimeError(f"{name} does not run the chain {processors}: it drew what has no chance")


def fills(sizes: Sequence[int]) -> dict[str, float]:
    """Microseconds per row to fill llama.cpp's candidate array, by vocabulary size."""
    import llama_chain

    return {str(size): medians({"fill": llama_chain.filling(logits("peaked", 1, size))}, 0.2)["fill"] for size in sizes}
