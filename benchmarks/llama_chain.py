"""llama.cpp's sampler chain through the low-level interface of llama-cpp-python: its C functions and nothing else."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from nucleate.cli.bench import Call, recreate_every
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.stages import (
    Frequency,
    Gumbel,
    MinP,
    Mirostat,
    Repetition,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

LOOP = """
#include <stdint.h>

struct candidate { int32_t id; float logit; float p; };

void fill(struct candidate *all, const float *x, int32_t size) {
    for (int32_t token = 0; token < size; token++) all[token] = (struct candidate){token, x[token], 0.0f};
}
"""
"""Every program has to fill the candidate array before it can sample. NumPy's strided copies, which Python programs
use, take 1.5 times as long; Numba's loop, with AVX-512, half as long."""


def compiled() -> Callable[[int, int, int], None]:
    """Compile the loop with the system's C compiler. Raises ImportError without one."""
    if (compiler := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")) is None:
        raise ImportError("needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fill.so"
        options = ["-O3", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run([compiler, *options], input=LOOP, text=True, check=True)  # noqa: S603  # found by which
        fill = ctypes.CDLL(str(library)).fill
    fill.argtypes, fill.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32), None
    return fill


fill = compiled()


Handle = int | None
"""A pointer to a llama.cpp sampler."""


class Chain:
    """The samplers of one row, with their state, and its candidate array."""

    def __init__(self, samplers: list[Handle], candidates: NDArray[np.void], before: Sequence[int]) -> None:
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        weakref.finalize(self, llama_cpp.llama_sampler_free, self.chain)
        for sampler in samplers:
            llama_cpp.llama_sampler_chain_add(self.chain, sampler)
        for token in before:
            llama_cpp.llama_sampler_accept(self.chain, token)
        self.candidates, self.start, self.size = candidates, candidates.ctypes.data, len(candidates)
        data = candidates.ctypes.data_as(llama_cpp.llama_token_data_p)
        self.array = llama_cpp.llama_token_data_array(data, len(candidates), -1, False)
        self.pointer = ctypes.byref(self.array)

    def draw(self, scores: int) -> int:
        """The next token. scores: the address of the logits."""
        array = self.array
        fill(self.start, scores, self.size)
        array.size, array.selected, array.sorted = self.size, -1, False
        llama_cpp.llama_sampler_apply(self.chain, self.pointer)
        token = array.data[array.selected].id
        llama_cpp.llama_sampler_accept(self.chain, token)
        return token


MADE: dict[type, Callable[[Any, int], Handle]] = {
    Temperature: lambda stage, _: llama_cpp.llama_sampler_init_temp(stage.t),
    TopNSigma: lambda stage, _: llama_cpp.llama_sampler_init_top_n_sigma(stage.n),
    TopK: lambda stage, _: llama_cpp.llama_sampler_init_top_k(stage.k),
    Typical: lambda stage, _: llama_cpp.llama_sampler_init_typical(stage.p, 1),
    TopP: lambda stage, _: llama_cpp.llama_sampler_init_top_p(stage.p, 1),
    MinP: lambda stage, _: llama_cpp.llama_sampler_init_min_p(stage.m, 1),
    Mirostat: lambda stage, seed: llama_cpp.llama_sampler_init_mirostat_v2(seed, stage.tau, stage.eta),
    Gumbel: lambda _, seed: llama_cpp.llama_sampler_init_dist(seed),
}


def samplers_of(stages: Pipeline, size: int, seed: int) -> list[Handle]:
    """The equivalent llama.cpp samplers, in order."""
    if stages[0] == Temperature(0):
        return [llama_cpp.llama_sampler_init_greedy()]
    found, rest = [], stages
    if penalties := {stage.name: stage for stage in stages if isinstance(stage, Repetition | Frequency)}:
        repetition, frequency = penalties.get("repetition", Repetition()), penalties.get("frequency", Frequency())
        last_n, rest = stages[0].last_n, stages[len(penalties) :]  # one sampler for all penalties
        found.append(llama_cpp.llama_sampler_init_penalties(size, last_n, repetition.r, frequency.f, 0.0))
    if isinstance(rest[-2], Mirostat):
        rest = rest[:-1]  # it also samples
    return [*found, *(MADE[type(stage)](stage, seed) for stage in rest)]


def contender(x_BV: NDArray[np.float32], stages: Pipeline, before: Sequence[int]) -> Call | None:
    """A callable that samples the rows one after another: llama.cpp has no batched call."""
    rows, size = x_BV.shape
    candidates = np.zeros(size, CANDIDATE)
    if not all(type(stage) in (*MADE, Repetition, Frequency) for stage in stages):
        return None

    def make() -> Call:
        chains = [Chain(samplers_of(stages, size, row), candidates, before) for row in range(rows)]

        def draw() -> list[int]:
            start, step = x_BV.ctypes.data, x_BV.strides[0]
            return [chain.draw(start + row * step) for row, chain in enumerate(chains)]

        return draw

    return recreate_every(make) if before else make()


def filling(x_BV: NDArray[np.float32]) -> Call:
    """A callable that only fills the candidate array of the first row."""
    candidates = np.zeros(x_BV.shape[1], CANDIDATE)
    return lambda: fill(candidates.ctypes.data, x_BV.ctypes.data, x_BV.shape[1])
