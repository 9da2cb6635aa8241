"""Checks of the GPU kernels against the float64 reference: tokens of every chain, near ties, frequencies, graphs.

Each check yields a line with the number of wrong rows, and for the first ones the row, both tokens, and the gap: how
much less likely the sampled token is, in logits, and its probability after truncation (0: truncation was wrong).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_chains
import numpy as np
import torch

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.gpu.torch_device import STEP
from nucleate.sampling.pipeline import to_fused_params

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
import near_tie_rows as near_ties

STEPS, FIRST = 2, 5
"""Steps of each chain; the number of wrong rows that are described."""
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EDGES = 1e-3
"""Of so many rows with penalties the token may be another: edited scores are rounded to float32."""
PATHS = {"greedy": "stats + finish", "temperature": "stats + finish", "min_p .05": "stats + finish"}
"""The kernels that decide a chain; the others may take all five."""
Line = dict[str, Any]


def mixed(case: gpu_chains.Case) -> gpu_chains.Case:
    """Every second row is flatter, so that many tokens survive truncation."""
    scale_R1 = torch.ones(len(case.logits_RV), 1, device=case.logits_RV.device)
    scale_R1[1::2] = 0.25
    return replace(case, logits_RV=(case.logits_RV * scale_R1).to(case.logits_RV.dtype))


def tokens(chain: str, size: int, rows: int, dtype: str, device: str, backend: str = "triton") -> Iterator[Line]:
    """Some steps of a chain."""
    params = gpu_chains.CHAINS[chain]
    case = mixed(gpu_chains.make_case(rows, size, chain, TYPES[dtype], device))
    call, x_RV = gpu_chains.ours(case, backend), case.logits_RV.float().cpu().numpy()
    expected = nc.Sampler(size, "reference")
    for row in range(rows):
        output = case.output_RS[row].tolist() if case.penalised else []
        expected.add(nc.SamplingParams(**params, seed=row), output_ids=output)
    wrong, first = 0, []
    for step in range(STEPS):
        sampled, right = call.run().tolist(), expected(x_RV).token_ids.tolist()
        for row, (a, b) in enumerate(zip(sampled, right, strict=True)):
            if a != b:
                wrong += 1
                if len(first) < FIRST:
                    before = [expected.output_ids(row)[:-1]]
                    one = nc.SamplingParams(**params, seed=row)
                    p_V = nc.probabilities(x_RV[row][None], one, output_ids=before, backend="reference")[0]
                    first.append(different(row, step, a, b, x_RV[row], p_V))
    kernels = PATHS.get(chain, "all five") if backend == "triton" else backend
    most = EDGES * STEPS * rows if case.penalised else 0
    found = {"path": kernels, "check": f"tokens, {chain}, {dtype}, {size}", "wrong": wrong, "of": STEPS * rows}
    yield found | ({"first": first} if first else {}) | ({"allowed": most} if most >= 1 else {})


def different(row: int, step: int, token: int, expected: int, x_V: Any, p_V: Any) -> Line:
    """How far apart two tokens of a row are."""
    found = {"row": row, "step": step, "token": token, "expected": expected}
    if not 0 <= token < len(x_V):
        return found
    gap, p = float(x_V[expected]) - float(x_V[token]), (float(p_V[token]), float(p_V[expected]))
    return found | {"gap": gap, "p": p[0], "p_expected": p[1]}


def mask_and_logprobs(size: int, rows: int, dtype: str, device: str) -> Iterator[Line]:
    """Rows with a bitmask, and the logprob and rank of the token, against the reference."""
    case = mixed(gpu_chains.make_case(rows, size, "all", TYPES[dtype], device))
    x_RV, rng = case.logits_RV.float().cpu().numpy(), np.random.default_rng(size)
    mask_RW = rng.integers(-(2**31), 2**31, (rows, -(-size // 32))).astype(np.int32)
    mask_RW[:, 0] |= 1  # never empty
    results = []
    for sampler, logits in (
        (nc.Sampler(size, "reference"), x_RV),
        (nc.Sampler(size, "triton", device=device), case.logits_RV),
    ):
        for row in range(rows):
            sampler.add(nc.SamplingParams(**gpu_chains.ALL, seed=row, logprobs=0))
        given = mask_RW if isinstance(logits, np.ndarray) else torch.from_numpy(mask_RW).to(device)
        out = sampler(logits, mask=given)
        results.append((out.token_ids.tolist(), out.logprobs))
    (right, expected), (sampled, found) = results
    wrong = [row for row in range(rows) if right[row] != sampled[row] or not close(expected[row], found[row])]
    first = [{"row": r, "token": sampled[r], "expected": right[r], "logprobs": str(found[r])[:200]} for r in wrong]
    line: Line = {
        "path": "mask, report",
        "check": f"mask and logprobs, {dtype}, {size}",
        "wrong": len(wrong),
        "of": rows,
    }
    yield line | ({"first": first[:FIRST]} if first else {})


def close(one: Any, other: Any) -> bool:
    """Whether the logprob of the sampled token is equal to 1e-5, and its rank."""
    return abs(one.chosen.logprob - other.chosen.logprob) < 1e-5 and one.chosen.rank == other.chosen.rank


def frequencies(chain: str, size: int, rows: int, device: str) -> Iterator[Line]:
    """One row with many seeds. The chi-square statistic of some bins exceeds 6 deviations almost never."""
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
    deviations = float((statistic - degrees) / max(1.0, (2 * degrees) ** 0.5))
    wrong = int(deviations > 6 or (p_V[sampled] == 0).any())
    line = {"path": PATHS.get(chain, "all five"), "check": f"frequencies, {chain}, {size}", "wrong": wrong, "of": 1}
    yield line | {"deviations": round(deviations, 2)}


def near_tied(numbers: Sequence[int], device: str) -> Iterator[Line]:
    """Rows with near ties (1e-14 to 1e-5) in sampling or truncation: the reference's token in each."""
    wrong, rows, first = 0, 0, []
    for case in map(near_ties.case, numbers):
        if isinstance(to_fused_params(case.stages), str):
            continue
        device_rows, part = gpu_chains.rows_of([case.stages], [case.seed], len(case.logits), device)
        device_rows._slots.columns[STEP].fill_(case.step)  # noqa: SLF001
        sampled = device_rows.sample(part, torch.from_numpy(case.logits[None]).to(device)).item()
        right, rows = reference.draw(case.logits, case.stages, case.seed, case.step), rows + 1
        if sampled != right:
            wrong += 1
            p_V = np.full(len(case.logits), np.nan)
            first.append(different(rows - 1, case.step, int(sampled), int(right), case.logits, p_V))
    line: Line = {"path": "all five", "check": f"near ties from {numbers[0]}", "wrong": wrong, "of": rows}
    yield line | ({"first": first[:FIRST]} if first else {})


def graphs(size: int, rows: int) -> Iterator[Line]:
    """A captured CUDA graph, replayed: the tokens of the next steps."""
    case = gpu_chains.make_case(rows, size, "all", torch.float32, "cuda")
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
    wrong = sum(a != b for a, b in zip(sampled, expected[1:], strict=True))
    yield {"path": "a captured graph", "check": f"replays, {size}", "wrong": wrong, "of": 5}
