"""Random rows and numbers for the compiled chain, and what counts as a float edge: a difference of the last digits.

A set of survivors is a prefix of the one order, so it is its length. A length is an edge if a cut moved by ``NEAR``, a
part of itself, keeps as many; a token is one if its key in the race of the reference is ``NEAR`` the highest.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.dispatch.fused_pipeline import FusedParams
from nucleate.sampling.maths import SLACK
from nucleate.sampling.stages import Gumbel, MinP, Temperature, TopK, TopNSigma, TopP

NEAR = 3e-7
"""Weights of groups are float32, and exp is good to 8e-8: three units in the last place."""
SHARP = 1e-12
"""Where all is float64."""

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
        case "island":  # what a grammar leaves
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
        case "doubled":  # each score at several places, so that cuts fall among equal ones
            x = x[numbers.integers(max(1, size // int(numbers.choice([2, 7, 300]))), size=size)]
        case "outliers":  # a heavy tail: a few scores, and very many that are far away
            x = x - 15.0 * (numbers.random(size) < 0.99)
        case "steps":  # as float16 and bfloat16 have them
            x = (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.asarray(x, np.float32)


def numbers_for(numbers: np.random.Generator, x: np.ndarray) -> tuple[FusedParams, bool]:
    """Parameters of a chain, and whether they are at an edge by design.

    That is, with a cut that falls on a token, give or take a last digit, or with a top-p so near 1 that the tokens at
    its cut weigh little more than a last digit.
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
    if numbers.random() < 0.2:  # as other engines have it
        late_t = one(1, 0.7, 1.5, 1e-4, 1e4, 10.0 ** numbers.uniform(-3, 2))
        found = found._replace(late_m=one(0, 0.05, 0.3, u), late_t=late_t)
    if numbers.random() < 0.25:
        return on_a_token(numbers, x, found), True
    return found, 1 - 1e-5 < found.p < 1


def on_a_token(numbers: np.random.Generator, x: np.ndarray, found: FusedParams) -> FusedParams:
    """With the cut of min-p or top-p within some units of the last digit of where a token is."""
    kept = np.sort(x[x > -np.inf].astype(np.float64))[::-1]
    d = (kept - kept[0]) / (found.t or 1.0)
    place = numbers.integers(len(d))
    by = numbers.choice([0.0, 1e-15, -1e-15, 1e-10, -1e-10, 1e-6, -1e-6, 3e-6, -3e-6])
    mass = np.cumsum(np.exp(d))
    if numbers.random() < 0.5:
        m = math.exp(max(d[place] * (1 + by) + numbers.choice([0.0, SLACK]), -700.0))
        return found._replace(m=float(min(m, 1.0)))
    p = mass[place] / mass[-1] / (1 - numbers.choice([0.0, SLACK])) * (1 + by)
    return found._replace(sigmas=0.0, k=0, m=0.0, p=float(min(max(p, 1e-12), 1.0)))


def pipeline(numbers: FusedParams, seed: int = 0, place: int = 0) -> tuple[object, ...]:
    """The stages of a chain, the temperature after so many of the cuts: 0 to 2."""
    t, sigmas, k, m, p, late_m, late_t = numbers
    first, then = (TopNSigma(sigmas), TopK(k)), (MinP(m), TopP(p), MinP(late_m), Temperature(late_t), Gumbel(seed))
    return (*first[:place], Temperature(t), *first[place:], *then)


def lengths(x: np.ndarray, numbers: FusedParams, place: int = 0) -> dict[str, tuple[int, int]]:
    """How many tokens the cuts keep at least and at most, if they are off by a little: by what is off."""
    t, sigmas, k, m, p, late_m, _ = numbers
    below = np.sort(x[x > -np.inf].astype(np.float64))[::-1]
    with np.errstate(all="ignore"):
        below = (below - below[0]) / t
    below = below[below > -np.inf]
    spread = math.sqrt(np.var(below)) if sigmas else 0.0
    slack = SLACK / t if place else SLACK

    def kept(sigma_off: float, m_off: float, p_off: float) -> int:
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
        both = [kept(*(sign * one for one in off)) for sign in (-1, 1)]
        if both[0] != both[1]:
            found[name] = (min(both), max(both))
    corners = [kept(*off) for off in itertools.product((-SHARP, SHARP), (-SHARP, SHARP), (-NEAR, NEAR))]
    found["several"] = (min(corners), max(corners))
    return found


def edge_of_a_set(x: np.ndarray, numbers: FusedParams, order: list[int], got: list[int], place: int = 0) -> str:
    """What kind of edge explains a set, of which the reference has another; "" for none. order: all ids, best first."""
    if not got or sorted(order[: len(got)]) != got or numbers.t == 0 or numbers.k == 1:
        return ""
    return next((name for name, (low, high) in lengths(x, numbers, place).items() if low <= len(got) <= high), "")


def edge_of_a_draw(kept: reference.Survivors, seed: int, step: int, got: int) -> str:
    """What kind of edge explains a token, where the reference draws another of the same ones; "" for none."""
    groups, x = kept.ids_N // noise.GROUP_SIZE, kept.x_N - kept.x_N.max()
    which = np.unique(groups)
    mass = np.array([np.exp(x[groups == group]).sum() for group in which])
    with np.errstate(all="ignore"):
        keys = np.log(mass) + noise.gumbel(noise.uniform(seed, step, noise.GROUP, which))
    group = got // noise.GROUP_SIZE
    if group not in which or not keys.max() - keys[which == group][0] <= NEAR:
        return ""
    inside = groups == group
    keys_in = x[inside] + noise.gumbel(noise.uniform(seed, step, noise.TOKEN, kept.ids_N[inside]))
    gap = keys_in.max() - keys_in[kept.ids_N[inside] == got]
    if not (len(gap) and gap[0] <= SHARP * max(1.0, abs(keys_in.max()))):
        return ""
    return "race of tokens" if keys.max() == keys[which == group][0] else "race of groups"
