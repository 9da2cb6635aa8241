"""Exact tests of a sampler: draws of one token, compared with the distribution that parameters stand for.

``TopTokens`` is what is known of the distribution before any stage: the probabilities of the most likely tokens, and
the mass of all others. ``apply`` computes the distribution after temperature, top-k, top-p and min-p in any order, or
None where it depends on tokens that are not known. ``pick`` chooses the parameters that separate the documented
meaning best from others, away from thresholds that rounding could decide. ``follow`` compares draws with it.

A token outside of the kept set is a difference at once. A chi-square test finds one only if an independent second
sample confirms it, each at ``STAGE_ALPHA``: the rate of false alarms is its square, far from the tails where the test's
approximation is poor. Knows no server and no sampler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Label = Hashable
Stages = tuple[tuple[str, Any], ...]
"""Names and values, in the order in which they apply, such as (("temperature", 0.5), ("top_p", 0.9))."""
DrawTokens = Callable[[int, Mapping[str, Any]], Counter[Label]]
"""Draws that many tokens with these fields, with fresh seeds at each call, and counts them."""

STAGE_ALPHA = 0.0025
"""Level of each of the two chi-square tests that a difference needs; the rate of false alarms is 6e-6 per test."""
MAX_TESTS = 16
"""Tests in a run, at most. All together have a false alarm in one of 10,000 runs."""
LEAST_EXPECTED = 20.0
"""Tokens that are expected less often than this are counted together."""
LEAST_DISTANCE = 0.04
"""The least total variation distance between the documented meaning and another one that a test should tell apart."""

ENOUGH = 0.12
"""A total variation distance beyond which the number of kept tokens matters more."""


class Difference(Exception):  # noqa: N818  # a result, not a failure
    """The subject does something else than documented. The message says what."""


class NotTested(Exception):  # noqa: N818
    """A check cannot be made. The message says why."""


class Check(NamedTuple):
    """A check. group: the part of the report. run: returns what was found; raises Difference or NotTested."""

    group: str
    name: str
    run: Callable[[], str]


class Finding(NamedTuple):
    """The result of a check. outcome: "same" (as documented), "differs" or "not tested". found: what was seen."""

    group: str
    name: str
    outcome: str
    found: str


class Findings(NamedTuple):
    """The results of a run. about: facts by name, such as the number of requests and the power of the tests."""

    subject: str
    about: Mapping[str, Any]
    findings: Sequence[Finding]


Progress = Callable[[str], object]
"""Called with the name of a check before it runs."""


def run_checks(checks: Iterable[Check], progress: Progress) -> Iterator[Finding]:
    """Run checks in their order, and yield what they find."""
    for check in checks:
        progress(check.name)
        try:
            outcome, found = "same", check.run()
        except Difference as difference:
            outcome, found = "differs", str(difference)
        except NotTested as reason:
            outcome, found = "not tested", str(reason)
        yield Finding(check.group, check.name, outcome, found)


class TopTokens(NamedTuple):
    """The distribution before any stage. p: probabilities of the labels, descending. rest: mass of all other tokens."""

    labels: tuple[Label, ...]
    p: NDArray[np.float64]
    rest: float = 0.0

    @staticmethod
    def of(logprobs: Mapping[Any, float], *, complete: bool = False) -> TopTokens:
        """From log-probabilities by label. complete: there are no other tokens."""
        ordered = sorted(logprobs.items(), key=lambda item: -item[1])
        p = np.exp(np.array([value for _, value in ordered], np.float64))
        return TopTokens(tuple(label for label, _ in ordered), p, 0.0 if complete else max(0.0, 1.0 - float(p.sum())))


class Expected(NamedTuple):
    """A distribution over the listed labels, given that one of them is drawn.

    other: probability of all other tokens together, before that condition; None if it is not known, 0 if they are
    impossible.
    """

    labels: tuple[Label, ...]
    q: NDArray[np.float64]
    other: float | None


def apply(listed: TopTokens, stages: Iterable[tuple[str, Any]]) -> Expected | None:  # noqa: C901  # a case per stage
    """Return the distribution after stages; None if it depends on tokens that are not listed.

    stages: temperature, top_k, top_p (of the mass that is left), min_p (relative to the most likely token), ``floor``
    (a probability of the mass that is left) and ``shift`` (amounts that are subtracted from scores, by label).
    """
    w = listed.p / listed.p[0]
    low = high = listed.rest / listed.p[0]  # bounds of the mass of the other tokens
    for name, value in stages:
        keep = np.ones(len(w), bool)
        if name == "temperature":
            if high and value < 1:
                low, high = 0.0, high * w[w > 0][-1] ** (1 / value - 1)
            elif high and value > 1:
                high = math.inf
            w = w ** (1 / value)
        elif name == "shift":
            w = w * np.exp([-value.get(label, 0.0) for label in listed.labels])
        elif name == "top_k":
            keep[value:] = False
        elif name == "min_p":
            keep = w >= value * w.max() * (1 - 1e-9)
        else:
            limits = [value * (w.sum() + other) for other in (low, high)]
            before = np.cumsum(w) - w
            each = [before < limit if name == "top_p" else w >= limit for limit in limits]
            if (each[0] != each[1]).any():
                return None
            keep = each[0] | (w == w.max())
        if name not in ("temperature", "shift"):
            if keep.all() and high:
                return None  # some of the other tokens may stay
            w, low, high = np.where(keep, w, 0.0), 0.0, 0.0
    return Expected(listed.labels, w / w.sum(), low / (w.sum() + low) if low == high else None)


def surely(listed: TopTokens, stages: Iterable[tuple[str, Any]]) -> Expected:
    """``apply``, which raises NotTested instead of returning None."""
    made = apply(listed, stages)
    if made is None:
        raise NotTested("the distribution depends on tokens that the logprobs do not list")
    return made


NUDGES: Mapping[str, Callable[[Any, int], Any]] = {
    "top_p": lambda value, sign: value + 0.01 * sign,
    "min_p": lambda value, sign: value * (1 + 0.03 * sign),
    "temperature": lambda value, sign: value * (1 + 0.005 * sign),
}
"""Small changes of a parameter, as large as the effect of rounding could be."""


def is_robust(listed: TopTokens, stages: Stages) -> bool:
    """Whether small changes of the parameters and of the ranking leave the kept set as it is."""
    made = apply(listed, stages)
    if made is None:
        return False
    kept = int(np.count_nonzero(made.q))
    if kept < len(listed.p) and made.other == 0 and listed.p[kept - 1] < 1.03 * listed.p[kept]:
        return False
    for index, (name, value) in enumerate(stages):
        for sign in (-1, 1):
            if (nudge := NUDGES.get(name)) is not None:
                other = apply(listed, (*stages[:index], (name, nudge(value, sign)), *stages[index + 1 :]))
                if other is None or np.count_nonzero(other.q) != kept:
                    return False
    return True


def distance(one: Expected, other: Expected) -> float:
    """The total variation distance of two distributions over the same labels."""
    return float(np.abs(one.q - other.q).sum() / 2)


Question = tuple[Stages, Mapping[str, Stages]]
"""The documented meaning of a setting, and others by name."""


def pick(listed: TopTokens, questions: Iterable[Question]) -> Question:
    """Return the question whose documented meaning is far from all others, and keeps many tokens. Raises NotTested."""
    best, found = (LEAST_DISTANCE, 1), None
    for stages, others in questions:
        if not is_robust(listed, stages):
            continue
        made = apply(listed, stages)
        found_others = {name: apply(listed, other) for name, other in others.items()}
        if made is None or any(other is None for other in found_others.values()):
            continue
        least = min(distance(made, other) for other in found_others.values() if other is not None)
        value = min(least, ENOUGH), int(np.count_nonzero(made.q))
        if value[0] >= LEAST_DISTANCE and value[1] > 1 and value > best:
            best, found = value, (stages, others)
    if found is None:
        raise NotTested("no setting separates the possible meanings at the positions that were tried")
    return found


GRID_P = tuple(round(0.1 + 0.05 * i, 2) for i in range(18))
GRID_M = tuple(round(float(m), 3) for m in np.geomspace(0.02, 0.8, 24))


def questions(name: str, listed: TopTokens) -> Iterator[Question]:
    """Yield settings of a truncation, each with what it could mean instead: one token more or less, and others."""
    if name == "top_k":
        for k in range(2, min(12, len(listed.p))):
            yield (("top_k", k),), {"k + 1 tokens": (("top_k", k + 1),), "k - 1 tokens": (("top_k", k - 1),)}
        return
    for value in GRID_P if name == "top_p" else GRID_M:
        stages = ((name, value),)
        made = apply(listed, stages)
        kept = 0 if made is None else int(np.count_nonzero(made.q))
        if not 2 <= kept < len(listed.p):
            continue
        others: dict[str, Stages] = {
            "one token more": (("top_k", kept + 1),),
            "one token less": (("top_k", kept - 1),),
        }
        if name == "min_p":
            others["a threshold of the probability itself, not relative to the most likely token"] = (("floor", value),)
        yield stages, others


ORDERS = (("temperature", "top_p"), ("temperature", "min_p"), ("top_k", "top_p"), ("min_p", "top_p"))
"""Pairs of stages whose order changes the distribution, in the documented order."""
_VALUES: Mapping[str, Sequence[Any]] = {"temperature": (0.4, 0.5, 0.6, 0.7, 1.5, 2.0, 3.0), "top_k": range(2, 9)}


def order_questions(first: str, second: str, _: TopTokens) -> Iterator[Question]:
    """Yield settings of two stages, with the other order."""
    for value in _VALUES.get(first, GRID_M):
        for p in GRID_M if second == "min_p" else GRID_P:
            one, two = (first, value), (second, p)
            yield (one, two), {f"{second}, then {first}": (two, one)}


def chi_square_tail(statistic: float, degrees: int) -> float:
    """The probability that a chi-square variable is at least this large: the exact recursion over the degrees."""
    x, s = statistic / 2, 0.5 if degrees % 2 else 1.0
    tail = math.erfc(math.sqrt(x)) if degrees % 2 else math.exp(-x)
    while s < degrees / 2:
        tail += math.exp(s * math.log(x) - x - math.lgamma(s + 1)) if x > 0 else 0.0
        s += 1
    return min(1.0, tail)


class Fit(NamedTuple):
    """Draws compared with a distribution. outside: draws by tokens that are impossible. draws: those of the labels."""

    draws: int
    outside: Mapping[Label, int]
    statistic: float
    degrees: int
    p_value: float
    worst: str

    @property
    def fails(self) -> bool:
        return bool(self.outside) or self.p_value < STAGE_ALPHA

    def __str__(self) -> str:
        if self.outside:
            shown = ", ".join(f"{label!r} {count} times" for label, count in [*self.outside.items()][:3])
            return f"{sum(self.outside.values())} of {self.draws:,} draws are outside of the kept tokens: {shown}"
        if not self.degrees:
            return f"{self.draws:,} draws, none outside of the kept tokens"
        text = f"{self.draws:,} draws, chi-square {self.statistic:.1f} with {self.degrees} degrees of freedom"
        return f"{text}; {self.worst}" if self.p_value < STAGE_ALPHA else text


def fit(expected: Expected, counts: Mapping[Label, int]) -> Fit:
    """Compare counts with a distribution."""
    labels, q = [*expected.labels], expected.q
    observed = np.array([counts.get(label, 0) for label in labels], np.float64)
    possible = q > 0
    others = {label: n for label, n in counts.items() if label not in {*labels}}
    outside = {label: int(n) for label, n, ok in zip(labels, observed, possible, strict=True) if n and not ok}
    if expected.other == 0:
        outside |= others
    labels = [label for label, ok in zip(labels, possible, strict=True) if ok]
    q, observed = q[possible], observed[possible]
    if expected.other:
        labels.append("any other token")
        q, observed = np.append(q * (1 - expected.other), expected.other), np.append(observed, sum(others.values()))
    total = observed.sum()
    mean = q * total
    order = np.argsort(-mean, kind="stable")
    mean, seen = mean[order], observed[order]
    z = (seen - mean) / np.sqrt(np.maximum(mean, 1.0))
    at = int(np.argmax(np.abs(z))) if len(z) else 0
    worst = ""
    if total:
        worst = (
            f"{labels[order[at]]!r} has probability {mean[at] / total:.4f} and is drawn {seen[at] / total:.4f} times"
        )
    large = int((mean >= LEAST_EXPECTED).sum())
    if large < len(mean):  # those together, or with the least of the others
        cut = large if mean[large:].sum() >= LEAST_EXPECTED else max(large - 1, 0)
        mean, seen = (np.append(each[:cut], each[cut:].sum()) for each in (mean, seen))
    if len(mean) < 2 or not total:
        return Fit(int(sum(counts.values())), outside, 0.0, 0, 1.0, worst)
    statistic = float(((seen - mean) ** 2 / mean).sum())
    tail = chi_square_tail(statistic, len(mean) - 1)
    return Fit(int(sum(counts.values())), outside, statistic, len(mean) - 1, tail, worst)


def follow(
    draw: DrawTokens, fields: Mapping[str, Any], expected: Expected, others: Mapping[str, Expected | None], count: int
) -> str:
    """Draw tokens and compare them. Returns what was found; raises Difference, with the other meaning that fits.

    others: by name, distributions to name instead. count: the number of draws.
    """
    counts = draw(count, fields)
    found = fit(expected, counts)
    if found.fails and not found.outside:
        counts = draw(count, fields)
        found = fit(expected, counts)
    if not found.fails:
        return str(found)
    fitting = [name for name, other in others.items() if other is not None and not fit(other, counts).fails]
    shown = ", ".join(f"{name} {value}" for name, value in fields.items())
    raise Difference(
        (f"{shown}: {found}" if shown else str(found)) + (f". It fits {' or '.join(fitting)}" if fitting else "")
    )


def smallest_difference(expected: Expected, draws: int, power: float = 0.99) -> float:
    """Return which difference of the most likely token's probability is found with this probability.

    The other tokens share it in proportion. Computed from 40,000 samples of the non-central chi-square distribution.
    """
    p = float(expected.q[0])
    degrees = max(1, int((expected.q * draws >= LEAST_EXPECTED).sum()))
    critical = _bisect(lambda value: chi_square_tail(value, degrees) < STAGE_ALPHA, 1000.0)

    def is_found(change: float) -> bool:
        centre = draws * change**2 / (p * (1 - p))
        sample = np.random.default_rng(0).noncentral_chisquare(degrees, centre, 40_000)
        return bool(np.mean(sample > critical) ** 2 >= power)

    return _bisect(is_found, 1.0)


def power_statement(expected: Expected, draws: int) -> str:
    """Return what so many draws of a distribution find, and how often a run is wrong."""
    return (
        f"a change of a probability of {expected.q[0]:.2f} by {smallest_difference(expected, draws):.3f}, or one token "
        f"more than should be kept, if its probability is {1 - 0.01 ** (1 / draws):.4f}, is found with probability "
        f"99 %; a false alarm occurs in one of {1 / (MAX_TESTS * STAGE_ALPHA**2):,.0f} runs"
    )


def _bisect(true: Callable[[float], bool], high: float) -> float:
    """Return the least number up to ``high`` for which a monotone condition is true."""
    low = 0.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if true(middle) else (middle, high)
    return high
