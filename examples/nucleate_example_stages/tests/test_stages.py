"""Tests of the stages: their rules by hand, and the properties that nucleate checks for every stage."""

import numpy as np
import pytest
from nucleate_example_stages.collision_floor import CollisionFloor
from nucleate_example_stages.fading_temperature import FadingTemperature

import nucleate as nc
from nucleate.plugins.stage_check import check_stage


@pytest.mark.parametrize("stage", [CollisionFloor, FadingTemperature])
def test_all_properties_hold(stage: type) -> None:
    assert [one for one in check_stage(stage) if one.holds is False] == []


def test_the_floor_is_a_factor_of_the_sum_of_squares() -> None:
    logits = np.log([[0.5, 0.3, 0.15, 0.05]])  # the squares add up to 0.365
    p = nc.probabilities(logits, (CollisionFloor(0.5),))[0]
    assert p == pytest.approx(np.array([0.5, 0.3, 0.0, 0.0]) / 0.8)


def test_the_temperature_fades_with_every_token() -> None:
    sampler, logits = nc.Sampler(4), np.log([[0.4, 0.3, 0.2, 0.1]])
    row = sampler.add((FadingTemperature(2.0, rate=0.5), nc.stages.Gumbel(seed=1)))
    for temperature in (3.0, 2.0, 1.5):
        [p] = sampler.distributions(row, logits)
        assert np.diff(np.log(p)) * temperature == pytest.approx(np.diff(logits[0]))
        sampler(logits)
