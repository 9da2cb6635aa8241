"""What holds for a request in any order of the stages: every preset, and orders of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random

import numpy as np
import pytest
import stage_examples as examples
import tiers
from backend_adapters import on_every_engine
from hypothesis import given
from hypothesis import strategies as st
from stage_examples import DRAWS, KINDS, SIZE, TAPS

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.backends import reference
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.presets import PRESETS, REQUESTABLE
from nucleate.sampling.stage import Ceiling, Floor, History, Prefix, Scale, Shift, Tap
from nucleate.sampling.stages import STAGES, Greedy, Mask, Mirostat, TopK, TopP

HISTORY = History((0, 1, 1, 5, 7), (7, 7, 2, 1), examples.masks(7, 1)[0])
REORDERS = [name for name, kind in STAGES.items() if issubclass(kind, Scale) and not kind.monotone]
DRAW_NAMES = [kind.name for kind in DRAWS]

in_every_preset = pytest.mark.parametrize("order", PRESETS)


def placed(order):
    """What an order has: {stage name: what it is given}."""
    entries = PRESETS[order] if isinstance(order, str) else order
    return {
        entry if isinstance(entry, str) else entry[0]: {} if isinstance(entry, str) else entry[1] for entry in entries
    }


def fields(numbers, names, share=0.5):
    """Random values for the fields of some stages, which do not contradict each other."""
    values = {}
    for name in names:
        if numbers.random() < share:
            stage = numbers.choice(examples.examples(STAGES[name]))
            public = {p.name: getattr(stage, a) for a, p in stage.parameters.items() if p.public}
            values.update({field: value for field, value in public.items() if field not in values})
    return values


def asked(**values):
    """The parameters, without mirostat where they are greedy: that is an error."""
    with contextlib.suppress(ParameterError):
        return nc.SamplingParams(**values)
    return nc.SamplingParams(**{**values, "mirostat_tau": 0.0})


@st.composite
def requests(draw):
    """A SamplingParams with a random order and random values for the stages that have a place in it."""
    numbers = random.Random(draw(st.integers(0, 2**32)))
    own = tuple(numbers.sample(REQUESTABLE, numbers.randrange(len(REQUESTABLE))))
    order = draw(st.sampled_from([*PRESETS, own]))
    values = fields(numbers, [name for name in placed(order) if name in REQUESTABLE], numbers.choice([0.1, 0.4, 1.0]))
    values.pop("penalty_last_n", None)
    if draw(st.booleans()):
        values["penalty_last_n"] = numbers.choice([-1, 0, 1, 3, 100])
    tap = numbers.choice(
        [{}, {"logprobs": 3}, {"logprobs": 0, "logprob_token_ids": (5, 1)}, {"logprob_token_ids": (39,)}]
    )
    mode = numbers.choice(["raw", "processed"])
    return asked(
        order=order, draw=numbers.choice(DRAW_NAMES), seed=numbers.getrandbits(64), logprobs_mode=mode, **values, **tap
    )


def result(engine, logits, stages, seed, step):
    try:
        return engine.run(logits, stages, seed, step, HISTORY)
    except reference.RowError as error:
        return str(error)


def agree(one, other):
    """The same draw and report, or both an error."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) == isinstance(other, str)
    return one[:2] == other[:2]


@given(requests())
def test_stages_stand_in_the_order_and_have_what_was_said(params):
    where, stages = placed(params.order), params.pipeline()
    inner = [stage for stage in stages if stage.name in REQUESTABLE]
    names = [stage.name for stage in inner]
    assert names == [name for name in where if name in names]
    assert stages[-1].name == params.draw
    for stage in inner:
        for attribute, parameter in stage.parameters.items():
            if parameter.public:
                said = getattr(params, parameter.name)
                unset = said == parameter.default or said in parameter.off
                expected = where[stage.name].get(attribute, said) if unset else said
                made = STAGES[stage.name](**{**stage_values(stage), attribute: expected})
                assert getattr(stage, attribute) == getattr(made, attribute)
    taps = [place for place, stage in enumerate(stages) if isinstance(stage, Tap)]
    asked = params.logprobs is not None or params.logprob_token_ids
    assert taps == ([] if not asked else [0] if params.logprobs_mode == "raw" else [len(stages) - 2])


def stage_values(stage):
    return {attribute: getattr(stage, attribute) for attribute in stage.parameters}


