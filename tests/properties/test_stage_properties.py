"""Properties of every stage in the registry, so that a new stage is covered without an edit here."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import stage_examples as examples
from hypothesis import assume, given
from hypothesis import strategies as st
from stage_examples import COMBINES, DRAWS, KINDS, SIZE, SWITCHED, TAPS, TRUNCATIONS, on_every_engine

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling import stages as all_stages
from nucleate.sampling.pipeline import as_pipeline, simplify
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Ceiling, Draw, History, Scale, Shift, Tap, shape_of
from nucleate.sampling.stages import (
    EncoderRepetition,
    Greedy,
    Gumbel,
    Kgw,
    MinP,
    Repetition,
    Temperature,
    TopK,
    TopP,
    Xtc,
)
from nucleate.sampling_params import FIELDS

MASK = examples.masks(7, 1)[0]
HISTORY = History((0, 1, 1, 5, 7), (7, 7, 2, 1), MASK)
DEPENDS_ON_ZERO = {EncoderRepetition, Kgw, Repetition}  # two depend on the sign of a score, one rounds

of_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
of_any_kind = pytest.mark.parametrize("kind", [*KINDS, *COMBINES], ids=lambda kind: kind.name)
of_truncation = pytest.mark.parametrize("kind", TRUNCATIONS, ids=lambda kind: kind.name)


def results(engine, logits, stages, steps=range(2), history=HISTORY):
    """Token, logprobs and stages of some steps; errors as text."""
    try:
        return [engine.run(logits, stages, 99, step, history) for step in steps]
    except reference.RowError as error:
        return str(error)


def draws(engine, logits, stages, steps=range(2), history=HISTORY):
    found = results(engine, logits, stages, steps, history)
    return found if isinstance(found, str) else [result.token for result in found]


def probabilities(engine, logits, stages, history=HISTORY):
    try:
        return engine.probabilities(logits, stages, history)
    except reference.RowError as error:
        return str(error)


def same(one, other):
    return one == other if isinstance(one, str) or isinstance(other, str) else np.array_equal(one, other)


def pipeline_of(stage):
    """The stage as a pipeline."""
    return (stage,) if isinstance(stage, Draw) else (stage, Gumbel(99))


@pytest.mark.fast_cases(8)
@on_every_engine
@pytest.mark.parametrize("kind", SWITCHED, ids=lambda kind: kind.name)
def test_neutral_equals_absent_bit_for_bit(engine, kind):
    around = itertools.cycle([((), ()), ((Temperature(0.7),), (TopP(0.8),)), ((MinP(0.1),), (Temperature(3.0),))])
    assert examples.neutrals(kind)
    for stage, (before, after) in zip((*examples.neutrals(kind),) * 2, around, strict=False):
        assert stage.neutral
        for logits in examples.rows():
            with_it, without = (*before, stage, *after, Gumbel(99)), (*before, *after, Gumbel(99))
            assert simplify(with_it) == without
            assert same(probabilities(engine, logits, with_it), probabilities(engine, logits, without))
            assert draws(engine, logits, with_it, [3]) == draws(engine, logits, without, [3])


@pytest.mark.parametrize(
    "kind", [k for k in (*SWITCHED, *COMBINES) if "key" not in k.parameters], ids=lambda kind: kind.name
)
def test_a_switch_is_off_by_default(kind):
    assert kind().neutral
    assert examples.on(kind)
    assert not any(stage.neutral for stage in examples.on(kind))


@on_every_engine
@of_truncation
@pytest.mark.fast_cases(7)
def test_a_truncation_keeps_a_nonempty_subset_in_order(engine, kind):
    """A prefix, except for stages that remove top tokens or have their own order."""
    for stage in examples.examples(kind):
        for logits in examples.rows():
            for before in ((), (Temperature(5.0),), (MinP(0.2),)):
                for u in (1.0,) if not issubclass(kind, Ceiling) else (2.0**-65, 0.3, 1.0):
                    order = engine.survivors(logits, before).ids_N
                    survivors = engine.survivors(logits, (*before, stage), u=u).ids_N
                    assert len(survivors) >= 1
                    assert (order[np.isin(order, survivors)] == survivors).all()
                    if examples.keeps_the_first(kind):
                        assert (survivors == order[: len(survivors)]).all()


@on_every_engine
@of_truncation
def test_a_truncation_does_not_change_scores(engine, kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            survivors = engine.survivors(logits, (stage,), u=0.01)
            assert (survivors.x_N == logits[survivors.ids_N]).all()
            assert survivors.total == engine.survivors(logits, ()).total


@pytest.mark.slow
@on_every_engine
@of_truncation
def test_a_tighter_parameter_keeps_a_subset(engine, kind):
    """Vary one parameter, with the others active: the surviving sets grow or shrink monotonically over its range."""
    moved = set()
    for attribute, parameter in kind.parameters.items():
        if parameter.kind not in ("float", "int"):
            continue
        values = sorted(v for v in examples.inside(parameter) if not parameter.is_neutral(v))
        for logits in examples.rows(count=12):
            for stages in zip(*(examples.on(kind, **{attribute: value}) for value in values), strict=True):
                survivors = [set(engine.survivors(logits, (stage,), u=0.3).ids_N.tolist()) for stage in stages]
                sizes = [len(ids) for ids in survivors]
                assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)
                assert issubclass(kind, Ceiling) or all(a <= b or b <= a for a in survivors for b in survivors)
                moved |= {attribute} if len(set(sizes)) > 1 else set()
    assert moved or not any(p.kind in ("float", "int") for p in kind.parameters.values())


@pytest.mark.fast_cases(0)
@on_every_engine
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DEPENDS_ON_ZERO], ids=lambda kind: kind.name)
def test_adding_a_constant_to_all_logits_changes_nothing(engine, kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            p, moved = (probabilities(engine, x, pipeline_of(stage)) for x in (logits, logits + np.float32(17)))
            assert moved == pytest.approx(p, abs=1e-12) if not isinstance(p, str) else moved == p
            assert draws(engine, logits, pipeline_of(stage)) == draws(
                engine, logits + np.float32(17), pipeline_of(stage)
            )


@pytest.mark.fast_cases(8)
@on_every_engine
@of_kind
def test_masked_tokens_never_return(engine, kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            for before in ((), (MinP(0.3),)):
                out = np.setdiff1d(np.arange(SIZE), engine.survivors(logits, before, HISTORY).ids_N)
                p = probabilities(engine, logits, (*before, *pipeline_of(stage)))
                if not isinstance(p, str):
                    assert (p[out] == 0).all()
                    assert p.sum() == pytest.approx(1)
                    assert (p[draws(engine, logits, (*before, *pipeline_of(stage)))] > 0).all()


@on_every_engine
@of_kind
def test_only_a_shift_can_empty_a_row(engine, kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            p = probabilities(engine, logits, pipeline_of(stage))
            assert not isinstance(p, str) or (
                issubclass(kind, Shift) and p == f"every token is at -inf after {kind.name}"
            )


@on_every_engine
@pytest.mark.parametrize("kind", [k for k in KINDS if issubclass(k, Scale)], ids=lambda kind: kind.name)
def test_a_monotone_scale_keeps_the_order_and_others_reorder(engine, kind):
    reordered = False
    for stage in examples.examples(kind):
        for logits in examples.rows():
            ids, x, _ = engine.survivors(logits, (stage,))
            assert (np.lexsort((ids, -x)) == np.arange(len(x))).all() or kind.monotone
            order = engine.survivors(logits, ()).ids_N
            assert set(ids) <= set(order)
            reordered |= (ids != order[: len(ids)]).any()
            if kind.monotone:
                assert (np.diff(x) <= 0).all()
    assert reordered != kind.monotone


@pytest.mark.slow
@on_every_engine
@pytest.mark.parametrize("kind", TAPS, ids=lambda kind: kind.name)
def test_a_tap_changes_no_token_and_reports_logprobs_unless_neutral(engine, kind):
    for stage in examples.examples(kind):
        for logits in examples.rows():
            for before, after in (((), ()), ((MinP(0.2), Temperature(0.7)), ()), ((), (MinP(0.2), Xtc(0.5)))):
                got = results(engine, logits, (*before, stage, *after, Gumbel(99)))
                expected = results(engine, logits, (*before, *after, Gumbel(99)))
                assert [one.token for one in got] == [one.token for one in expected]
                assert all(one.stages == (*before, stage, *after, Gumbel(99)) for one in got)
                p = probabilities(engine, logits, (*before, Gumbel(99)))
                for one in got:
                    if stage.neutral:  # unrequested logprobs; simplify removes the stage
                        continue
                    chosen = one.logprobs.chosen
                    assert chosen.token_id == one.token
                    assert math.exp(chosen.logprob) == pytest.approx(p[one.token])


@pytest.mark.fast_cases(0)
@on_every_engine
@of_kind
def test_a_row_does_not_depend_on_its_position_or_other_rows(engine, kind):
    logits, masks = examples.rows(count=5), examples.masks(1, 5)
    prompts, outputs = ([list(ids)] * 15 for ids in HISTORY[:2])
    for stage in examples.examples(kind, most=4):
        stages = stage_with_seed(stage)
        pipeline = with_mask(simplify(stages))
        alone = [
            draws(engine, x, pipeline, [3], HISTORY._replace(mask=mask)) for x, mask in zip(logits, masks, strict=True)
        ]
        good = [row for row in range(5) if not isinstance(alone[row], str)]
        for order in (good, good[::-1], good[2:], good * 3):
            if order:
                past = dict(prompt_ids=prompts[: len(order)], output_ids=outputs[: len(order)])
                got = engine.sample(logits[order], [stages] * len(order), step=3, **past, mask=masks[order])
                assert got.tolist() == [alone[row][0] for row in order]


def stage_with_seed(stage):
    if isinstance(stage, Draw):
        return (dataclasses.replace(stage, seed=99),) if "seed" in stage.parameters else (stage,)
    return pipeline_of(stage)


@pytest.mark.parametrize(
    "kind", [k for k in (*KINDS, *COMBINES) if "key" not in k.parameters], ids=lambda kind: kind.name
)
def test_a_stage_is_a_value(kind):
    found = examples.examples(kind, text=True)
    for stage in found:
        names = {name: getattr(all_stages, name) for name in all_stages.__all__}
        assert eval(repr(stage), names) == stage
        assert pickle.loads(pickle.dumps(stage)) == copy.deepcopy(stage) == copy.copy(stage) == stage
        assert hash(copy.deepcopy(stage)) == hash(stage)
        assert not stage.greedy or len(reference.survivors(examples.rows()[0], (stage,)).ids_N) == 1
    texts = {repr(stage) for stage in found}
    assert len(set(found)) == len(texts)


@of_any_kind
def test_a_public_parameter_reaches_its_stage(kind):
    """The stage gets the requested value; printing, storing and sending it preserves the value."""
    for attribute, parameter in kind.parameters.items():
        if not parameter.public or "key" in kind.parameters:
            continue
        for value in examples.every(parameter, text=True):
            if not examples.valid(kind, {attribute: value}):
                with pytest.raises(ParameterError):
                    nc.SamplingParams(**{parameter.name: value})
                continue
            params = nc.SamplingParams(**{parameter.name: value})
            built = {type(stage): stage for stage in params.build_pipeline()}
            if issubclass(kind, Draw):
                continue
            stage = kind(**{attribute: value})
            assert stage.neutral == (kind not in built)
            if not stage.neutral:
                assert getattr(built[kind], attribute) == getattr(stage, attribute)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_survives_printing_and_json(name):
    made = 0
    for value in examples.every(FIELDS[name], text=True):
        try:
            params = nc.SamplingParams(**{name: value})
        except ParameterError:  # a field that needs another one
            continue
        made += 1
        assert nc.SamplingParams.from_json(params.to_json()) == params
        names = {"SamplingParams": nc.SamplingParams, "StructuredOutputs": nc.StructuredOutputs, **vars(all_stages)}
        assert eval(repr(params), names) == params
        assert pickle.loads(pickle.dumps(params)) == params
        assert hash(nc.SamplingParams.from_json(params.to_json())) == hash(params)
    assert made


@st.composite
def pipelines(draw, text=False):
    kinds = draw(st.lists(st.sampled_from([k for k in KINDS if k not in DRAWS and k not in TAPS]), max_size=5))
    stages = [draw(st.sampled_from(examples.examples(kind, text=text))) for kind in kinds]
    for tap in draw(st.lists(st.sampled_from(TAPS), max_size=1)):
        stages.insert(draw(st.integers(0, len(stages))), draw(st.sampled_from(examples.examples(tap))))
    return (*stages, draw(st.sampled_from([s for kind in DRAWS for s in examples.examples(kind, most=3)])))


@on_every_engine
@given(pipelines(), st.integers(0, 50), st.integers(0, 2**64 - 1))
def test_simplify_does_not_change_tokens_logprobs_and_probabilities(engine, stages, seed, step):
    for logits in examples.rows(seed, count=3):
        short = simplify(stages)
        assert simplify(short) == short
        assert len(short) <= len(stages)
        assert isinstance(short[-1], Draw)
        before, after = probabilities(engine, logits, stages), probabilities(engine, logits, short)
        assert isinstance(before, str) == isinstance(after, str)
        if not isinstance(before, str):
            assert np.array_equal(before, after)
        got, expected = results(engine, logits, short, [step]), results(engine, logits, stages, [step])
        assert isinstance(got, str) == isinstance(expected, str)
        if not isinstance(got, str):
            assert got[0].token == expected[0].token
            requested = any(isinstance(stage, Tap) and not stage.neutral for stage in stages)
            assert got[0].logprobs == (expected[0].logprobs if requested else None)
            if not any(stage.greedy for stage in stages):
                assert got[0].stages == tuple(s for s in expected[0].stages if not s.neutral)


@pytest.mark.fast_cases(0)
@on_every_engine
@of_kind
def test_stages_that_can_change_the_first_token_stay_before_greedy(engine, kind):
    """Stages that cannot change the first token are removed; a shift after it stays, and may leave no token."""
    if issubclass(kind, Draw | Tap):
        return
    moved = False
    for stage in examples.on(kind) if kind in SWITCHED else [kind()]:
        for greedy in ((Temperature(0.0), Gumbel(3)), (TopK(1), Gumbel(3)), (Greedy(),)):
            for stages in (
                (stage, *greedy),
                (Temperature(0.5), stage, MinP(0.1), *greedy),
                (*greedy[:-1], stage, greedy[-1]),
            ):
                for logits in examples.rows():
                    got = draws(engine, logits, simplify(stages), range(6))
                    assert got == draws(engine, logits, stages, range(6))
                    moved |= not isinstance(got, str) and set(got) != {int(reference.all_tokens(logits).ids_N[0])}
            if examples.keeps_the_first(kind):
                assert simplify((stage, *greedy)) == (Greedy(),)
    assert issubclass(kind, Shift) or moved != examples.keeps_the_first(kind)


@given(pipelines(text=True))
def test_a_pipeline_is_a_value(stages):
    assume(not any("key" in stage.parameters for stage in stages))  # keys are not printed
    assert as_pipeline(stages) == stages
    assert eval(repr(stages), vars(all_stages)) == stages
    text = str(nc.explain(stages))
    assert all(repr(stage) in text for stage in stages)
    assert all(shape_of(stage).lower() in text for stage in stages)


@on_every_engine
@given(
    st.lists(st.floats(width=32, allow_nan=False, max_value=3.0000000054977558e38), min_size=1, max_size=20),
    pipelines(),
)
def test_any_logits_give_a_distribution_or_an_error(engine, logits, stages):
    try:
        p = engine.probabilities(np.array([*logits, *[-np.inf] * (SIZE - len(logits))], np.float32), stages, HISTORY)
    except reference.RowError:
        return
    assert np.isfinite(p).all()
    assert p.min() >= 0
    assert math.fsum(p) == pytest.approx(1)


@on_every_engine
@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, Ceiling)], ids=lambda kind: kind.name)
def test_a_ceiling_removes_the_first_tokens_except_the_last_and_exempt_ones(engine, kind):
    dropped = 0
    for stage in (*examples.examples(kind, most=40), *examples.on(kind, exempt=(1, 5, SIZE - 1), threshold=0.05)):
        for logits in examples.rows():
            order = engine.survivors(logits, ()).ids_N.tolist()
            survivors = engine.survivors(logits, (stage,), u=2.0**-65).ids_N.tolist()
            out = [token for token in order if token not in survivors]
            assert not set(out) & set(stage.exempt_ids)
            if out:  # the last survivor before the removed tokens is at the threshold
                assert order.index(out[-1]) + 1 < len(order)
                before = order[: order.index(out[-1])]
                assert all(token in out or token in stage.exempt_ids for token in before)
                dropped += len(out)
            assert engine.survivors(logits, (stage,), u=stage.act_probability).ids_N.tolist() == order
    assert dropped


@on_every_engine
def test_probabilities_with_xtc_average_over_both_outcomes(engine):
    for logits in examples.rows(3):
        for stage in (Xtc(0.25, 0.05), Xtc(0.7, 0.01, (1, 5)), Xtc(1.0, 0.02), Xtc(0.999, 0.0)):
            around = (Temperature(0.7), stage, TopP(0.9), Gumbel(0))
            always = tuple(dataclasses.replace(s, probability=1.0) if s is stage else s for s in around)
            never = tuple(s for s in around if s is not stage)
            p = stage.probability * probabilities(engine, logits, always) + (1 - stage.probability) * probabilities(
                engine, logits, never
            )
            assert nc.probabilities(logits[None], around, backend=engine.name)[0] == pytest.approx(p, abs=1e-12)
        both = (Xtc(0.25, 0.05), Temperature(0.5), Xtc(0.75, 0.02), Gumbel(0))  # one random decision for both
        three = [(*both[:1], *both[1:]), both[1:], (*both[1:2], *both[3:])]
        forced = [tuple(dataclasses.replace(s, probability=1.0) if isinstance(s, Xtc) else s for s in p) for p in three]
        parts = [probabilities(engine, logits, pipeline) for pipeline in forced]
        p = 0.25 * parts[0] + 0.5 * parts[1] + 0.25 * parts[2]
        assert nc.probabilities(logits[None], both, backend=engine.name)[0] == pytest.approx(p, abs=1e-12)
