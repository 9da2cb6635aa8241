"""Runs the Triton kernels in Triton's interpreter, in a separate process, as the mode is fixed on import.

A data race (see ``race_detector``) raises an error in the caller.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any, Self

import race_detector as races


class Interpreted:
    """A process that runs kernels in NumPy. ``call`` runs a function of a script by name."""

    def __init__(self, script: str = __file__) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )

    def call(self, name: str, *args: Any) -> Any:
        """The result of the function; raises its exception."""
        pickle.dump((name, args), self._process.stdin)
        self._process.stdin.flush()
        well, result = pickle.load(self._process.stdout)
        if well:
            return result
        raise result

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(300)
        self._process.stdout.close()


def patch_interpreter() -> None:
    """Patch the interpreter for speed: patch the language once per module and kernel, and cache the types of arrays."""
    from triton.runtime import interpreter

    patched, run = set(), interpreter.InterpretedFunction.run

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return run(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__, interpreter.InterpretedFunction.run = called, started
    type_of, known = interpreter._get_np_dtype, {}

    def remembered(kind: Any) -> Any:
        name = "pointer" if kind.scalar.is_ptr() else kind.scalar.name
        if name not in known:
            known[name] = type_of(kind)
        return known[name]

    interpreter._get_np_dtype = remembered


def uniforms(seed: int, step: int, stream: int, count: int) -> tuple[list[float], list[float]]:
    """Uniform and exponential variates of the first ids."""
    import torch
    import triton.language as tl
    from triton import jit

    from nucleate.sampling.gpu.triton.triton_numbers import exponentials, uniform

    @jit
    def fill(seeds, numbers, waits, stream, count: tl.constexpr):
        ids = tl.arange(0, count)
        seed, step = tl.load(seeds), tl.load(seeds + 1)
        tl.store(numbers + ids, uniform(seed, step, stream, ids))
        tl.store(waits + ids, exponentials(seed, step, stream, ids))

    fill.fn.__globals__.update(tl=tl, uniform=uniform, exponentials=exponentials)
    signed = [word - 2**64 * (word >= 2**63) for word in (seed, step)]
    out = torch.zeros(2, count, dtype=torch.float64)
    fill[(1,)](torch.tensor(signed), out[0], out[1], stream, count)
    return out[0].tolist(), out[1].tolist()


def sample(x_RV: Any, numbers: Any, seeds: Any, steps: Any, **more: Any) -> dict[str, Any]:
    """The workspace after a call. more: dtype, stride, mask, rows, cuts, report, out, active."""
    import torch

    from nucleate.sampling.gpu.torch_device import COLUMNS, PROMPT_LENGTH, SEED, STEP
    from nucleate.sampling.gpu.triton import launch
    from nucleate.sampling.gpu.triton.device_memory import RowState

    rows, size = x_RV.shape
    padded = torch.full((rows, size * more.get("stride", 1) + more.get("stride", 1)), torch.nan)
    padded = padded.to(getattr(torch, more.get("dtype", "float32")))
    logits = padded[:, : size * more.get("stride", 1) : more.get("stride", 1)]
    logits.copy_(torch.from_numpy(x_RV))
    work = launch.TritonWorkspace(more.get("rows", rows), size, "cpu")
    for tensor in [*vars(work).values(), *work.sums, *work.pending, *work.scratch]:
        if isinstance(tensor, torch.Tensor):  # old contents must not matter
            tensor.fill_(torch.nan if tensor.is_floating_point() else 99)
    mask = torch.from_numpy(more["mask"]) if "mask" in more else None
    slots_R = torch.arange(len(numbers)).flip(0) + 1
    lines_SC = torch.full((len(numbers) + 2, COLUMNS), 99)
    lines_SC[slots_R, : len(numbers[0])] = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    lines_SC[slots_R, SEED], lines_SC[slots_R, STEP] = torch.from_numpy(seeds), torch.from_numpy(steps)
    lines_SC[slots_R, PROMPT_LENGTH] = slots_R - lines_SC[slots_R, STEP]
    ring_SL = torch.full((len(lines_SC), 7), -5)
    active = torch.from_numpy(more["active"]) if "active" in more else None
    state = RowState(slots_R, lines_SC, ring_SL, 7, active)
    out = torch.full((rows,), 99) if more.get("out") else None
    with Reads(logits) as reads:
        tokens = launch.sample(
            logits, state, work, mask, out_R=out, truncates=more.get("cuts", True), report=more.get("report", True)
        )
    assert tokens.data_ptr() == (work.tokens_R if out is None else out).data_ptr()
    pushed = torch.full_like(ring_SL, -5)
    for slot, token in zip(slots_R.tolist(), tokens.tolist(), strict=True):
        pushed[slot, slot % 7] = token if token >= 0 else -5
    assert torch.equal(ring_SL, pushed)
    found = {"tokens": tokens, "steps": lines_SC[slots_R, STEP], "states": work.status_R, "cuts": work.thresholds_R}
    found |= {"lasts": work.last_ids_R, "logprobs": work.logprobs_R, "ranks": work.ranks_R}
    return {name: column[:rows].numpy().copy() for name, column in found.items()} | {"reads": reads.by_kernel}


class Reads:
    """Counts the reads of a tensor's scores, as a fraction of all scores, by kernel in launch order."""

    def __init__(self, logits: Any) -> None:
        self._first, self._end = logits.data_ptr(), logits.data_ptr() + logits.untyped_storage().nbytes()
        self._scores = logits.numel()
        self.by_kernel: list[tuple[str, float]] = []

    def __enter__(self) -> Self:
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

        self._methods = InterpretedFunction.run, InterpreterBuilder.create_masked_load
        run, load = self._methods

        def started(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.by_kernel.append((kernel.fn.__name__, 0.0))
            return run(kernel, *args, **kwargs)

        def loaded(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            at = pointers.data[mask.data]
            name, count = self.by_kernel[-1]
            here = ((at >= self._first) & (at < self._end)).sum()
            self.by_kernel[-1] = name, count + float(here) / self._scores
            return load(builder, pointers, mask, *rest)

        InterpretedFunction.run, InterpreterBuilder.create_masked_load = started, loaded
        return self

    def __exit__(self, *_: object) -> None:
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

        InterpretedFunction.run, InterpreterBuilder.create_masked_load = self._methods


def serve(functions: Any = globals()) -> None:  # noqa: B008  # the functions of this module
    patch_interpreter()
    watch = races.Watch()
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to stderr
    while True:
        try:
            name, args = pickle.load(source)
        except EOFError:
            return
        try:
            kwargs = args[-1] if args and isinstance(args[-1], dict) else {}
            result = True, functions[name](*args[: len(args) - bool(kwargs)], **kwargs)
            watch.check()
        except Exception as error:  # noqa: BLE001  # raised in the caller
            result = False, error
        pickle.dump(result, target)
        target.flush()


if __name__ == "__main__":
    serve()