@on_every_engine
@given(requests(), st.integers(0, 50))
@pytest.mark.fast_cases(1)
def test_neutral_stages_and_simplify_keep_draws_and_reports(engine, params, step):
    stages = params.pipeline()
    numbers = random.Random(step)
    crowded = list(stages)
    for kind in KINDS:
        if kind not in (*DRAWS, *TAPS, Mask):
            crowded.insert(numbers.randrange(len(crowded)), numbers.choice(examples.neutrals(kind)))
    for logits in examples.rows(step):
        expected = result(engine, logits, stages, params.seed, step)
        more = result(engine, logits, tuple(crowded), params.seed, step)
        assert more == expected if isinstance(expected, str) else more[:2] == expected[:2]
        assert agree(result(engine, logits, simplify(stages), params.seed, step), expected)
        assert agree(result(engine, logits, simplify(tuple(crowded)), params.seed, step), expected)


@given(requests())
def test_a_request_survives_json_and_so_does_its_pipeline(params):
    assert nc.SamplingParams.from_json(params.to_json()) == params
    assert eval(repr(params), {"SamplingParams": nc.SamplingParams}) == params
    stages = params.pipeline(end_ids=(1, 2))
    assert nc.SamplingParams.from_json(params.to_json()).pipeline(end_ids=(1, 2)) == stages


@in_every_preset
def test_every_preset_is_an_order_of_stages_that_are_there_once(order):
    names = [entry if isinstance(entry, str) else entry[0] for entry in PRESETS[order]]
    assert len(set(names)) == len(names)
    for name, given_values in placed(order).items():
        assert not issubclass(STAGES[name], (*DRAWS, *TAPS))
        STAGES[name](**given_values)
    assert nc.SamplingParams(order=order, seed=3).pipeline()[-1] == STAGES["gumbel"](3)


@in_every_preset
def test_a_stage_without_a_place_is_refused_and_one_with_a_place_is_not(order):
    for name in REQUESTABLE:
        for stage in examples.on(STAGES[name])[:2]:
            values = {p.name: getattr(stage, a) for a, p in stage.parameters.items() if p.public}
            if name in placed(order):
                assert nc.SamplingParams(order=order, **values).order == order
            else:
                with pytest.raises(
                    ParameterError, match=f"does not include {name}, which this request enables"
                ) as told:
                    nc.SamplingParams(order=order, **values)
                assert told.value.field == "order"


def test_the_canonical_order_has_a_place_for_everything():
    expected = [name for name, kind in STAGES.items() if kind not in (*DRAWS, *TAPS, Mask)]
    assert list(placed("canonical")) == list(REQUESTABLE) == expected


@pytest.mark.parametrize("name", [*DRAW_NAMES, "logprobs", "mask", "top_q", ""])
def test_an_order_does_not_name_a_draw_or_a_tap_or_nothing(name):
    with pytest.raises(ParameterError) as told:
        nc.SamplingParams(order=("top_k", name))
    assert told.value.field in ("order", name)


def test_an_order_names_a_stage_once():
    with pytest.raises(ParameterError, match="order has top_k twice"):
        nc.SamplingParams(order=("top_k", "top_p", "top_k"))


def test_presets_keep_what_their_engine_gives_unless_the_request_says_so():
    def found(kind, **values):
        return [stage for stage in nc.SamplingParams(**values).pipeline() if isinstance(stage, kind)]

    assert found(TopK, order="akunu") == [TopK(256)]
    assert found(TopK, order="akunu", top_k=-1) == [TopK(256)]
    assert found(TopK, order="akunu", top_k=7) == [TopK(7)]
    assert found(TopP, order="akunu", top_p=0.5) == [TopP(0.5, of_full_mass=True)]
    assert found(TopP, order="akunu") == []
    assert found(TopK, order="hf", top_k=3) == [TopK(3, with_ties=True)]
    for name, field in (("repetition", "repetition_penalty"), ("frequency", "frequency_penalty")):
        assert found(STAGES[name], order="llama.cpp", **{field: 1.5}) == [STAGES[name](1.5, last_n=64)]
        assert found(STAGES[name], order="llama.cpp", **{field: 1.5}, penalty_last_n=3) == [STAGES[name](1.5, last_n=3)]
        assert found(STAGES[name], **{field: 1.5}) == [STAGES[name](1.5)]
    assert found(Mirostat, mirostat_tau=5.0) == [Mirostat(5.0, mu=10.0)]


GREEDY = [{"temperature": 0}, {"top_k": 1}, {"draw": "greedy"}]


