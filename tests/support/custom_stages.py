"""Stages of one's own: rules with helpers, switches, orders, weights and states that no stage of ours has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nucleate.sampling.maths import exp, log, minimum, where
from nucleate.sampling.stage import Ceiling, Draw, Floor, Prefix, Scale, param

FACTOR = 0.25


def softened(x: Any) -> Any:
    return FACTOR * x


class Softer(Scale):
    """A rule with a helper, and a constant of its module."""

    on: bool = param("", neutral=False, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        return where(self.on, softened(x - row.top), row.var * x)


class Turned(Scale):
    """Not monotone, and with an integer and a number that may be none."""

    monotone = False
    n: int = param("", default=3, public=False)
    limit: float | None = param("", default=None, public=False)

    def apply(self, x: Any, row: Any) -> Any:
        return -minimum(-x, self.n) // 1 if self.limit is None else minimum(x % self.n, self.limit)


class Middle(Prefix):
    """An order, weights and a target that no stage of ours has; the first token need not be the best."""

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
    """Races the other way round, with noise of its own shape."""

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
    """Weights that no cut can be told from but by a walk: the reference's business."""

    def weight(self, x: Any, row: Any) -> Any:
        return x + 1.0

    def target(self, row: Any) -> Any:
        return 0.5


class Foreign(Scale):
    """A rule that is no expression of numbers: NumPy's business."""

    def apply(self, x: Any, row: Any) -> Any:
        return np.asarray([float(one) for one in x.tolist()]) * 0.5


class Learner(Floor):
    """A state, told by a rule with a helper."""

    cut: float = param("", default=-3.0, public=False)
    seen: float = param("", default=0.0, public=False)

    def floor(self, row: Any) -> Any:
        return row.top + self.cut - self.half * self.seen

    @property
    def half(self) -> float:
        return self.cut / -2.0

    def update(self, token: Any) -> Any:
        return replace(self, seen=chance(token.logprob_before) + 0.5 * self.seen)


def chance(logprob: Any) -> Any:
    return exp(logprob)


OWN = (
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
