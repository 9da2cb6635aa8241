"""Properties of requests in any stage order: every preset and custom orders."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import stage_examples as examples
import tiers
from hypothesis import given
from hypothesis import strategies as st
from stage_examples import COMBINES, DRAWS, KINDS, TAPS, on_every_engine

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import reference
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.presets import PRESETS, REQUESTABLE
from nucleate.sampling.stage import Ceiling, Floor, History, Prefix, Scale, Shift, Tap
from nucleate.sampling.stages import STAGES, Greedy, Mask, Mirostat, TopK, TopP

HISTORY = History((0, 1, 1, 5, 7), (7, 7, 2, 1), examples.masks(7, 1)[0])
REORDERS = [name for name, kind in STAGES.items() if issubclass(kind, Scale) and not kind.monotone]
DRAW_NAMES = [kind.name for kind in DRAWS if "key" not in kind.parameters]

in_every_preset = pytest.mark.parametrize("order", PRESETS)


def placed(order):
    """The stages of an order: {stage name: arguments}."""
    entries = PRESETS[order] if isinstance(order, str) else order
    return {
        entry if isinstance(entry, str) else entry[0]: {} if isinstance(entry, str) else entry[1] for entry in entries
    }


def fields(rng, names, share=0.5):
    """Random values for the fields of some stages, without contradictions."""
    values = {}
    for name in names:
        if rng.random() < share:
            stage = rng.choice(examples.examples(STAGES[name]))
            public = {p.name: getattr(stage, a) for a, p in stage.parameters.items() if p.public}
            values.update({field: value for field, value in public.items() if field not in values})
    return values


def sampling_params(**values):
    """The parameters, without mirostat where they are greedy, which would be an error."""
    with contextlib.suppress(ParameterError):
        return nc.SamplingParams(**values)
    return nc.SamplingParams(**{**values, "mirostat_tau": 0.0, "mirostat_v1_tau": 0.0})


@st.composite
def requests(draw):
    """A SamplingParams with a random order and random values for the stages in it."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    own = tuple(rng.sample(REQUESTABLE, rng.randrange(len(REQUESTABLE))))
    order = draw(st.sampled_from([*PRESETS, own]))
    values = fields(rng, [name for name in placed(order) if name in REQUESTABLE], rng.choice([0.1, 0.4, 1.0]))
    values.pop("penalty_last_n", None)
    if draw(st.booleans()):
        values["penalty_last_n"] = rng.choice([-1, 0, 1, 3, 100])
    tap = rng.choice([{}, {"logprobs": 3}, {"logprobs": 0, "logprob_token_ids": (5, 1)}, {"logprob_token_ids": (39,)}])
    mode = rng.choice(["raw", "processed"])
    return sampling_params(
        order=order, draw=rng.choice(DRAW_NAMES), seed=rng.getrandbits(64), logprobs_mode=mode, **values, **tap
    )


def result(engine, logits, stages, seed, step):
    try:
        return engine.run(logits, stages, seed, step, HISTORY)
    except reference.RowError as error:
        return str(error)


def agree(one, other):
    """Whether both have the same token and logprobs, or both are errors."""
    if isinstance(one, str) or isinstance(other, str):
        return isinstance(one, str) == isinstance(other, str)
    return one[:2] == other[:2]


@given(requests())
def test_stages_follow_the_order_and_get_the_requested_values(params):
    stages_of_order, stages = placed(params.order), params.build_pipeline()
    inner = [stage for stage in stages if stage.name in REQUESTABLE]
    names = [stage.name for stage in inner]
    assert names == [name for name in stages_of_order if name in names]
    assert stages[-1].name == params.draw
    for stage in inner:
        for attribute, parameter in stage.parameters.items():
            if parameter.public:
                requested = getattr(params, parameter.name)
                unset = requested == parameter.default or requested in parameter.off
                expected = stages_of_order[stage.name].get(attribute, requested) if unset else requested
                made = STAGES[stage.name](**{**stage_values(stage), attribute: expected})
                assert getattr(stage, attribute) == getattr(made, attribute)
    taps = [place for place, stage in enumerate(stages) if isinstance(stage, Tap)]
    with_logprobs = params.logprobs is not None or params.logprob_token_ids
    assert taps == ([] if not with_logprobs else [0] if params.logprobs_mode == "raw" else [len(stages) - 2])


def stage_values(stage):
    return {attribute: getattr(stage, attribute) for attribute in stage.parameters}


@given(requests())
def test_a_request_and_its_pipeline_survive_json(params):
    assert nc.SamplingParams.from_json(params.to_json()) == params
    assert eval(repr(params), {"SamplingParams": nc.SamplingParams}) == params
    stages = params.build_pipeline(end_ids=(1, 2))
    assert nc.SamplingParams.from_json(params.to_json()).build_pipeline(end_ids=(1, 2)) == stages


