"""Runs the Triton kernels in Triton's interpreter, in a process of its own: it decides on import how kernels run.

A kernel that would race on a GPU is an error of whoever asked, see ``races``.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import races


class Interpreted:
    """A process that runs kernels in NumPy. ``call`` a function of a script, such as those below, by its name."""

    def __init__(self, script: str = __file__) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        )

    def call(self, name: str, *given: Any) -> Any:
        """What the function says; raises what it raises."""
        pickle.dump((name, given), self._process.stdin)
        self._process.stdin.flush()
        well, answer = pickle.load(self._process.stdout)
        if well:
            return answer
        raise answer

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def hasten() -> None:
    """The interpreter patches the language for each call of a function; once for each module and kernel is enough."""
    from triton.runtime import interpreter

    patched, run = set(), interpreter.InterpretedFunction.run

    def called(self: Any, *given: Any, **named: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    def started(self: Any, *given: Any, **named: Any) -> Any:
        patched.clear()
        return run(self, *given, **named)

    interpreter.InterpretedFunction.__call__, interpreter.InterpretedFunction.run = called, started


def uniforms(seed: int, step: int, stream: int, count: int) -> tuple[list[float], list[float]]:
    """(uniform numbers, exponential ones) of the first ids."""
    import torch
    import triton.language as tl

    from nucleate.backends.cuda.special.compile import jit
    from nucleate.backends.cuda.special.noise import times, uniform

    @jit
    def fill(seeds, numbers, waits, stream, count: tl.constexpr):
        ids = tl.arange(0, count)
        seed, step = tl.load(seeds), tl.load(seeds + 1)
        tl.store(numbers + ids, uniform(seed, step, stream, ids))
        tl.store(waits + ids, times(seed, step, stream, ids))

    fill.fn.__globals__.update(tl=tl, uniform=uniform, times=times)
    signed = [word - 2**64 * (word >= 2**63) for word in (seed, step)]
    out = torch.zeros(2, count, dtype=torch.float64)
    fill[(1,)](torch.tensor(signed), out[0], out[1], stream, count)
    return out[0].tolist(), out[1].tolist()


def sample(x_RV: Any, numbers: Any, seeds: Any, steps: Any, **more: Any) -> dict[str, Any]:
    """What the two kernels leave in their workspace. more: dtype, stride, edits (arrays), mask, rows."""
    import torch

    from nucleate.backends.cuda.edits import Edits
    from nucleate.backends.cuda.special import launch
    from nucleate.backends.cuda.special.index import indexed

    rows, size = x_RV.shape
    lying = torch.full((rows, size * more.get("stride", 1) + more.get("stride", 1)), torch.nan)
    lying = lying.to(getattr(torch, more.get("dtype", "float32")))
    logits = lying[:, : size * more.get("stride", 1) : more.get("stride", 1)]
    logits.copy_(torch.from_numpy(x_RV))
    work = launch.Workspace(more.get("rows", rows), size, "cpu")
    for tensor in (work.masses, work.some, work.moments, work.tops, work.raw_tops):
        tensor.fill_(torch.nan)  # what an earlier call left there is of no account
    index = indexed(Edits(*map(torch.from_numpy, more["edits"])), size) if "edits" in more else None
    mask = torch.from_numpy(more["mask"]) if "mask" in more else None
    steps = torch.from_numpy(steps).clone()
    tokens = launch.sample(
        logits, torch.tensor(numbers, dtype=torch.float64), torch.from_numpy(seeds), steps, work, index, mask
    )
    found = {"tokens": tokens, "steps": steps, "states": work.states_R, "cuts": work.cuts_R, "lasts": work.lasts_R}
    found |= {"logprobs": work.logprobs_R, "ranks": work.ranks_R}
    return {name: column[:rows].numpy().copy() for name, column in found.items()}


def rejection(p_RNV: Any, drafted_RK: Any, q_RKV: Any, seeds: Any, steps: Any, **more: Any) -> list[Any]:
    """What the kernels of verification find. more: dtype, stride, stops, sums (arrays), rows, count, size."""
    import torch

    from nucleate.backends.cuda.special import verify_launch

    def lying(laws: Any) -> torch.Tensor | None:
        if laws is None:
            return None
        stride = more.get("stride", 1)
        room = torch.full((*laws.shape[:2], (laws.shape[2] + 1) * stride), torch.nan)
        room = room.to(getattr(torch, more.get("dtype", "float32")))
        return room[..., : laws.shape[2] * stride : stride].copy_(torch.from_numpy(laws))

    given = (None if more.get(name) is None else torch.from_numpy(more[name]) for name in ("stops", "sums"))
    rows, count = drafted_RK.shape
    room = (more.get("rows", rows), more.get("count", count), more.get("size", p_RNV.shape[2]))
    work = verify_launch.Workspace(*room, "cpu")
    for tensor in (work.sums, work.totals, work.scales):
        tensor.fill_(torch.nan)  # what an earlier call left there is of no account
    for tensor in (*work.found, work.todo_R):
        tensor.fill_(99)
    seeds, steps = torch.from_numpy(seeds), torch.from_numpy(steps.copy())
    laws = lying(p_RNV), torch.from_numpy(drafted_RK), lying(q_RKV)
    found = verify_launch.rejection(*laws, seeds, steps, work, *given)
    return [column.numpy().copy() for column in (*found, steps)]


def coupled(drafted_RK: Any, drawn_RN: Any, steps: Any, **more: Any) -> list[Any]:
    """What the kernel of coupled verification finds, and the steps of rows and of places. more: stops, rows, count."""
    import torch

    from nucleate.backends.cuda.special import verify_launch

    rows, count = drafted_RK.shape
    work = verify_launch.Workspace(more.get("rows", rows), more.get("count", count), 9, "cpu")
    for tensor in work.found:
        tensor.fill_(99)
    stops = None if more.get("stops") is None else torch.from_numpy(more["stops"])
    steps, place_steps = torch.from_numpy(steps.copy()), torch.full(drawn_RN.shape, 99)
    drafted, drawn = torch.from_numpy(drafted_RK), torch.from_numpy(drawn_RN)
    found = verify_launch.coupled(drafted, drawn, steps, work, stops, place_steps)
    return [column.numpy().copy() for column in (*found, steps, place_steps)]


def rounds(table_VV: Any, guess_V: Any, first: Any, numbers: Any, seeds: Any, count: int, times: int) -> list[Any]:
    """What rows say, [R, count + 1] a round, of a model that looks at the last token: drawn and verified by kernels."""
    import torch

    from nucleate.backends.cuda.special import launch, verify_launch

    table_VV, guess_V, last_R, seeds_R = (torch.from_numpy(x) for x in (table_VV, guess_V, first, seeds))
    rows, size = len(last_R), len(guess_V)
    drawing = launch.Workspace(rows * (count + 1), size, "cpu")
    verifying = verify_launch.Workspace(rows, count, size, "cpu")
    numbers_RC = torch.tensor(numbers, dtype=torch.float64).repeat_interleave(count + 1, 0)
    seeds_M, steps_R = seeds_R.repeat_interleave(count + 1), torch.zeros_like(seeds_R)
    steps_RN = torch.arange(count + 1).repeat(rows, 1)
    said = []
    for _ in range(times):
        path = [last_R]
        for _ in range(count):
            path.append(guess_V[path[-1]])
        path_RN = torch.stack(path, 1)
        logits = table_VV[path_RN].flatten(0, 1)
        drawn_RN = launch.sample(logits, numbers_RC, seeds_M, steps_RN.flatten(), drawing).view(rows, count + 1)
        drafted_RK = path_RN[:, 1:].contiguous()
        found = verify_launch.coupled(drafted_RK, drawn_RN, steps_R, verifying, None, steps_RN)
        last_R = found.last_R.clone()
        said.append(found.tokens_RN.numpy().copy())
    return said


def serve(functions: Any = globals()) -> None:  # noqa: B008  # these here
    hasten()
    watch = races.Watch()
    source, target = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed goes elsewhere
    while True:
        try:
            name, given = pickle.load(source)
        except EOFError:
            return
        try:
            named = given[-1] if given and isinstance(given[-1], dict) else {}
            answer = True, functions[name](*given[: len(given) - bool(named)], **named)
            watch.check()
        except Exception as error:  # noqa: BLE001  # told to whoever asked
            answer = False, error
        pickle.dump(answer, target)
        target.flush()


if __name__ == "__main__":
    serve()
