"""Custom stages: rules with helpers, switches, orders, weights and states that no built-in stage has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nucleate.sampling.maths import INFINITY, exp, log, minimum, ones, places, total, where
from nucleate.sampling.stage import Ceiling, Draw, Floor, Prefix, Scale, param

FACTOR = 0.25


def softened(x: Any) -> Any:
    return FACTOR * x


class Softer(Scale):
    """A rule with a helper function and a module constant."""

    on: bool = param("", neutral=False, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        return where(self.on, softened(x - row.top), row.var * x)


class Turned(Scale):
    """Not monotone; with an integer and an optional parameter."""

    monotone = False
    n: int = param("", default=3, public=False)
    limit: float | None = param("", default=None, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        return -minimum(-x, self.n) // 1 if self.limit is None else minimum(x % self.n, self.limit)


class Middle(Prefix):
    """A custom order, weights and target; the first token need not be the most likely."""

    inclusive = False
    part: float = param("", default=0.5, public=False)

    def order(self, x: Any, row: Any) -> Any:
        return (x - row.mean) * (x - row.mean)

    def weight(self, x: Any, row: Any) -> Any:
        return exp(x - row.top) ** 0.5

    def target(self, row: Any) -> Any:
        return self.part * row.n


class Beheaded(Ceiling):
    @property
    def act_probability(self) -> float:
        return 0.5

    def ceiling(self, row: Any) -> Any:
        return row.mean + row.var**0.5


class Tail(Draw):
    """A race that prefers unlikely tokens, with another kind of noise."""

    uniforms = "each"

    def score(self, x: Any, u: Any) -> Any:
        return log(u) * exp(-x / 50.0)


class Last(Draw):
    uniforms = "none"

    def score(self, x: Any, u: Any) -> Any:
        return -x + u


class Uneven(Draw):
    uniforms = "one"

    def weight(self, x: Any, row: Any) -> Any:
        return 1.0 / (1.0 + row.top - x)

    def target(self, row: Any, u: Any) -> Any:
        return u * 2.0


class Odd(Prefix):
    """Weights that may be negative, which only the reference supports."""

    def weight(self, x: Any, row: Any) -> Any:
        return x + 1.0

    def target(self, row: Any) -> Any:
        return 0.5


class Foreign(Scale):
    """A rule that is not a numeric expression, which only NumPy can run."""

    def apply(self, x: Any, row: Any) -> Any:
        return np.asarray([float(one) for one in x.tolist()]) * 0.5


class Learner(Floor):
    """A stateful stage whose update uses a helper."""

    cut: float = param("", default=-3.0, public=False)
    seen: float = param("", default=0.0, public=False)

    def floor(self, row: Any) -> Any:
        return row.top + self.cut - self.half * self.seen

    @property
    def half(self) -> float:
        return self.cut / -2.0

    def update(self, token: Any) -> Any:
        return replace(self, seen=chance(token.logprob_before) + 0.5 * self.seen)


class Overflowing(Floor):
    """A stateful stage whose state is not finite after the first token."""

    level: float = param("", default=-3.0, public=False)

    def floor(self, row: Any) -> Any:
        return row.top + self.level

    def update(self, token: Any) -> Any:
        return replace(self, level=self.level * 1e308 - token.logprob_after)


def chance(logprob: Any) -> Any:
    return exp(logprob)


class Drops(Floor):
    """A threshold by the distances of the highest scores, with fewer tokens than it reads in some rows."""

    sorted_count = 40
    part: float = param("", default=0.5, public=False)

    def floor(self, row: Any) -> Any:
        below = where(row.sorted_scores > -INFINITY, row.top - row.sorted_scores, 0.0)
        return row.top - self.part * total(below / places(below))


class Rooted(Prefix):
    """As many tokens as a sum over the highest scores says, at least two."""

    sorted_count = 3
    inclusive = False
    min_keep = 2
    part: float = param("", default=5.0, public=False)

    def weight(self, x: Any, row: Any) -> Any:
        return ones(x)

    def target(self, row: Any) -> Any:
        return self.part * total(exp(row.sorted_scores - row.top)) + 0.001


class Second(Scale):
    """A linear scale by the second score, of rows that have one."""

    sorted_count = 2
    on: bool = param("", neutral=False, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        gap = row.top - row.sorted_scores[..., 1:]
        return (x - row.top) / (1.0 + minimum(gap, 1.0))


OWN = (
    Drops(),
    Drops(0.1),
    Rooted(),
    Rooted(1.5),
    Second(on=True),
    Learner(),
    Learner(-1.5, 0.3),
    Softer(on=True),
    Softer(on=False),
    Turned(),
    Turned(limit=1.5),
    Middle(),
    Middle(0.9),
    Beheaded(),
    Odd(),
)
DRAWS = Tail(), Last(), Uneven()
