"""Registered stages become fields of SamplingParams; errors say what to change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling.maths import log
from nucleate.sampling.presets import PRESETS
from nucleate.sampling.stage import Draw, Floor, Scale, param
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS

pytestmark = pytest.mark.usefixtures("registry")


def above_average(**changes: Any) -> type[Floor]:
    class AboveAverage(Floor):
        """Keep the tokens with at least a times the average probability."""

        rank = changes.get("rank", 67.5)
        name = changes.get("name", "above_average")
        a: float = param(
            "Factor of the average probability", **{"neutral": 0.0, "low": 0.0, **changes.get("parameter", {})}
        )

        def floor(self, row: Any) -> Any:
            return row.top + log(self.a) + log(row.mass) - log(row.n)

    return AboveAverage


def test_a_registered_stage_is_a_field() -> None:
    before, fields = nc.SamplingParams(temperature=0.5), list(FIELDS)
    with pytest.raises(nc.ParameterError, match="unknown parameter 'above_average'"):
        nc.SamplingParams(above_average=2)
    kind = nc.register_stage(above_average())
    params = nc.SamplingParams(temperature=0.5, above_average=2)
    assert params.build_pipeline()[:2] == (nc.stages.Temperature(0.5), kind(2.0))
    assert list(STAGES).index("above_average") == list(STAGES).index("p_less") + 1
    assert set(FIELDS) - set(fields) == {"above_average"}
    assert "above_average" in PRESETS["canonical"]
    assert nc.SamplingParams.from_json(params.to_json()) == params
    with pytest.raises(nc.ParameterError, match="above_average must be a number >= 0, got -1"):
        nc.SamplingParams(above_average=-1)
    with pytest.raises(nc.ParameterError, match="order 'vllm' does not include above_average"):
        nc.SamplingParams(above_average=2, order="vllm")
    ordered = nc.SamplingParams(above_average=2, top_k=5, order=["above_average", "top_k"])
    assert [stage.name for stage in ordered.build_pipeline()] == ["above_average", "top_k", "gumbel"]
    after = nc.SamplingParams(temperature=0.5)
    assert (before, hash(before)) == (after, hash(after))
    assert (before.above_average, before.build_pipeline()) == (0.0, after.build_pipeline())
    assert before.replace(top_k=3) == nc.SamplingParams(temperature=0.5, top_k=3)


def test_it_samples_like_the_tuple_of_stages(llm: nc.LLM) -> None:
    kind = nc.register_stage(above_average())
    logits = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32) * 3
    expected = nc.sample(logits, (nc.stages.Temperature(0.7), kind(3.0), nc.stages.Gumbel(4)))
    assert np.array_equal(nc.sample(logits, nc.SamplingParams(temperature=0.7, above_average=3, seed=4)), expected)
    whole = {"top_k": 0, "top_p": 1.0}  # instead of what the model recommends
    fields = llm.generate("Once", temperature=0.7, above_average=50, **whole, seed=4, max_tokens=9)
    stages = llm.generate("Once", (nc.stages.Temperature(0.7), kind(50)), seed=4, max_tokens=9)
    assert fields[0].text == stages[0].text
    assert nc.SamplingParams(pipeline="above_average(50)").pipeline == (kind(50.0),)


def test_a_draw_is_a_choice() -> None:
    @nc.register_stage
    class Flipped(Draw):
        """Select the least likely token."""

        uniforms = "none"

        def score(self, x: Any, u: Any) -> Any:
            return -x

    assert "flipped" in FIELDS["draw"].choices
    assert nc.sample(np.array([[1.0, 0.5, 3.0]], np.float32), nc.SamplingParams(draw="flipped")) == [1]
    with pytest.raises(nc.ParameterError, match="draw must be one of"):
        nc.SamplingParams(draw="flopped")


def test_a_class_can_be_defined_again() -> None:
    first, second = nc.register_stage(above_average()), nc.register_stage(above_average(parameter={"high": 9.0}))
    assert STAGES["above_average"] is second is not first
    assert FIELDS["above_average"].high == 9.0
    assert nc.register_stage(second) is second


def plain(**body: Any) -> type[Scale]:
    given = {"__doc__": "Some help.", "rank": 71.5, "__module__": __name__, "apply": lambda self, x, row: x}
    return type("Plain", (Scale,), {**given, **body})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (5, "takes a subclass of Stage, got 5"),
        (nc.stages.Temperature(1.0), "takes a subclass of Stage"),
        (Scale, "Scale must define apply"),
        (nc.Stage, "none of the shapes"),
        (lambda: plain(name="top_k"), "a stage named top_k exists: TopK; choose another name"),
        (lambda: plain(rank=70), r"Plain.rank is 70, which top_p has: choose another, .* such as 70.5"),
        (lambda: plain(__doc__=None), "Plain needs a docstring"),
        (lambda: above_average(parameter={"name": "top_k"}), "top_k is a field of the stage top_k; use param"),
        (lambda: above_average(parameter={"name": "max_tokens"}), "max_tokens is a field of SamplingParams"),
        (lambda: above_average(parameter={"name": "pipeline"}), "pipeline is a field of SamplingParams"),
    ],
)
def test_errors_say_what_to_change(kind: Any, message: str) -> None:
    stages, fields = dict(STAGES), dict(FIELDS)
    made = kind() if callable(kind) and not isinstance(kind, type) and not isinstance(kind, nc.Stage) else kind
    with pytest.raises(TypeError, match=message):
        nc.register_stage(made)
    assert (stages, fields) == (dict(STAGES), dict(FIELDS))


def test_a_stage_of_every_request_is_an_error() -> None:
    class Always(Scale):
        """Halve all scores."""

        rank = 52
        factor: float = param("Factor", default=0.5)

        def apply(self, x: Any, row: Any) -> Any:
            return x * self.factor

    with pytest.raises(TypeError, match=r"Always would act on every request: .* needs neutral="):
        nc.register_stage(Always)

    class Required(Scale):
        """Multiply all scores."""

        rank = 52
        factor: float = param("Factor")

        def apply(self, x: Any, row: Any) -> Any:
            return x * self.factor

    with pytest.raises(TypeError, match="the parameter required needs a default"):
        nc.register_stage(Required)