@on_every_engine
@in_every_preset
@pytest.mark.parametrize("greedy", GREEDY, ids=lambda one: next(iter(one)))
@pytest.mark.fast_cases(22)
def test_a_greedy_request_takes_the_best_token_of_the_shifted_row_whatever_else_it_says(engine, order, greedy):
    """Typical and XTC included; adaptive-p, no truncation, makes a new order before a greedy draw."""
    numbers, seen = random.Random(order), set()
    names = [name for name in placed(order) if name in REQUESTABLE]
    if "draw" in greedy:
        names = [name for name in names if name not in REORDERS]
    for turn in range(tiers.count(8, 24)):
        values = {**fields(numbers, names, 1.0 if turn % 2 else 0.5), **greedy}
        if greedy != {"temperature": 0}:
            values["temperature"] = 0.7 if numbers.random() < 0.5 else 0.0
        params = asked(order=order, seed=turn, **values)
        stages = params.pipeline(end_ids=(1, 2))
        assert not any(isinstance(s, Floor | Prefix | Ceiling) and not s.greedy for s in stages)
        for logits in examples.rows(turn):
            shifts = tuple(stage for stage in stages if isinstance(stage, Shift))
            shifted = result(engine, logits, (*shifts, Greedy()), turn, 5)
            if isinstance(shifted, str):
                assert result(engine, logits, stages, turn, 5) == shifted
                continue
            best = shifted.token
            assert result(engine, logits, stages, turn, 5).token == best
            assert result(engine, logits, simplify(stages), turn, 5).token == best
            seen.add(best)
    assert len(seen) > tiers.count(3, 5)


@on_every_engine
@pytest.mark.parametrize("greedy", GREEDY, ids=lambda one: next(iter(one)))
def test_a_greedy_request_with_an_order_of_its_own_is_not_changed_by_any_truncation(engine, greedy):
    numbers = random.Random(8)
    cuts = [kind.name for kind in KINDS if issubclass(kind, Floor | Prefix | Ceiling)]
    for turn in range(tiers.count(10, 30)):
        order = tuple(numbers.sample(REQUESTABLE, len(REQUESTABLE)))
        values = {"temperature": 0.5, **fields(numbers, order, 0.7)}
        values = {**values, "top_k": max(2, values.get("top_k", 0)), **greedy}  # 1 would be greedy of its own
        plain = {field: value for field, value in values.items() if not any(field in of(name) for name in cuts)}
        plain |= greedy
        params, without = (asked(order=order, seed=turn, **v) for v in (values, plain))
        for logits in examples.rows(turn):
            assert agree(
                result(engine, logits, params.pipeline(), turn, 5), result(engine, logits, without.pipeline(), turn, 5)
            )


def of(name):
    """The public fields of a stage."""
    return {p.name for p in STAGES[name].parameters.values() if p.public}


def test_the_order_of_two_truncations_can_matter():
    """So that the tests above are not about orders that are all the same."""
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    both = {"top_p": 0.65, "top_k": 3, "min_p": 0.3}
    kept = {
        order: np.count_nonzero(nc.probabilities(logits, nc.SamplingParams(order=order, **both)))
        for order in itertools.permutations(("top_k", "top_p", "min_p"))
    }
    assert set(kept.values()) == {2}
    hot = {"temperature": 3.0, "min_p": 0.5}
    first, last = (nc.SamplingParams(order=o, **hot) for o in (("temperature", "min_p"), ("min_p", "temperature")))
    assert np.count_nonzero(nc.probabilities(logits, first)) == 4
    assert np.count_nonzero(nc.probabilities(logits, last)) == 3


@on_every_engine
def test_a_mask_may_stand_anywhere_in_a_pipeline(engine):
    mask, logits = np.array([[0b0101]], np.int32), np.zeros((1, 4), np.float32)
    assert nc.probabilities(logits, (TopK(2), Greedy()), mask=mask, backend=engine.name).tolist() == [[1, 0, 0, 0]]
    assert nc.probabilities(logits, (TopK(2),), mask=mask, backend=engine.name).tolist() == [[0.5, 0, 0.5, 0]]
    assert nc.probabilities(logits, (TopK(2), Mask()), mask=mask, backend=engine.name).tolist() == [[1, 0, 0, 0]]


@on_every_engine
@given(requests(), st.integers(0, 50))
def test_probabilities_are_of_the_tokens_that_can_be_drawn(engine, params, step):
    stages = params.pipeline()
    for logits in examples.rows(step, count=2):
        try:
            p = engine.probabilities(logits, stages, HISTORY)
        except reference.RowError:
            continue
        assert p.shape == (SIZE,)
        assert p.sum() == pytest.approx(1)
        assert p[result(engine, logits, stages, params.seed, step).token] > 0
        assert dataclasses.is_dataclass(stages[-1])
