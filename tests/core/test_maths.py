"""Rebinding: the same code with other names."""

from __future__ import annotations

import math

import numpy as np

from nucleate.core import maths
from nucleate.core.maths import log
from nucleate.core.stage import Row
from nucleate.stages.min_p import MinP

ROW = Row(n=1, top=2.0, mass=1.0, square=1.0, entropy=0.0, mean=2.0, var=0.0, whole=1.0)


def rule(x, base=2.0):
    return log(x) / base


def test_rebind_replaces_free_names_and_nothing_else():
    bound = maths.rebind(rule, {"log": lambda x: x * 100}, "test")
    assert bound(3.0) == 150.0
    assert rule(math.e) == 0.5
    assert bound.__qualname__ == "rule.test"
    assert bound.__module__ == rule.__module__
    assert bound.__defaults__ == rule.__defaults__


def test_rebind_works_on_the_rule_of_a_stage():
    names = {"log": lambda x: 10.0, "SLACK": 0.5}
    bound = maths.rebind(MinP.floor, names, "path")
    assert bound(MinP(0.5), ROW) == 11.5
    assert MinP(0.5).floor(ROW) < 2


def test_every_name_is_there():
    assert all(hasattr(maths, name) for name in maths.NAMES)
    assert (maths.ones(np.zeros(3)) == 1).all()
