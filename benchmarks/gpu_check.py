"""Checks of the GPU kernels: tokens against the float64 reference, including near ties, and sampled frequencies.

Each check returns the number of wrong rows. It runs at full sizes on a GPU, and at small sizes in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gpu_chains
import numpy as np
import torch

import nucleate as nc
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.torch.slots import STEP
from nucleate.sampling.dispatch.fused_pipeline import to_fused_params

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import near_tie_rows as near_ties

FULL, SMALL, FLAT = (32_000, 128_256, 151_936, 256_000), (600,), 4000
"""Vocabulary sizes on a GPU and in the interpreter."""
STEPS = 2
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHORT = 128_256, 600
"""Sizes for the second dtype, fewer because each compiles new kernels."""
EDGES = 1e-3
"""Of so many rows with penalties the token may be another: edited scores are rounded to float32."""


def mixed(case: gpu_chains.Case) -> gpu_chains.Case:
    """Every second row is flatter, so that many tokens survive truncation."""
    scale_R1 = torch.ones(len(case.logits_RV), 1, device=case.logits_RV.device)
    scale_R1[1::2] = 0.25
    return replace(case, logits_RV=(case.logits_RV * scale_R1).to(case.logits_RV.dtype))


def tokens(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Check some steps of every pipeline. Yields (name, wrong rows, rows)."""
    for chain, params in gpu_chains.CHAINS.items():
        if size == FLAT and not chain.startswith("flat"):
            continue
        for name, dtype in list(TYPES.items())[: 1 + (size in SHORT)]:
            case = mixed(gpu_chains.make_case(rows, size, chain, dtype, device))
            call, x_RV = gpu_chains.ours(case), case.logits_RV.float().cpu().numpy()
            expected, wrong = nc.Sampler(size, "reference"), 0
            for row in range(rows):
                output = case.output_RS[row].tolist() if case.penalised else []
                expected.add(nc.SamplingParams(**params, seed=row), output_ids=output)
            for _ in range(STEPS):
                sampled = call.run().tolist()
                wrong += sum(a != b for a, b in zip(sampled, expected(x_RV).token_ids.tolist(), strict=True))
            yield f"tokens, {chain}, {name}, {size}", wrong, STEPS * rows


def frequencies(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Sample one row with many seeds. The chi-square statistic of some bins exceeds 6 deviations almost never."""
    for chain in ("temperature", "top_p .9"):
        case = mixed(gpu_chains.make_case(2, size, chain, torch.float32, device))
        case = replace(case, logits_RV=case.logits_RV[1:] / 4)  # almost flat
        params = nc.SamplingParams(**gpu_chains.CHAINS[chain], seed=0)
        p_V = nc.probabilities(case.logits_RV.cpu().numpy(), params, backend="reference")[0]
        device_rows, part = gpu_chains.rows_of([params.build_pipeline()] * rows, range(rows), size, device)
        sampled = device_rows.sample(part, case.logits_RV.expand(rows, -1)).cpu().numpy()
        bins = min(60, rows // 15)
        bins_V = np.minimum((p_V.cumsum() * bins).astype(int), bins - 1)
        expected = np.bincount(bins_V, p_V, bins) * rows
        counts, large = np.bincount(bins_V[sampled], minlength=bins), expected > 5
        degrees = large.sum() - 1
        statistic = ((counts - expected)[large] ** 2 / expected[large]).sum()
        deviation = (statistic - degrees) / max(1.0, (2 * degrees) ** 0.5)
        wrong = int(deviation > 6 or (p_V[sampled] == 0).any())
        yield f"frequencies, {chain}, {size}: {deviation:+.1f} deviations", wrong, 1


def near_tied(count: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Rows with near ties (1e-14 to 1e-5) in sampling or truncation. Expects the reference's token in each row."""
    wrong = rows = 0
    for case in map(near_ties.case, range(count)):
        if isinstance(to_fused_params(case.stages), str):
            continue
        device_rows, part = gpu_chains.rows_of([case.stages], [case.seed], len(case.logits), device)
        device_rows._slots.columns[STEP].fill_(case.step)  # noqa: SLF001
        sampled = device_rows.sample(part, torch.from_numpy(case.logits[None]).to(device)).item()
        wrong += sampled != reference.draw(case.logits, case.stages, case.seed, case.step)
        rows += 1
    yield "near ties", wrong, rows


def graphs(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Replay a captured CUDA graph. Expects the tokens of the next steps."""
    if device != "cuda":
        return
    case = gpu_chains.make_case(rows, size, "all", torch.float32, device)
    plain, replayed = gpu_chains.ours(case), gpu_chains.ours(case)
    expected = [plain.run().tolist() for _ in range(6)]
    replayed.run()  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_R = replayed.run()
    sampled = []
    for _ in range(5):
        graph.replay()
        sampled.append(tokens_R.tolist())
    yield f"a captured graph, {size}", sum(a != b for a, b in zip(sampled, expected[1:], strict=True)), 5


def run(device: str) -> bool:
    """Run all checks. Returns whether all passed."""
    full = device == "cuda"
    well = True
    checks: list[Iterator[tuple[str, int, int]]] = [near_tied(2000 if full else 30, device)]
    checks += [] if full else [tokens(FLAT, 2, device)]
    for size in FULL if full else SMALL:
        checks += [tokens(size, 8 if full else 2, device), frequencies(size, 20_000 if full else 60, device)]
        checks += [graphs(size, 16, device)]
    for what, wrong, rows in itertools.chain.from_iterable(checks):
        good = wrong <= (EDGES * rows if "penalties" in what else 0)
        well = well and good
        print(f"{'ok' if good else 'WRONG':6}{what}{f': {wrong} of {rows}' if wrong else ''}", flush=True)
    return well