@in_every_preset
def test_every_preset_is_an_order_without_duplicates(order):
    names = [entry if isinstance(entry, str) else entry[0] for entry in PRESETS[order]]
    assert len(set(names)) == len(names)
    for name, given_values in placed(order).items():
        assert not issubclass(STAGES[name], (*DRAWS, *TAPS))
        STAGES[name](**given_values)
    assert nc.SamplingParams(order=order, seed=3).build_pipeline()[-1] == STAGES["gumbel"](3)


@in_every_preset
def test_a_stage_is_rejected_exactly_if_the_order_has_no_position_for_it(order):
    for name in REQUESTABLE:
        for stage in examples.on(STAGES[name])[:2]:
            values = {p.name: getattr(stage, a) for a, p in stage.parameters.items() if p.public}
            if name in placed(order):
                assert nc.SamplingParams(order=order, **values).order == order
            else:
                with pytest.raises(
                    ParameterError, match=f"does not include {name}, which this request enables"
                ) as caught:
                    nc.SamplingParams(order=order, **values)
                assert caught.value.field == "order"


def test_the_canonical_order_contains_every_stage():
    others = {name: kind for name, kind in STAGES.items() if kind not in (*COMBINES, *DRAWS, *TAPS, Mask)}
    expected = [name for name, kind in others.items() if "key" not in kind.parameters]
    assert list(placed("canonical")) == list(REQUESTABLE) == expected


def test_presets_use_their_engines_defaults_unless_the_request_overrides_them():
    def found(kind, **values):
        return [stage for stage in nc.SamplingParams(**values).build_pipeline() if isinstance(stage, kind)]

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
@pytest.mark.fast_cases(8)
def test_a_greedy_request_selects_the_highest_shifted_score(engine, order, greedy):
    """Includes typical and XTC; adaptive-p is excluded: it is no truncation and reorders the tokens."""
    rng, seen = random.Random(order), set()
    names = [name for name in placed(order) if name in REQUESTABLE]
    if "draw" in greedy:
        names = [name for name in names if name not in REORDERS]
    for turn in range(tiers.count(8, 24)):
        values = {**fields(rng, names, 1.0 if turn % 2 else 0.5), **greedy}
        if greedy != {"temperature": 0}:
            values["temperature"] = 0.7 if rng.random() < 0.5 else 0.0
        params = sampling_params(order=order, seed=turn, **values)
        stages = params.build_pipeline(end_ids=(1, 2))
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
def test_truncation_does_not_change_a_greedy_request_with_a_custom_order(engine, greedy):
    rng = random.Random(8)
    cuts = [kind.name for kind in KINDS if issubclass(kind, Floor | Prefix | Ceiling)]
    for turn in range(tiers.count(10, 30)):
        order = tuple(rng.sample(REQUESTABLE, len(REQUESTABLE)))
        values = {"temperature": 0.5, **fields(rng, order, 0.7)}
        values = {**values, "top_k": max(2, values.get("top_k", 0)), **greedy}  # 1 would make the request greedy
        plain = {field: value for field, value in values.items() if not any(field in of(name) for name in cuts)}
        plain |= greedy
        params, without = (sampling_params(order=order, seed=turn, **v) for v in (values, plain))
        for logits in examples.rows(turn):
            one, other = params.build_pipeline(), without.build_pipeline()
            assert agree(result(engine, logits, one, turn, 5), result(engine, logits, other, turn, 5))


def of(name):
    """The public fields of a stage."""
    return {p.name for p in STAGES[name].parameters.values() if p.public}


def test_the_order_of_two_truncations_can_matter():
    """Shows that the orders in the tests above differ in effect."""
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    both = {"top_p": 0.65, "top_k": 3, "min_p": 0.3}
    survivors = {
        order: np.count_nonzero(nc.probabilities(logits, nc.SamplingParams(order=order, **both)))
        for order in itertools.permutations(("top_k", "top_p", "min_p"))
    }
    assert set(survivors.values()) == {2}
    hot = {"temperature": 3.0, "min_p": 0.5}
    first, last = (nc.SamplingParams(order=o, **hot) for o in (("temperature", "min_p"), ("min_p", "temperature")))
    assert np.count_nonzero(nc.probabilities(logits, first)) == 4
    assert np.count_nonzero(nc.probabilities(logits, last)) == 3


@on_every_engine
def test_a_mask_is_valid_at_any_position(engine):
    mask, logits = np.array([[0b0101]], np.int32), np.zeros((1, 4), np.float32)
    assert nc.probabilities(logits, (TopK(2), Greedy()), mask=mask, backend=engine.name).tolist() == [[1, 0, 0, 0]]
    assert nc.probabilities(logits, (TopK(2),), mask=mask, backend=engine.name).tolist() == [[0.5, 0, 0.5, 0]]
    assert nc.probabilities(logits, (TopK(2), Mask()), mask=mask, backend=engine.name).tolist() == [[1, 0, 0, 0]]
