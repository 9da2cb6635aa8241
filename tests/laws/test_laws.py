"""What holds for every stage: found in the registry, so that a new stage is covered with no edit here."""

from __future__ import annotations

import copy
import math
import pickle

import examples
import numpy as np
import pytest
from examples import DRAWS, KINDS, SIZE, SWITCHED, TRUNCATIONS
from hypothesis import given
from hypothesis import strategies as st

import nucleate as nc
from nucleate import stages as all_stages
from nucleate.backends import reference
from nucleate.core.stage import Draw, History, Shift, shape_of
from nucleate.pipeline import as_pipeline, from_json, simplify, to_json
from nucleate.stages import Gumbel, MinP, Repetition, Temperature, TopP

HISTORY = History((0, 1, 1, 5, 7), (7, 7, 2, 1))
DEPENDS_ON_ZERO = {Repetition}  # divides what is above 0 and multiplies what is below

of_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
of_truncation = pytest.mark.parametrize("kind", TRUNCATIONS, ids=lambda kind: kind.name)


def draws(logits, stages, steps=range(4), history=HISTORY):
    """The tokens of some steps; errors in words."""
    try:
        return [reference.draw(logits, stages, 99, step, history) for step in steps]
    except reference.RowError as error:
        return str(error)


def probabilities(logits, stages, history=HISTORY):
    try:
        return reference.probabilities(logits, stages, history)
    except reference.RowError as error:
        return str(error)


def same(one, other):
    return one == other if isinstance(one, str) or isinstance(other, str) else np.array_equal(one, other)


def whole(stage):
    """The stage as a pipeline."""
    return (stage,) if isinstance(stage, Draw) else (stage, Gumbel(99))


@pytest.mark.parametrize("kind", SWITCHED, ids=lambda kind: kind.name)
def test_neutral_is_bit_equal_to_absent(kind):
    assert examples.neutrals(kind)
    for stage in examples.neutrals(kind):
        assert stage.neutral
        for logits in examples.rows():
            for before, after in (((), ()), ((Temperature(0.7),), (TopP(0.8),)), ((MinP(0.1),), (Temperature(3.0),))):
                with_it, without = (*before, stage, *after, Gumbel(99)), (*before, *after, Gumbel(99))
                assert simplify(with_it) == without
                assert same(probabilities(logits, with_it), probabilities(logits, without))
                assert draws(logits, with_it) == draws(logits, without)


@pytest.mark.parametrize("kind", SWITCHED, ids=lambda kind: kind.name)
def test_a_switch_is_off_unless_it_is_set(kind):
    assert kind().neutral


@of_truncation
def test_a_truncation_keeps_a_prefix_that_is_never_empty(kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            for before in ((), (Temperature(5.0),), (MinP(0.2),)):
                order = reference.survivors(logits, before).ids_N
                kept = reference.survivors(logits, (*before, stage)).ids_N
                assert len(kept) >= 1
                assert (kept == order[: len(kept)]).all()


@of_truncation
def test_a_truncation_does_not_change_scores(kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            ids, x = reference.survivors(logits, (stage,))
            assert (x == logits[ids]).all()


@of_truncation
def test_a_tighter_parameter_keeps_a_subset(kind):
    """Of one parameter, with the others at a value that switches them on: kept sets grow, or shrink, over its range."""
    for attribute, parameter in kind.parameters.items():
        if parameter.kind not in ("float", "int"):
            continue
        values = sorted(v for v in examples.inside(parameter) if not parameter.is_neutral(v))
        for logits in examples.rows(count=12):
            sizes = [len(reference.survivors(logits, (kind(**{attribute: value}),)).ids_N) for value in values]
            assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)
            assert max(sizes) <= len(reference.survivors(logits, ()).ids_N)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DEPENDS_ON_ZERO], ids=lambda kind: kind.name)
