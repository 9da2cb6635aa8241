"""Checks of the kernels where they run: tokens against the reference in float64, draws against their law, drafts.

Each check tells how many rows were wrong. On a GPU they run at full sizes; in Triton's interpreter at small ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gpu_chains
import gpu_past
import numpy as np
import torch

import nucleate as nc
from nucleate.engine import verify as slow
from nucleate.engine.draft.draft import Draft

FULL, SMALL = (32_000, 128_256, 151_936, 256_000), (600,)
STEPS = 2
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHORT = 128_256, 600
"""Sizes at which the second type is checked: each takes kernels of its own, which are compiled first."""
EDGES = 1e-3
"""Of so many rows the token may be another: the masses of groups are float32, and a coin may fall between."""


def mixed(case: gpu_chains.Case) -> gpu_chains.Case:
    """Every second row flatter, so that much is left of it."""
    scale_R1 = torch.ones(len(case.logits_RV), 1, device=case.logits_RV.device)
    scale_R1[1::2] = 0.25
    return replace(case, logits_RV=(case.logits_RV * scale_R1).to(case.logits_RV.dtype))


def tokens(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Every chain: (what, rows that are wrong, rows), some steps of each."""
    for chain, params in gpu_chains.CHAINS.items():
        for name, dtype in list(TYPES.items())[: 1 + (size in SHORT)]:
            case = mixed(gpu_chains.made(rows, size, chain, dtype, device))
            call, x_RV = gpu_chains.ours(case), case.logits_RV.float().cpu().numpy()
            wrong = 0
            for step in range(STEPS):
                found = call.run().tolist()
                for row in range(rows):
                    asked = nc.SamplingParams(**params, seed=row)
                    past: dict[str, Any] = {"output_ids": [case.said_RS[row].tolist()]} if case.penalised else {}
                    [expected] = nc.sample(x_RV[row][None], asked, step=step, backend="reference", **past)
                    wrong += found[row] != expected
            yield f"tokens, {chain}, {name}, {size}", wrong, STEPS * rows


def law(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Draws of one row at many seeds: the chi-square of some bins, hardly ever beyond 6 deviations by chance."""
    from nucleate.backends.cuda.special import launch

    for chain in ("temperature", "top_p .9"):
        case = mixed(gpu_chains.made(2, size, chain, torch.float32, device))
        case = replace(case, logits_RV=case.logits_RV[1:] / 4)  # next to flat
        params = nc.SamplingParams(**gpu_chains.CHAINS[chain])
        p_V = nc.probabilities(case.logits_RV.cpu().numpy(), params, backend="reference")[0]
        numbers_RC = torch.tensor([gpu_chains.numbers_of(gpu_chains.CHAINS[chain])] * rows, dtype=torch.float64)
        seeds_R, steps_R = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        seeds_R += torch.arange(rows, device=device)
        work, x_RV = launch.Workspace(rows, size, device), case.logits_RV.expand(rows, -1)
        found = launch.sample(x_RV, numbers_RC.to(device), seeds_R, steps_R, work).cpu().numpy()
        bins = min(60, rows // 15)
        bins_V = np.minimum((p_V.cumsum() * bins).astype(int), bins - 1)
        expected = np.bincount(bins_V, p_V, bins) * rows
        seen, kept = np.bincount(bins_V[found], minlength=bins), expected > 5
        degrees = kept.sum() - 1
        deviation = (((seen - expected)[kept] ** 2 / expected[kept]).sum() - degrees) / max(1.0, (2 * degrees) ** 0.5)
        yield f"law, {chain}, {size}: {deviation:+.1f} deviations", int(deviation > 6 or (p_V[found] == 0).any()), 1


def drafts(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """Rejection by kernels and by plain tensors against the slow rule; coupled verification by both."""
    from nucleate.backends.cuda import verify
    from nucleate.backends.cuda.special import verify_launch

    numbers, count = torch.Generator().manual_seed(size), 4
    p_RNV = (torch.randn(rows, count + 1, size, generator=numbers) * 2).softmax(2)
    q_RKV = 0.5 * p_RNV[:, :count] + 0.5 * (torch.randn(rows, count, size, generator=numbers) * 2).softmax(2)
    drafted_RK = q_RKV.flatten(0, 1).multinomial(1, generator=numbers).view(rows, count)
    drafted_RK[torch.arange(rows) % 5 == 0, 2] = -1
    given = [one.to(device) for one in (p_RNV, drafted_RK, q_RKV)]
    seeds_R, steps_R = torch.arange(rows, device=device), torch.full((rows,), 7, device=device)
    coins = verify.coins(seeds_R, steps_R, count), verify.last_coin(seeds_R, steps_R)
    plain = verify.rejection(*given, *coins)
    drawn_RN = plain.tokens_RN.clamp(min=0)
    work = verify_launch.Workspace(rows, count, size, device)
    kernels = verify_launch.rejection(*given, seeds_R, steps_R, work).tokens_RN.clone()
    expected = np.full((rows, count + 1), -1)
    for row in range(rows):
        ahead = int((drafted_RK[row] >= 0).to(torch.int64).cumprod(0).sum())
        draft = Draft(tuple(drafted_RK[row, :ahead].tolist()), laws=tuple(q_RKV[row, :ahead].numpy()))
        coins_K, coin = slow.coins(row, 7, count), slow.last_coin(row, 7)
        said = slow.rejection(p_RNV[row].numpy(), draft, coins_K, coin).tokens(draft)
        expected[row, : len(said)] = said
    for name, found in (("kernels", kernels), ("tensors", plain.tokens_RN)):
        yield f"rejection, {name}, {size}", int((found.cpu().numpy() != expected).any(1).sum()), rows
    same = verify.coupled(given[1], drawn_RN)
    other = verify_launch.coupled(given[1], drawn_RN, steps_R, work)
    yield f"coupled, {size}", sum(int((a != b).any()) for a, b in zip(same, other, strict=True)), 1


def graphs(size: int, rows: int, device: str) -> Iterator[tuple[str, int, int]]:
    """A captured call, replayed: the tokens of the next steps."""
    if device != "cuda":
        return
    case = gpu_chains.made(rows, size, "all", torch.float32, device)
    plain, replayed = gpu_chains.ours(case), gpu_chains.ours(case)
    expected = [plain.run().tolist() for _ in range(6)]
    replayed.run()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_R = replayed.run()
    found = []
    for _ in range(5):
        graph.replay()
        found.append(tokens_R.tolist())
    yield f"a captured graph, {size}", sum(a != b for a, b in zip(found, expected[1:], strict=True)), 5


def run(device: str) -> bool:
    """All of them; whether nothing is wrong."""
    full = device == "cuda"
    well = True
    for size in FULL if full else SMALL:
        checks = (tokens(size, 8 if full else 2, device), law(size, 20_000 if full else 60, device))
        more = gpu_past.check(size, 64 if full else 3, device), graphs(size, 16, device)
        for check in (*checks, drafts(size, 64 if full else 5, device), *more):
            for what, wrong, rows in check:
                good = wrong <= EDGES * rows
                well = well and good
                print(f"{'ok' if good else 'WRONG':6}{what}{f': {wrong} of {rows}' if wrong else ''}", flush=True)
    return well
