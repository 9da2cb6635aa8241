"""Stage classes: names, parameters, values, custom stages, and rejected class bodies."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Optional

import numpy as np
import pytest

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference, stages
from nucleate.sampling.maths import log
from nucleate.sampling.route import explain
from nucleate.sampling.stage import (
    SHAPES,
    Ceiling,
    Draw,
    Floor,
    History,
    Prefix,
    RowStats,
    Scale,
    Shift,
    Stage,
    Tap,
    TokenInfo,
    param,
    shape_of,
)
from nucleate.sampling.stages import STAGES, Greedy, Gumbel, LogitBias, MinTokens, Temperature, TopK, TopP


class TopA(Floor):
    """Top-a: keep every token at least a * (top probability) ** 2 likely."""

    rank = 64
    a: float = param("how likely a token must be", neutral=0.0, low=0.0, high=1.0)

    def floor(self, row: RowStats) -> Any:
        return row.top + log(self.a) - log(row.mass)


def test_a_custom_stage_works_like_a_built_in_one():
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    p = nc.probabilities(logits, (Temperature(1.0), TopA(0.4), Gumbel(1)))  # 0.4 * 0.5 ** 2 = 0.1
    assert p == pytest.approx(np.array([[0.5, 0.3, 0.15, 0]]) / 0.95)
    assert nc.sample(logits, (TopA(1.0), Gumbel(1))) in range(4)
    assert "TopA(0.4)" in str(explain((TopA(0.4),)))
    assert (TopA.name, TopA.parameters["a"].name, shape_of(TopA)) == ("top_a", "top_a", "Floor")
    assert TopA(0.4) == pickle.loads(pickle.dumps(TopA(0.4))) == copy.deepcopy(TopA(0.4))
    assert TopA().neutral
    with pytest.raises(ParameterError, match=r"top_a must be a number >= 0 and <= 1, got 1\.5"):
        TopA(1.5)


def test_a_stage_may_be_defined_in_a_function():
    class Local: ...

    class Half(Scale):
        """Halve."""

        kept: ClassVar[Local] = Local()
        by: float = param("divides the scores", neutral=1.0)

        def apply(self, x: Any, row: RowStats) -> Any:
            return x / self.by

        def other(self) -> Local:
            return self.kept

    ids, x, total = reference.survivors(np.array([4.0, 2.0], np.float32), (Half(2.0),))
    assert (ids.tolist(), x.tolist()) == ([0, 1], [0.0, -1.0])  # a rule gets scores relative to the maximum
    assert total == (0.0, pytest.approx(1 + np.exp(-1)))


def test_annotations_may_be_written_in_any_way():
    class Written(Draw):
        """A stage with parameters of every type."""

        uniforms = "none"
        a: Optional[int] = param("a", default=None, name="a")  # noqa: UP045  # users write it so too
        b: Mapping[int, float] = param("b", neutral={}, name="b")
        c: tuple[str, ...] = param("c", default=(), name="c")
        d: int | None = param("d", default=3, name="d")

    kinds = {attribute: (p.kind, p.optional) for attribute, p in Written.parameters.items()}
    assert kinds == {
        "a": ("int", True),
        "b": ("Mapping[int, float]", False),
        "c": ("tuple[str, ...]", False),
        "d": ("int", True),
    }


def test_annotations_that_are_types_are_supported_too():
    body = {"__annotations__": {"a": int | None}, "a": param("a", neutral=None), "uniforms": "none"}
    kind = type("Made", (Draw,), body)
    assert (kind.parameters["a"].kind, kind.parameters["a"].optional) == ("int", True)


def test_a_parameter_without_default_is_required():
    class Must(Floor):
        """A stage with a required parameter."""

        a: float = param("needed")

        def floor(self, row: RowStats) -> Any:
            return row.top - self.a

    assert repr(Must(2)) == "Must(2.0)"
    assert not Must(2).neutral
    with pytest.raises(TypeError, match="missing 1 required"):
        Must()


@pytest.mark.parametrize(
    ("annotations", "values", "words"),
    [
        ({"a": complex}, {"a": param("a", neutral=0)}, "a parameter is one of float, int"),
        ({"a": float, "b": float}, {"a": param("a"), "b": param("b")}, "a unique name"),
        ({"a": float, "b": int}, {"a": param("a"), "b": 5}, "b must be declared"),
    ],
)
def test_a_class_body_that_would_lose_a_parameter_is_rejected(annotations, values, words):
    with pytest.raises(TypeError, match=words):
        type("Wrong", (Floor,), {"__annotations__": annotations, **values})


def test_a_stage_with_parameters_is_final():
    with pytest.raises(TypeError, match="p must be declared in its own body"):

        class Mine(TopP):
            pass


@pytest.mark.parametrize(
    ("name", "snake"),
    [
        ("TopK", "top_k"),
        ("TopNSigma", "top_n_sigma"),
        ("PLess", "p_less"),
        ("Xtc", "xtc"),
        ("DRY", "dry"),
        ("Top2K", "top2_k"),
    ],
)
def test_names_are_snake_case(name, snake):
    assert type(name, (Floor,), {}).name == snake


def test_every_kind_of_stage_is_recognized():
    names = ["Combine", "Shift", "Scale", "Floor", "Prefix", "Ceiling", "Transform", "Draw", "Tap"]
    assert [shape_of(shape) for shape in SHAPES] == names
    with pytest.raises(TypeError, match="Stage has none of the shapes Combine, Shift, Scale"):
        shape_of(Stage)
    with pytest.raises(TypeError, match="none of the shapes"):
        shape_of(type("Odd", (Stage,), {})())


def test_values_are_converted_to_their_canonical_type():
    stage = LogitBias({np.int64(7): np.float32(0.5), "3": 1, 5: True + 1})
    assert repr(stage) == "LogitBias({3: 1.0, 5: 2.0, 7: 0.5})"
    assert stage == LogitBias({7: 0.5, 5: 2.0, 3: 1.0})
    assert hash(stage) == hash(LogitBias({7: 0.5, 5: 2.0, 3: 1.0}))
    assert TopK(np.int32(4)) == TopK(4) == TopK(k=4)
    assert type(TopK(np.int32(4)).k) is int
    assert type(Temperature(1).t) is float
    assert MinTokens(2, [5, np.uint8(6)]).ends == (5, 6)


def test_stages_of_different_kinds_differ():
    assert Temperature(0.5) != TopP(0.5)
    assert Temperature(0.5) != TopA(0.5)


def test_stages_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TopK(5).k = 6


def test_a_custom_field_is_named_in_errors():
    with pytest.raises(ParameterError, match=r"^ends must be a list of integers >= 0, got"):
        MinTokens(1, (-1,))
    with pytest.raises(ParameterError, match=r"^min_tokens must be an integer >= 0, got -1"):
        MinTokens(-1)


def test_every_stage_file_is_registered():
    kinds = list(STAGES.values())
    files = Path(stages.__path__[0]).rglob("[a-z]*.py")
    assert {kind.__module__.rpartition(".")[2] for kind in kinds} == {path.stem for path in files}
    assert [kind.rank for kind in kinds] == sorted(kind.rank for kind in kinds)
    for name, kind in STAGES.items():
        assert kind.name == name
        assert (kind.__doc__ or "").strip().splitlines()[0].endswith((".", ";"))


def test_the_listing_of_a_shift_may_only_contain_ids_of_the_vocabulary():
    class Odd(Shift):
        """A stage with an invalid listing."""

        touches = "listed"

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return x + token.listed

        def listing(self, history: History) -> Mapping[int, float]:
            return {-1: 1.0}

    with pytest.raises(ParameterError, match="odd names token -1, but the vocabulary ends at 2"):
        reference.survivors(np.zeros(3, np.float32), (Odd(),))


def test_a_custom_draw_has_its_own_distribution():
    class Last(Draw):
        """The least likely token."""

        uniforms = "none"

        def score(self, x: Any, u: Any) -> Any:
            return -x

    logits = np.array([[3.0, 1.0, 2.0]], np.float32)
    assert nc.sample(logits, (Last(),)).tolist() == [1]
    assert nc.probabilities(logits, (Last(),)).tolist() == [[0, 1, 0]]


def test_a_failing_rule_is_an_error_of_its_row():
    class Broken(Scale):
        """A stage that fails."""

        def apply(self, x: Any, row: RowStats) -> Any:
            return x / 0.0

    with pytest.raises(nc.LogitsError, match="row 0: NaN at token 0 after broken"):
        nc.sample(np.array([[1.0, 0.0]], np.float32), (Broken(),))


def test_a_custom_prefix():
    class Half(Prefix):
        """The first half."""

        def weight(self, x: Any, row: RowStats) -> Any:
            return x * 0 + 1

        def target(self, row: RowStats) -> Any:
            return row.n // 2

    assert nc.probabilities(np.zeros((1, 4)), (Half(),)).tolist() == [[0.5, 0.5, 0, 0]]
    assert nc.probabilities(np.zeros((1, 1)), (Half(),)).tolist() == [[1.0]]


def test_a_custom_prefix_with_its_own_order_that_stops_early():
    class Worst(Prefix):
        """The last tokens, at most two."""

        inclusive = False

        def order(self, x: Any, row: RowStats) -> Any:
            return x

        def weight(self, x: Any, row: RowStats) -> Any:
            return x * 0 + 1

        def target(self, row: RowStats) -> Any:
            return 2.5

    logits = np.log([[4.0, 2.0, 1.0, 1.0]])
    assert nc.probabilities(logits, (Worst(),))[0] == pytest.approx([0, 0, 0.5, 0.5])
    assert nc.probabilities(logits, (Worst(), Greedy())).tolist() == [[0, 0, 1, 0]]  # among equal scores the lowest id
    assert nc.probabilities(logits[:, :1], (Worst(),)).tolist() == [[1.0]]


@pytest.mark.slow
def test_a_custom_ceiling():
    class Roof(Ceiling):
        """Drop tokens at most 2 below the best, in a quarter of the steps."""

        act_probability = 0.25

        def ceiling(self, row: RowStats) -> Any:
            return row.top - 2.0

    assert shape_of(Roof) == "Ceiling"
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    every, rest = (np.exp(x) / np.exp(x).sum() for x in (logits[0], np.array([-np.inf, -np.inf, 0.0, -1.0])))
    assert nc.probabilities(logits, (Roof(),))[0] == pytest.approx(0.75 * every + 0.25 * rest)
    tokens = [nc.sample(logits, (Roof(), Gumbel(seed)))[0] for seed in range(400)]
    assert 10 < np.isin(tokens, (2, 3)).sum() < 390


def test_a_custom_tap_reports_and_changes_nothing():
    class Watch(Tap):
        """Report the best token."""

        @property
        def request(self) -> tuple[int, tuple[int, ...]]:
            return 1, (2,)

    logits = np.array([2.0, 1.0, 0.0], np.float32)
    report = reference.run(logits, (TopK(2), Watch(), Gumbel(1)), 1, 0).logprobs
    assert [one.token_id for one in report.top] == [0]
    assert (report.requested[0].logprob, report.requested[0].rank) == (-np.inf, None)
    assert nc.probabilities(logits[None], (Watch(),)) == pytest.approx(nc.probabilities(logits[None], ()), rel=0)


def test_a_shift_with_a_window_counts_prompt_tokens_as_output():
    class Seen(Shift):
        """One point per occurrence."""

        touches = "output"
        last: int | None = param("window", default=None)

        @property
        def window(self) -> int | None:
            return self.last

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return x + token.output_count

    past = History((0, 1, 1), (1, 2))
    for window, counts in {
        None: [0, 1, 1],
        -1: [1, 3, 1],
        0: [0, 0, 0],
        2: [0, 1, 1],
        4: [0, 3, 1],
        99: [1, 3, 1],
    }.items():
        ids, x, _ = reference.survivors(np.zeros(3, np.float32), (Seen(window),), past)
        assert x[np.argsort(ids)].tolist() == counts


def test_a_shift_cannot_restore_a_masked_token():
    class Same(Shift):
        """Set all scores to the same value."""

        touches = "unlisted"

        def apply(self, x: Any, token: TokenInfo) -> Any:
            return np.zeros_like(x)

    p = reference.probabilities(np.array([1, -np.inf, 3, 2], np.float32), (TopK(2), Same(), Gumbel(0)))
    assert p.tolist() == [0, 0, 0.5, 0.5]


def test_a_stage_is_neutral_only_if_all_its_switches_are_off():
    class Two(Floor):
        """Two switches and a number that is not a switch."""

        a: float = param("a", neutral=0.0, name="a")
        b: int = param("b", neutral=0, off=(-1,), name="b")
        c: float = param("c", default=1.75, name="c")

        def floor(self, row: RowStats) -> Any:
            return row.top - self.a

    assert Two().neutral
    assert Two(b=-1, c=3).neutral
    assert not Two(a=1).neutral
    assert not Two(b=1).neutral


def test_a_stage_without_a_rule_cannot_be_created():
    class Ruleless(Floor):
        """A stage without a rule."""

    with pytest.raises(TypeError, match="abstract method"):
        Ruleless()
