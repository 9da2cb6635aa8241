"""Random rows and parameters for the fused kernel, and rounding edges: differences explained by the last digits.

The survivors are the first tokens in rank order, so their number identifies them. A number is at an edge if a threshold
changed by the relative amount ``NEAR`` gives it; a token is, if its key in the reference's race is within ``NEAR`` of
the highest.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray

from nucleate.jit.compiler import jit
from nucleate.sampling import noise, reference
from nucleate.sampling.cpu.block_ops import FLOAT32, GROUP_SIZE, floats_at
from nucleate.sampling.cpu.cutoffs import TIED, UNLISTED, argmax, truncate
from nucleate.sampling.cpu.fused_kernel import load_row
from nucleate.sampling.cpu.fused_runner import workspace_size
from nucleate.sampling.cpu.workspace import UNCERTAIN_COUNT, edited_group_address, workspace_in
from nucleate.sampling.maths import SLACK
from nucleate.sampling.pipeline import FusedParams, simplify, to_fused_pipeline
from nucleate.sampling.stages import Gumbel, MinP, Temperature, TopK, TopNSigma, TopP

NEAR = 3e-7
"""Group weights are float32, and exp is accurate to 8e-8: three units in the last place."""
SHARP = 1e-12
"""Tolerance of float64 computations."""

SMALL = (1, 2, 31, 255, 256, 257, 1000)
LARGE = (32_000, 128_256, 151_936)
KINDS = (
    *("smooth", "peaked", "flat", "equal", "grid", "holes", "one", "island", "huge", "tiny", "wide", "shifted"),
    *("zeros", "doubled", "outliers", "steps"),
)


def row(numbers: np.random.Generator, size: int, kind: str) -> np.ndarray:
    """Logits of some kind, float32 [V]."""
    x = numbers.normal(size=size) * numbers.choice([0.1, 1.0, 3.0, 10.0])
    some = numbers.integers(size, size=4)
    match kind:
        case "peaked":
            x[some] += 10.0 * numbers.random(4)
        case "flat":
            x *= 1e-4
        case "equal":
            x[:] = x[0]
        case "grid":
            x = np.round(x * 4) / 4
        case "holes":
            x[numbers.random(size) < numbers.choice([0.1, 0.5, 0.99])] = -np.inf
            x[some[0]] = 1.0
        case "one":
            x[:] = -np.inf
            x[some[0]] = numbers.choice([0.0, -3e38, 3e38, 1.5])
        case "island":  # as with a grammar mask
            inside = x[some[0] : some[0] + 30].copy()
            x[:] = -np.inf
            x[some[0] : some[0] + 30] = inside
        case "huge":
            x *= 1e30
        case "tiny":
            x *= 10.0 ** -numbers.integers(20, 45)
        case "wide":
            x = numbers.uniform(-3.4e38, 3.4e38, size=size)
        case "shifted":
            x += numbers.choice([-1.0, 1.0]) * 10.0 ** numbers.integers(2, 6)
        case "zeros":
            x = np.where(numbers.random(size) < 0.5, 0.0, -0.0)
        case "doubled":  # repeated scores, so that thresholds fall among equal ones
            x = x[numbers.integers(max(1, size // int(numbers.choice([2, 7, 300]))), size=size)]
        case "outliers":  # a heavy tail: a few scores, and very many that are far away
            x = x - 15.0 * (numbers.random(size) < 0.99)
        case "steps":  # bfloat16 values
            x = (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.asarray(x, np.float32)


def numbers_for(numbers: np.random.Generator, x: np.ndarray) -> tuple[FusedParams, bool]:
    """Parameters of a pipeline, and whether they are at an edge by design:

    a threshold within the last digits of a token's score, or a top-p so near 1 that the tokens at its threshold weigh
    little more than the last digit.
    """

    def one(*values: float) -> float:
        return float(numbers.choice(values))

    size, u = len(x), numbers.random()
    found = FusedParams(
        t=one(1, 1, 0.7, 0.8, 1.5, 0.01, 5, 1e-4, 1e4, 0, 10.0 ** numbers.uniform(-3, 2)),
        sigmas=one(0, 0, 0, 0, 1, 0.1, 3, 5 * u, 1e-9, 1e9),
        k=int(one(0, 0, 0, 1, 2, 5, 40, 300, 1000, 3000, max(2, size - 1), size, size + 1, 1 + int(u * size))),
        m=one(0, 0, 0, 0.05, 0.3, 1e-4, 1, u, 10.0 ** -(40 * u), 5e-324),
        p=one(1, 1, 1, 0.9, 0.5, 0.99, 0.1, 1e-9, 1 - 1e-9, 1 - 1e-7, 0.999999, 1 - u, 1 - u / 1000, 0.5, 0.25),
    )
    if numbers.random() < 0.2:  # min-p and temperature last, as in other engines
        late_t = one(1, 0.7, 1.5, 1e-4, 1e4, 10.0 ** numbers.uniform(-3, 2))
        found = found._replace(late_m=one(0, 0.05, 0.3, u), late_t=late_t)
    if numbers.random() < 0.25:
        return on_a_token(numbers, x, found), True
    return found, 1 - 1e-5 < found.p < 1


def on_a_token(numbers: np.random.Generator, x: np.ndarray, found: FusedParams) -> FusedParams:
    """The same with the threshold of min-p or top-p within some units of the last place of a token."""
    survivors = np.sort(x[x > -np.inf].astype(np.float64))[::-1]
    d = (survivors - survivors[0]) / (found.t or 1.0)
    token_rank = numbers.integers(len(d))
    by = numbers.choice([0.0, 1e-15, -1e-15, 1e-10, -1e-10, 1e-6, -1e-6, 3e-6, -3e-6])
    mass = np.cumsum(np.exp(d))
    if numbers.random() < 0.5:
        m = math.exp(max(d[token_rank] * (1 + by) + numbers.choice([0.0, SLACK]), -700.0))
        return found._replace(m=float(min(m, 1.0)))
    p = mass[token_rank] / mass[-1] / (1 - numbers.choice([0.0, SLACK])) * (1 + by)
    return found._replace(sigmas=0.0, k=0, m=0.0, p=float(min(max(p, 1e-12), 1.0)))


def pipeline(numbers: FusedParams, seed: int = 0, num_before: int = 0) -> tuple[object, ...]:
    """The stages of a pipeline. num_before: the number of truncations before the temperature, 0 to 2."""
    t, sigmas, k, m, p, late_m, late_t = numbers
    first, then = (TopNSigma(sigmas), TopK(k)), (MinP(m), TopP(p), MinP(late_m), Temperature(late_t), Gumbel(seed))
    return (*first[:num_before], Temperature(t), *first[num_before:], *then)


def lengths(x: np.ndarray, numbers: FusedParams, num_before: int = 0) -> dict[str, tuple[int, int]]:
    """The minimum and maximum number of survivors if a threshold changes by its tolerance, by kind of threshold."""
    t, sigmas, k, m, p, late_m, _ = numbers
    below = np.sort(x[x > -np.inf].astype(np.float64))[::-1]
    with np.errstate(all="ignore"):
        below = (below - below[0]) / t
    below = below[below > -np.inf]
    spread = math.sqrt(np.var(below)) if sigmas else 0.0
    slack = SLACK / t if num_before else SLACK

    def survivors(sigma_off: float, m_off: float, p_off: float) -> int:
        n = len(below)
        if sigmas:
            n = min(n, max(1, int((below >= (-sigmas * spread) * (1 + sigma_off) - slack).sum())))
        if k:
            n = min(n, k)
        if m:
            n = min(n, max(1, int((below >= (math.log(m) - SLACK) * (1 + m_off)).sum())))
        if p < 1:
            mass = np.cumsum(np.exp(below[:n]))
            n = min(n, 1 + int((mass[: n - 1] < p * mass[-1] * (1 - SLACK) * (1 + p_off)).sum()))
        if late_m:
            n = min(n, max(1, int((below >= (math.log(late_m) - SLACK) * (1 + m_off)).sum())))
        return n

    found = {}
    for name, off in {"min-p": (0, SHARP, 0), "top-n-sigma": (SHARP, 0, 0), "top-p": (0, 0, NEAR)}.items():
        both = [survivors(*(sign * one for one in off)) for sign in (-1, 1)]
        if both[0] != both[1]:
            found[name] = (min(both), max(both))
    corners = [survivors(*off) for off in itertools.product((-SHARP, SHARP), (-SHARP, SHARP), (-NEAR, NEAR))]
    found["several"] = (min(corners), max(corners))
    return found


def edge_of_a_set(x: np.ndarray, numbers: FusedParams, order: list[int], got: list[int], num_before: int = 0) -> str:
    """The kind of edge that explains survivors other than the reference's, or "". order: all ids in rank order."""
    if not got or sorted(order[: len(got)]) != got or numbers.t == 0 or numbers.k == 1:
        return ""
    return next((name for name, (low, high) in lengths(x, numbers, num_before).items() if low <= len(got) <= high), "")