def test_a_constant_added_to_all_logits_changes_nothing(kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            p, moved = (probabilities(x, whole(stage)) for x in (logits, logits + np.float32(17)))
            assert moved == pytest.approx(p, abs=1e-12) if not isinstance(p, str) else moved == p
            assert draws(logits, whole(stage)) == draws(logits + np.float32(17), whole(stage))


@of_kind
def test_what_is_out_never_returns(kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            for before in ((), (MinP(0.3),)):
                out = np.setdiff1d(np.arange(SIZE), reference.survivors(logits, before, HISTORY).ids_N)
                p = probabilities(logits, (*before, *whole(stage)))
                if not isinstance(p, str):
                    assert (p[out] == 0).all()
                    assert p.sum() == pytest.approx(1)
                    assert (p[draws(logits, (*before, *whole(stage)))] > 0).all()


@of_kind
def test_only_a_shift_can_empty_a_row(kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            p = probabilities(logits, whole(stage))
            assert not isinstance(p, str) or (
                issubclass(kind, Shift) and p == f"every token is at -inf after {kind.name}"
            )


@of_kind
def test_a_row_does_not_depend_on_its_place_or_neighbours(kind):
    logits = examples.rows(count=5)
    prompts = [list(HISTORY.prompt)] * 5
    for stage in examples.examples(kind, most=8):
        stages = stage_with_seed(stage)
        alone = [draws(row, simplify(stages), [3]) for row in logits]
        good = [row for row in range(5) if not isinstance(alone[row], str)]
        for order in (good, good[::-1], good[2:], good * 3):
            if order:
                got = nc.sample(
                    logits[order],
                    [stages] * len(order),
                    step=3,
                    prompt_ids=[prompts[0]] * len(order),
                    output_ids=[list(HISTORY.output)] * len(order),
                )
                assert got.tolist() == [alone[row][0] for row in order]


def stage_with_seed(stage):
    if isinstance(stage, Draw):
        return (type(stage)(99),) if "seed" in stage.parameters else (stage,)
    return whole(stage)


def test_rows_of_all_kinds_share_a_batch():
    pipelines = [stage_with_seed(stage) for kind in KINDS for stage in examples.examples(kind, most=3)]
    logits = np.repeat(examples.rows(count=1, seed=4), len(pipelines), axis=0)
    logits[:, 1] = 20.0
    expected, kept = [], []
    for place, stages in enumerate(pipelines):
        got = draws(logits[place], simplify(stages), [0], History())
        if not isinstance(got, str):
            expected.append(got[0])
            kept.append(place)
    assert nc.sample(logits[kept], [pipelines[place] for place in kept]).tolist() == expected


@of_kind
def test_a_stage_is_a_value(kind):
    found = examples.examples(kind)
    for stage in found:
        names = {name: getattr(all_stages, name) for name in all_stages.__all__}
        assert eval(repr(stage), names) == stage
        assert pickle.loads(pickle.dumps(stage)) == copy.deepcopy(stage) == copy.copy(stage) == stage
        assert hash(copy.deepcopy(stage)) == hash(stage)
        assert from_json(to_json((stage,))) == (stage,)
        assert repr(from_json(to_json((stage,)))[0]) == repr(stage)
        assert not stage.greedy or len(reference.survivors(examples.rows()[0], (stage,)).ids_N) == 1
    texts = {to_json((stage,)) for stage in found}
    assert len(set(found)) == len(texts)


@of_kind
def test_a_public_parameter_reaches_its_stage(kind):
    """What a request says is what the stage gets, and what it prints, stores and sends is the same again."""
    for parameter in kind.parameters.values():
        if not parameter.public:
            continue
        for value in examples.every(parameter):
            params = nc.SamplingParams(**{parameter.name: value})
            assert nc.SamplingParams.from_json(params.to_json()) == params
            assert eval(repr(params), {"SamplingParams": nc.SamplingParams}) == params
            built = {type(stage): stage for stage in params.pipeline()}
            if issubclass(kind, Draw):
                continue
            attribute = next(a for a, p in kind.parameters.items() if p is parameter)
            stage = kind(**{attribute: value})
            assert stage.neutral == (kind not in built)
            if not stage.neutral:
                assert getattr(built[kind], attribute) == getattr(stage, attribute)


@st.composite
def pipelines(draw):
    others = [kind for kind in KINDS if kind not in DRAWS]
    kinds = draw(st.lists(st.sampled_from(others), max_size=5))
    stages = [draw(st.sampled_from(examples.examples(kind))) for kind in kinds]
    return (*stages, draw(st.sampled_from([s for kind in DRAWS for s in examples.examples(kind, most=3)])))


@given(pipelines(), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_simplify_keeps_draws_and_probabilities(stages, seed, step):
    for logits in examples.rows(seed, count=3):
        short = simplify(stages)
        assert simplify(short) == short
        assert len(short) <= len(stages)
        assert isinstance(short[-1], Draw)
        before, after = probabilities(logits, stages), probabilities(logits, short)
        assert isinstance(before, str) == isinstance(after, str)
        if not isinstance(before, str):
            assert np.array_equal(before, after)
        got, expected = draws(logits, short, [step]), draws(logits, stages, [step])
        assert got == expected or isinstance(before, str)


@given(pipelines())
def test_a_pipeline_is_a_value(stages):
    assert as_pipeline(stages) == stages
    assert from_json(to_json(stages)) == stages
    assert to_json(from_json(to_json(stages))) == to_json(stages)
    assert hash(from_json(to_json(stages))) == hash(stages)
    assert eval(repr(stages), vars(all_stages)) == stages
    text = str(nc.explain(stages))
    assert all(repr(stage) in text for stage in stages)
    assert all(shape_of(stage).lower() in text for stage in stages)


@given(
    st.lists(st.floats(width=32, allow_nan=False, max_value=3.0000000054977558e38), min_size=1, max_size=20),
    pipelines(),
)
def test_any_logits_give_a_distribution_or_a_reason(logits, stages):
    try:
        p = reference.probabilities(np.array([*logits, *[-np.inf] * (SIZE - len(logits))], np.float32), stages, HISTORY)
    except reference.RowError:
        return
    assert np.isfinite(p).all()
    assert p.min() >= 0
    assert math.fsum(p) == pytest.approx(1)