def edge_of_a_draw(survivors: reference.Survivors, seed: int, step: int, got: int) -> str:
    """The kind of edge that explains a sampled token other than the reference's, or ""."""
    groups, x = survivors.ids_N // noise.GROUP_SIZE, survivors.x_N - survivors.x_N.max()
    which = np.unique(groups)
    mass = np.array([np.exp(x[groups == group]).sum() for group in which])
    with np.errstate(all="ignore"):
        keys = np.log(mass) + noise.gumbel(noise.uniform(seed, step, noise.GROUP, which))
    group = got // noise.GROUP_SIZE
    if group not in which or not keys.max() - keys[which == group][0] <= NEAR:
        return ""
    inside = groups == group
    keys_in = x[inside] + noise.gumbel(noise.uniform(seed, step, noise.TOKEN, survivors.ids_N[inside]))
    gap = keys_in.max() - keys_in[survivors.ids_N[inside] == got]
    if not (len(gap) and gap[0] <= SHARP * max(1.0, abs(keys_in.max()))):
        return ""
    return "race of tokens" if keys.max() == keys[which == group][0] else "race of groups"


def words(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random 64-bit integers as int64."""
    return rng.integers(2**64, size=rows, dtype=np.uint64).view(np.int64)


def fused_rows(rng: np.random.Generator, rows: int, size: int) -> tuple[np.ndarray, list[FusedParams], list[bool]]:
    """Random rows that the fused kernel supports, their parameters, and whether these are at an edge by design."""
    x_RV, params, tight = np.empty((rows, size), np.float32), [], []
    for position in range(rows):
        while len(params) == position:
            x_RV[position] = row(rng, size, str(rng.choice(KINDS)))
            one, at_an_edge = numbers_for(rng, x_RV[position])
            fused = to_fused_pipeline(simplify(pipeline(one)))
            if not isinstance(fused, str):
                params.append(fused.params)
                tight.append(at_an_edge)
    return x_RV, params, tight


def edges_of(found: Counter[str], tight: bool) -> int:
    """The number of rows at a float edge, of those whose parameters are at an edge by design or of the others."""
    return sum(n for name, n in found.items() if ":" in name and name.startswith("tight") == tight)


def compared(
    x_RV: np.ndarray, params: list[FusedParams], tight: list[bool], seeds: Any, steps: Any, inside_RV: Any, tokens: Any
) -> Counter[str]:
    """Compare survivors, bool [R, V], and tokens of rows with the reference's; those at float edges are counted.

    seeds, steps: as int64. Other differences fail.
    """
    found = Counter[str](rows=len(x_RV))
    for position, (x, token) in enumerate(zip(x_RV, np.asarray(tokens).tolist(), strict=True)):
        survivors = reference.survivors(x, stages := simplify(pipeline(params[position])))
        seed, step = int(seeds[position]) % 2**64, int(steps[position]) % 2**64
        inside = np.flatnonzero(inside_RV[position]).tolist()
        description = position, params[position], x.size, seed, step, token
        if inside != np.sort(survivors.ids_N).tolist():
            edge = edge_of_a_set(x, params[position], reference.all_tokens(x).ids_N.tolist(), inside)
            assert edge, (*description, len(inside), len(survivors.ids_N))
            found[f"{'tight ' * tight[position]}set: {edge}"] += 1
        elif token != reference.select_token(stages[-1], survivors, seed, step):
            edge = edge_of_a_draw(survivors, seed, step, token)
            assert edge, description
            found[f"draw: {edge}"] += 1
    return found


@jit
def _left(address: Any, size: Any, chain: Any, room: Any, ids: Any, doubtful: Any) -> Any:
    """Fill in ids, and whether each is uncertain. Returns their number, or TIED."""
    work = workspace_in(room, size)
    top = load_row(address, FLOAT32, size, 0, 0, 0, work)
    if not -np.inf < top < np.inf:
        return 0
    ids[0], best = argmax(top, work)
    if chain.t == 0.0 or chain.k == 1.0:
        return 1
    kept, n = truncate(top, best, chain, work), 0
    if kept.listed == TIED:
        return TIED
    if kept.listed != UNLISTED:
        for i in range(kept.listed):
            ids[i], doubtful[i] = work.ids[i], work.weights[i] < 0.0
        return kept.listed
    for token in range(size):
        x = carray(floats_at(edited_group_address(token // GROUP_SIZE, work)), GROUP_SIZE)[token % GROUP_SIZE]
        if x > kept.threshold or (x == kept.threshold and token <= kept.last_id):
            ids[n] = token
            for i in range(work.counters[UNCERTAIN_COUNT]):
                doubtful[n] |= work.uncertain_ids[i] == token
            n += 1
    return n


def left(x: np.ndarray, numbers: Sequence[float]) -> tuple[list[int], list[int]] | None:
    """The ids of certain survivors, ascending, and of uncertain tokens; None if the row is tied."""
    x = np.array(x, np.float32)
    ids, doubtful = np.empty(len(x), np.int64), np.zeros(len(x), bool)
    room = np.empty(workspace_size(len(x)))
    n = _left(x.ctypes.data, len(x), FusedParams(*map(float, numbers)), room, ids, doubtful)
    return None if n == TIED else (ids[:n][~doubtful[:n]].tolist(), ids[:n][doubtful[:n]].tolist())


def agrees(x: np.ndarray, numbers: Sequence[float], expected: Sequence[int]) -> bool:
    """Whether the fused kernel keeps these tokens, except for uncertain ones; True if the row is tied."""
    found = left(x, numbers)
    return found is None or set(found[0]) <= set(expected) <= set(found[0]) | set(found[1])
