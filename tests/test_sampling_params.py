"""SamplingParams: every field at its edges, errors that explain the fix, values that survive JSON and pickle."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nucleate as nc
from nucleate.jit.native_library import warn_once
from nucleate.parameters.parameter import MISSING, ParameterError
from nucleate.sampling.presets import ORDER_PARAMETERS, PRESETS, build
from nucleate.sampling.stage import Shift
from nucleate.sampling.stages import STAGES, Gumbel, Mirostat, TopK
from nucleate.sampling_params import FIELDS, REQUEST_PARAMETERS

FULL = {
    **dict(guidance_scale=1.5, negative_prompt=(7, 3), logit_bias={5: 1.0, 3: -2.5}, suppress_token_ids=(9,)),
    **dict(repetition_penalty=1.1, penalty_last_n=9, frequency_penalty=0.5, presence_penalty=-0.5),
    **dict(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=3, dry_last_n=100, no_repeat_ngram_size=4),
    **dict(dry_sequence_breakers=["\n", (4, 5)], bad_words=["ugly", (7, 8)], allowed_token_ids=(1, 2, 3)),
    **dict(temperature=0.5, dynamic_temperature_low=0.5, dynamic_temperature_high=1.5),
    **dict(dynamic_temperature_exponent=2.0, top_n_sigma=3.0, top_k=3, typical_p=0.99, min_p=0.1, top_a=0.1),
    **dict(epsilon_cutoff=0.01, eta_cutoff=0.02, p_less=True, top_h=0.9, mirostat_tau=5.0, mirostat_eta=0.2),
    **dict(top_p=0.9, xtc_probability=0.5, xtc_threshold=0.2, xtc_exempt_token_ids=(1,)),
    **dict(adaptive_p_target=0.3, adaptive_p_decay=0.8, logprobs=2, logprob_token_ids=(6,), seed=7),
    **dict(order=("top_k", *PRESETS["canonical"][:-1], "adaptive_p"), draw="categorical", n=2),
    **dict(max_tokens=10, min_tokens=2, stop=("a", "b\n"), stop_token_ids=(4,), stop_regex=("x+",), stop_json=True),
    **dict(include_stop_str_in_output=True, ignore_eos=True, logprobs_mode="processed", skip_special_tokens=False),
    "structured_outputs": {
        "json_schema": {"type": "object", "properties": {"b": {}, "a": {}}},
        "on_unsupported": "ignore",
    },
}
FULL["order"] = tuple(dict.fromkeys(FULL["order"]))  # top_k first, the others as in the canonical order

WITH = {  # fields that another field requires
    "dynamic_temperature_low": {"dynamic_temperature_high": 1e300},
    "dynamic_temperature_high": {"dynamic_temperature_low": 0},
    "mirostat_eta": {"mirostat_tau": 5},
}

EDGES = {  # field: (good values, bad values)
    "pipeline": (
        [None, (nc.stages.Temperature(2.0),), [{"stage": "top_k"}], "top_k(5) | gumbel"],
        [5, {}, nc.stages.Temperature(2.0)],
    ),
    "temperature": ([0, 0.0, 5e-324, 1, 1.7e308], [-1e-9, float("inf"), float("nan"), None, "1", True]),
    "top_k": ([-1, 0, 1, 2**31 - 1], [-2, 2**31, 10**5000, 1.0, None, "5", False]),
    "top_p": ([0, 0.0, 5e-324, 0.5, 1, 1.0], [-1e-9, 1.0000001, None, float("nan"), "0.9"]),
    "min_p": ([0, 0.0, 1], [-1e-9, 1.0000001, None]),
    "seed": ([None, 0, 2**64 - 1, np.uint64(2**64 - 1)], [-1, 2**64, 1.0, "0", True]),
    "max_tokens": ([None, 1, 10**9], [0, -1, 1.5]),
    "logit_bias": ([{}, {0: 1}, {"0": -1e300}], [None, [], {-1: 1}, {0: float("inf")}, {"a": 1}, {1.5: 1}]),
    "suppress_token_ids": ([(), [0], {3}], [None, 5, [-1], [None], [[1]], "12"]),
    "allowed_token_ids": ([None, (), [0]], [5, [-1], [1.0]]),
    "stop": ([(), "x", ["x", "y"]], ["", ["x", ""], 5, None, [5], b"x"]),
    "stop_token_ids": ([(), [0, 0]], [None, [-1], "1"]),
    "stop_regex": ([(), "x"], ["", None]),
    "stop_json": ([True, False, np.True_], [0, 1, None, "true"]),
    "dry_sequence_breakers": (
        [None, (), ["a", (1, 2)], [[0]], [np.array([3])]],
        ["", "\n", [""], [()], 5, [5], [[-1]], [[True]], b"x", {"a": 1}, [["a"]], [None]],
    ),
    "negative_prompt": ([(), [], [0, 5], "a b", np.array([3])], [None, "", 5, [-1], ["a"], [1.0], b"x", {"a": 1}]),
    "bad_words": (
        [(), ["a b"], ["a", (1, 2)], [[0]]],
        [None, "", "a b", [""], [[]], 5, [5], [[-1]], [[1.0]], b"x", [{"a": 1}]],
    ),
    "xtc_exempt_token_ids": ([(), [0]], [None, [-1], "1"]),
    "logprob_token_ids": ([(), [0]], [None, [-1], "1"]),
    "order": ([*PRESETS, (), ["top_k"], PRESETS["canonical"]], [None, 5, "", "top_k", "Canonical", [5], [""], b"hf"]),
    "draw": (["gumbel", "categorical", "greedy"], [None, "", "Gumbel", ["gumbel"], 0, b"greedy"]),
    "structured_outputs": (
        [
            None,
            {"regex": "a"},
            {"choice": ["b", "a"]},
            {"json_object": True},
            nc.StructuredOutputs(grammar='start: "a"'),
        ],
        [5, "", "regex", True, ["regex"], b"{}", float("nan")],
    ),
    "logprobs_mode": (["raw", "processed"], [None, "", "RAW", ["raw"], True]),
    "dynamic_temperature_low": ([0, 5e-324, 1e300], [-1e-9, float("nan"), float("inf"), True, "1"]),
    "dynamic_temperature_high": ([0, 5e-324, 1.7e308], [-1e-9, float("nan"), float("inf"), True, "1"]),
}


def edges(field):
    """The edges of a field that is not listed above, from its declaration."""
    if field.kind == "bool":
        return [True, False], [0, None]
    low, high = field.low, field.high
    good = [field.default, *field.off, *(bound for bound in (low, high) if bound is not None)]
    bad = ["1", float("nan"), float("inf"), True]
    (good if field.optional else bad).append(None)
    bad += [] if low is None else [next(n for n in (low - 1, low - 2) if n not in field.off)]
    bad += [] if high is None else [high + 1]
    if low is not None and field.open_low:
        good.remove(low)
        bad.append(low)
    return good, bad


def test_fields_that_are_not_listed_have_derivable_edges():
    assert EDGES.keys() - {"pipeline"} <= FULL.keys() <= FIELDS.keys()
    assert all(FIELDS[name].check(value) != FIELDS[name].default for name, value in FULL.items())
    assert {FIELDS[name].kind for name in FIELDS.keys() - EDGES.keys()} <= {"float", "int", "bool"}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_at_its_edges(name):
    good, bad = EDGES.get(name) or edges(FIELDS[name])
    for value in good:
        params = nc.SamplingParams(**{name: value}, **WITH.get(name, {}))
        assert FIELDS[name].check(getattr(params, name)) == getattr(params, name)
        assert nc.SamplingParams.from_json(params.to_json()) == params
    for value in bad:
        with pytest.raises(ParameterError) as caught:
            nc.SamplingParams(**{name: value}, **WITH.get(name, {}))
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name} must be {FIELDS[name].allowed}, got ")


def test_fields_are_the_parameters_of_the_stages_and_of_the_request():
    public = [p for kind in STAGES.values() for p in kind.parameters.values() if p.public]
    parts = {p.name for p in public}, ORDER_PARAMETERS.keys(), REQUEST_PARAMETERS.keys()
    assert FIELDS.keys() == set().union(*parts)
    assert len(FIELDS) == sum(map(len, parts))
    for parameter in public:  # stages that share a field (the seed) agree on its meaning
        assert parameter == FIELDS[parameter.name]
    for name, parameter in FIELDS.items():
        assert parameter.name == name
        assert parameter.help
        assert parameter.default is not MISSING
        assert parameter.check(parameter.default) == parameter.default


def test_the_defaults_sample_from_the_models_distribution():
    assert nc.SamplingParams().build_pipeline() == (Gumbel(None),)
    assert repr(nc.SamplingParams()) == "SamplingParams()"
    assert nc.SamplingParams().to_json() == "{}"


def test_the_pipeline_is_in_canonical_order():
    first = {"order": "canonical", "draw": "gumbel", "logprobs_mode": "raw"}
    s = nc.stages
    stages = (
        *(s.LogitBias({3: -2.5, 5: 1.0}), s.Repetition(1.1, 9), s.Frequency(0.5, 9), s.Presence(-0.5, 9)),
        *(s.Dry(0.8, 1.5, 3, ("\n", (4, 5)), 100), s.NoRepeatNgram(4), s.MinTokens(2, (4,))),
        *(s.BadWords(("ugly", (7, 8))), s.Suppress((9,)), s.Allowed((1, 2, 3))),
        *(s.Temperature(0.5), s.DynamicTemperature(0.5, 1.5, 2.0), s.TopNSigma(3.0), s.TopK(3), s.Typical(0.99)),
        *(s.MinP(0.1), s.TopA(0.1), s.Epsilon(0.01), s.Eta(0.02), s.PLess(True), s.TopH(0.9), s.Mirostat(5.0, 0.2)),
        *(s.TopP(0.9), s.Xtc(0.5, 0.2, (1,)), s.AdaptiveP(0.3, 0.8)),
    )
    guided = s.Guidance(1.5, (7, 3))
    ordered = nc.SamplingParams(**{**FULL, **first}).build_pipeline((0, 8))
    assert ordered == (guided, s.Logprobs(2, (6,)), *stages, Gumbel(7))
    reordered = (TopK(3), *(stage for stage in stages if stage != TopK(3)))
    shifts = next(i for i, stage in enumerate(reordered) if not isinstance(stage, Shift))
    expected = (guided, *reordered[:shifts], s.Mask(), *reordered[shifts:], s.Logprobs(2, (6,)), s.Categorical(7))
    assert nc.SamplingParams(**FULL).build_pipeline((0, 8)) == expected


def test_min_tokens_bans_the_ids_that_end_the_request():
    params = nc.SamplingParams(min_tokens=1, stop_token_ids=[5, 2])
    assert params.build_pipeline((7, 2))[0] == nc.stages.MinTokens(1, (2, 5, 7))
    assert params.replace(ignore_eos=True).build_pipeline((7, 2))[0] == nc.stages.MinTokens(1, (2, 5))
    assert params.replace(stop_token_ids=[8]).build_pipeline((1,))[0] == nc.stages.MinTokens(
        1, (1, 8)
    )  # in order, as no set is
    logits = np.array([[0, 1, 9, 2]], np.float32)
    params = nc.SamplingParams(min_tokens=2, stop_token_ids=[2], temperature=0)
    assert nc.sample(logits, params, output_ids=[[0]]).tolist() == [3]
    assert nc.sample(logits, params, output_ids=[[0, 0]]).tolist() == [2]


def test_min_tokens_above_max_tokens_is_an_error():
    with pytest.raises(ParameterError, match=r"min_tokens must be at most max_tokens \(2\), got 3") as caught:
        nc.SamplingParams(min_tokens=3, max_tokens=2)
    assert caught.value.field == "min_tokens"
    assert nc.SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(ParameterError, match="min_tokens"):
        nc.SamplingParams(min_tokens=3).replace(max_tokens=1)


def test_to_dict_contains_only_json_values():
    params = nc.SamplingParams(**FULL)
    assert json.loads(json.dumps(params.to_dict())) == params.to_dict()
    assert params.to_dict()["bad_words"] == ["ugly", [7, 8]]


def test_contradictory_parameters_are_rejected_by_the_constructor():
    low, high = "dynamic_temperature_low", "dynamic_temperature_high"
    for values, field, words in (
        ({low: 1}, high, " must be given"),
        ({high: 1}, low, " must be given"),
        ({low: 2, high: 1}, low, f" must be at most {high} (1), got 2"),
    ):
        with pytest.raises(ParameterError, match=re.escape(field + words)) as caught:
            nc.SamplingParams(**values)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tempreature", "; did you mean temperature?"),
        ("max_new_tokens", "; did you mean max_tokens?"),
        ("repeat_penalty", "; did you mean repetition_penalty?"),
        ("top_pp", "; did you mean top_p or top_k or top_h?"),
        ("qqq", ""),
    ],
)
def test_unknown_names_suggest_the_nearest_ones(name: str, hint: str) -> None:
    with pytest.raises(ParameterError) as caught:
        nc.SamplingParams(**{name: 1})
    assert (str(caught.value), caught.value.field) == (f"unknown parameter {name!r}{hint}", name)


def test_help_describes_every_field() -> None:
    for name, field in FIELDS.items():
        assert f"\n        {name}: {field.help} (" in nc.SamplingParams.__doc__


def test_reserved_and_positional_arguments_are_errors() -> None:
    for made in (nc.SamplingParams, nc.SamplingParams().replace):
        for name in ("self", "ends"):
            with pytest.raises(ParameterError, match=f"unknown parameter '{name}'"):
                made(**{name: 1})
    with pytest.raises(TypeError):
        nc.SamplingParams(0.7)
    with pytest.raises(AttributeError, match="unknown field 'top_kk'; did you mean top_k"):
        nc.SamplingParams().top_kk


def copies(params):
    """The parameters after a round trip of each kind."""
    names = {"SamplingParams": nc.SamplingParams, "StructuredOutputs": nc.StructuredOutputs}
    yield from (pickle.loads(pickle.dumps(params)), copy.copy(params), copy.deepcopy(params), params.replace())
    yield from (nc.SamplingParams.from_json(params.to_json()), nc.SamplingParams(**json.loads(params.to_json())))
    yield from (nc.SamplingParams(**params.to_dict()), eval(repr(params), names))


def test_params_are_immutable_values():
    params = nc.SamplingParams(**FULL)
    with pytest.raises(AttributeError, match=r"frozen; use params.replace\(top_k=...\)"):
        params.top_k = 5
    with pytest.raises(AttributeError, match="frozen"):
        del params.top_k
    with pytest.raises(AttributeError, match="frozen"):
        params.new = 5
    for again in copies(params):
        assert again == params
        assert hash(again) == hash(params)
        assert repr(again) == repr(params)
        assert again.to_json() == params.to_json()
    other = params.replace(top_k=4)
    assert (other.top_k, params.top_k) == (4, 3)
    assert other != params != "params"
    assert len({params, other, params.replace(top_k=4)}) == 2


@pytest.mark.parametrize(
    ("structured_outputs", "field", "words"),
    [
        (
            {},
            "structured_outputs",
            " must have exactly one of json_schema, json_object, regex, choice, grammar, struct",
        ),
        ({"json_object": False}, "structured_outputs", " must have exactly one of"),
        ({"regex": "a", "choice": ["b"]}, "choice", "got regex and choice"),
        ({"regexp": "a"}, "regexp", "unknown field 'regexp'; did you mean regex"),
        ({5: "a"}, "5", "unknown field '5'"),
        *(
            ({name: value}, name, f"{name} must be {rest}")
            for name, value, rest in [
                ("regex", 5, "a non-empty string, got 5"),
                ("json_schema", [1], r"a JSON object, a boolean, or its text, got \[1\]"),
                ("choice", "ab", "a non-empty list of non-empty strings, got 'ab'"),
                ("json_object", 1, "true or false, got 1"),
            ]
        ),
        (
            {"regex": "a", "on_unsupported": "ignore"},
            "on_unsupported",
            "needs json_schema or structural_tag, got regex",
        ),
        ({"regex": "a", "whitespace": "tight"}, "whitespace", "whitespace must be one of flexible, none, got 'tight'"),
    ],
)
def test_an_invalid_constraint_is_an_error_of_its_field(structured_outputs, field, words):
    for made in (
        lambda: nc.SamplingParams(structured_outputs=structured_outputs),
        lambda: nc.SamplingParams().replace(structured_outputs=structured_outputs),
        lambda: nc.SamplingParams.from_json(json.dumps({"structured_outputs": structured_outputs})),
    ):
        with pytest.raises(ParameterError, match=words) as caught:
            made()
        assert caught.value.field == field


def test_a_pydantic_class_as_a_schema_is_an_error_that_says_what_to_pass():
    class Hero:  # with the method of a Pydantic class
        @classmethod
        def model_json_schema(cls):
            return {}

    with pytest.raises(nc.ParameterError, match=r"got .*; pass Hero\.model_json_schema\(\)$"):
        nc.SamplingParams(structured_outputs={"json_schema": Hero})


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(["string", "null"]), "const": TEXT | st.integers()}),
    lambda inner: st.dictionaries(TEXT, inner, max_size=4).map(lambda named: {"type": "object", "properties": named}),
    max_leaves=6,
)
POLICY, WHITESPACE = st.sampled_from(["error", "approximate", "ignore"]), st.sampled_from(["flexible", "none"])
CONSTRAINT_FIELDS = st.one_of(
    st.fixed_dictionaries({"json_schema": SCHEMAS}, optional={"on_unsupported": POLICY, "whitespace": WHITESPACE}),
    st.fixed_dictionaries({"json_object": st.just(value=True)}, optional={"whitespace": WHITESPACE}),
    st.fixed_dictionaries({"regex": TEXT}),
    st.fixed_dictionaries({"choice": st.lists(TEXT, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"grammar": TEXT}),
)


@given(CONSTRAINT_FIELDS, CONSTRAINT_FIELDS)
def test_a_constraint_survives_json_pickle_and_replace(first, second):
    params = nc.SamplingParams(structured_outputs=first, top_k=3)
    for again in (
        nc.SamplingParams(structured_outputs=nc.StructuredOutputs(**first), top_k=3),
        nc.SamplingParams(
            structured_outputs=nc.StructuredOutputs.from_json(nc.StructuredOutputs(**first).to_json()), top_k=3
        ),
        nc.SamplingParams(top_k=3).replace(structured_outputs=first),
        params.replace(structured_outputs=second).replace(structured_outputs=params.structured_outputs),
        *copies(params),
    ):
        assert again == params
        assert hash(again) == hash(params)
        assert again.to_json() == params.to_json()
    if "json_schema" in first:  # properties are written in the order of the schema
        assert json.dumps(params.to_dict()["structured_outputs"]["json_schema"]) == json.dumps(first["json_schema"])
    other = params.replace(structured_outputs=second)
    assert (other == params) == (nc.StructuredOutputs(**first) == nc.StructuredOutputs(**second))
    assert params.replace(structured_outputs=None) == nc.SamplingParams(top_k=3) != params
    # structured output is not a stage: it is a mask
    assert params.build_pipeline((3,)) == nc.SamplingParams(top_k=3).build_pipeline((3,))


def test_the_order_of_properties_is_part_of_a_constraint():
    one, other = ({"json_schema": {"properties": {a: {}, b: {}}}} for a, b in ("ab", "ba"))
    assert nc.SamplingParams(structured_outputs=one) != nc.SamplingParams(structured_outputs=other)


def test_arguments_are_copied():
    bias, stop = {1: 2.0}, ["a"]
    params = nc.SamplingParams(logit_bias=bias, stop=stop)
    bias[1] = 3.0
    stop.append("b")
    assert params == nc.SamplingParams(logit_bias={1: 2.0}, stop=["a"])
    schema = {"properties": {"a": {}}}
    params = nc.SamplingParams(structured_outputs={"json_schema": schema})
    schema["properties"]["a"]["type"] = "string"
    params.structured_outputs.schema["properties"].clear()
    assert params.structured_outputs.schema == {"properties": {"a": {}}}
    params = nc.SamplingParams(logit_bias={1: 2.0})
    with pytest.raises(TypeError):
        params.logit_bias[1] = 5.0


def test_the_signature_lists_the_fields():
    assert list(inspect.signature(nc.SamplingParams).parameters) == list(FIELDS)
    assert set(FIELDS) <= set(dir(nc.SamplingParams()))
    assert not hasattr(nc.SamplingParams(), "nonsense")


VALUES = ("1.0", '"1"', "true", '{"a": []}', "1e400")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "5", "[]", '"top_k"', "{", "[" * 100_000, '{"logit_bias":' * 50_000, b"\xff\xfe", None, 5),
        *('{"top_k": 1, "top_k": 2}', '{"logit_bias": {"1": 0, "1": 0}}', '{"logit_bias": {"1": 0, "01": 0}}'),
        *(f'{{"top_k": {value}}}' for value in VALUES),
        *(f'{{"temperature": {value}}}' for value in ("1e400", "NaN", "-Infinity")),
        *(f'{{"seed": {"9" * digits}}}' for digits in (400, 5000)),
        *(f'{{"{name}": 1}}' for name in ("self", "values", "_values", "__class__", "ends", "")),
        *('{"stop": [["a"]]}', '{"stop": "\\ud800", "stop_json": 5}', json.dumps({"x" * 1_000_000: 1})),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_hostile_json_is_a_parameter_error(text):
    with pytest.raises(ParameterError) as caught:
        nc.SamplingParams.from_json(text)
    assert len(str(caught.value)) < 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("7"), inner, max_size=3),
)
NAMES = st.sampled_from([choice for field in FIELDS.values() for choice in field.choices]) | st.lists(
    st.sampled_from(PRESETS["canonical"]), max_size=30
)


@given(st.dictionaries(st.sampled_from(list(FIELDS)), JSON | NAMES, max_size=4))
def test_any_json_gives_params_or_a_parameter_error(values):
    try:
        params = nc.SamplingParams.from_json(json.dumps(values))
    except ParameterError:
        return
    assert nc.SamplingParams.from_json(params.to_json()) == params
    assert params.build_pipeline((3,))[-1].name == params.draw


# ---- defaults


def test_the_fields_that_were_given_are_known_also_with_their_default():
    params = nc.SamplingParams(temperature=1.0, seed=None)
    assert params == nc.SamplingParams()
    assert params.fields_set == {"temperature", "seed"}
    assert params.replace(top_k=3).fields_set == {"temperature", "seed", "top_k"}
    assert repr(params) == "SamplingParams(temperature=1.0, seed=None)"
    assert all(again.fields_set == params.fields_set for again in copies(params))


def test_defaults_replace_only_what_was_not_given():
    defaults = nc.SamplingParams(temperature=0.6, top_k=20, stop=["x"])
    merged = nc.SamplingParams(temperature=1.0, stop=(), seed=4).with_defaults(defaults)
    assert merged == nc.SamplingParams(temperature=1.0, top_k=20, seed=4)
    assert merged.with_defaults(defaults) == merged
    assert nc.SamplingParams().with_defaults(defaults) == defaults
    for own in (nc.SamplingParams(mirostat_tau=5.0), nc.SamplingParams(order="vllm"), nc.SamplingParams(**FULL)):
        once = own.with_defaults(defaults.replace(typical_p=0.9, min_tokens=99))
        assert once.with_defaults(defaults.replace(typical_p=0.9, min_tokens=99)) == once


@pytest.mark.parametrize(
    ("defaults", "request_values", "message"),
    [
        (
            {"guidance_scale": 2.0},
            {"contrastive_beta": 1.0},
            "contrastive_beta replaces the default guidance_scale=2.0",
        ),
        ({"min_tokens": 10}, {"max_tokens": 5}, "max_tokens replaces the default min_tokens=10"),
        ({"max_tokens": 5}, {"min_tokens": 10}, "min_tokens replaces the default max_tokens=5"),
        ({"typical_p": 0.9, "seed": 1}, {"order": "vllm"}, "order 'vllm' replaces the default typical_p=0.9"),
        ({"min_p": 0.1}, {"order": ["top_k"]}, "order ('top_k',) replaces the default min_p=0.1"),
    ],
)
def test_defaults_that_contradict_a_request_give_way(defaults, request_values, message, caplog):
    warn_once.cache_clear()
    with caplog.at_level("WARNING", "nucleate"):
        own = nc.SamplingParams(**defaults).override(**request_values)
    kept = {name: value for name, value in defaults.items() if name == "seed"}
    assert own == nc.SamplingParams(**kept, **request_values)
    assert [record.getMessage() for record in caplog.records] == [message]
    with pytest.raises(ParameterError):
        nc.SamplingParams(**defaults, **request_values)


@pytest.mark.parametrize("values", [{"min_tokens": "5"}, {"max_tokens": 0}, {"order": "best"}, {"order": ["best"]}])
def test_invalid_values_are_errors_whatever_the_defaults(values):
    for defaults in (nc.SamplingParams(), nc.SamplingParams(min_tokens=3, max_tokens=4)):
        with pytest.raises(ParameterError):
            defaults.override(**values)


# ---- mirostat with other parameters


@pytest.mark.parametrize(
    ("greedy", "named"),
    [({"temperature": 0}, "Temperature(0.0)"), ({"top_k": 1}, "TopK(1)"), ({"draw": "greedy"}, "Greedy()")],
)
@pytest.mark.parametrize("order", ["canonical", "llama.cpp"])
def test_mirostat_in_a_greedy_request_is_an_error(order, greedy, named):
    with pytest.raises(ParameterError, match=re.escape(f"mirostat_tau=5 needs random sampling, but {named} is")):
        nc.SamplingParams(mirostat_tau=5, order=order, **greedy)
    with pytest.raises(ParameterError, match="mirostat_tau"):
        nc.SamplingParams(mirostat_tau=5, order=order).replace(**greedy)
    assert nc.SamplingParams(mirostat_tau=0, order=order, **greedy).build_pipeline()


def test_mirostat_disables_default_truncations_and_logs_it_once(caplog):
    defaults = nc.SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    with caplog.at_level("WARNING", "nucleate"):
        for _ in range(2):
            own = defaults.override(mirostat_tau=4.5, seed=1)
            assert own == nc.SamplingParams(temperature=0.6, repetition_penalty=1.1, mirostat_tau=4.5, seed=1)
    assert [record.getMessage() for record in caplog.records] == [
        "mirostat_tau replaces the default top_k=20, top_p=0.95"
    ]
    assert defaults.override(mirostat_tau=4.5, top_p=0.9).top_p == 0.9  # fields that the request sets stay
    for greedy, name in (({"temperature": 0}, "temperature"), ({"top_k": 1}, "top_k"), ({"draw": "greedy"}, "draw")):
        assert nc.SamplingParams(**greedy).override(mirostat_tau=3.0) == nc.SamplingParams(mirostat_tau=3.0)
        assert getattr(nc.SamplingParams(mirostat_tau=3.0).override(**greedy), name) == greedy[name]
        with pytest.raises(ParameterError, match="mirostat_tau=3"):
            nc.SamplingParams().override(mirostat_tau=3.0, **greedy)
    assert defaults.override(top_p=1.0) == defaults.replace(top_p=1.0)
    assert defaults.override() == defaults
    with pytest.raises(ParameterError, match="mirostat_tau must be a number"):
        defaults.override(mirostat_tau="5")


def test_truncations_that_a_request_sets_with_mirostat_run():
    assert nc.SamplingParams(mirostat_tau=5, top_k=3, seed=1).build_pipeline() == (TopK(3), Mirostat(5.0), Gumbel(1))


@pytest.mark.slow
def test_caches_do_not_keep_large_parameters() -> None:
    build.cache_clear()
    engine = nc.LLM().new_engine()
    for number in range(20):
        params = nc.SamplingParams(logit_bias={token: float(number) for token in range(4000)}, stop="x" * (number + 1))
        assert not params.cacheable
        engine.prepare(nc.Request([5], params))
        nc.Sampler(4096).add(nc.SamplingParams(logit_bias=params.logit_bias))
    for large in (
        {"bad_words": ["x" * 2000]},
        {"negative_prompt": "x" * 2000},
        {"stop": "x" * 2000},
        {"structured_outputs": {"regex": "a"}},
    ):
        assert not nc.SamplingParams(**large).cacheable
    assert nc.SamplingParams(top_p=0.9, logit_bias={5: 1.0}, stop=["a", "b"]).cacheable
    assert build.cache_info().currsize < 20
    assert engine._pipelines._cached.cache_info().currsize == 0


def test_overridden_values_are_checked_even_if_they_equal_cached_ones():
    defaults = nc.SamplingParams(temperature=0.5)
    assert defaults.override(top_k=1).top_k == 1
    for value in (True, 10**5000, "1" * 5000):
        with pytest.raises(ParameterError, match="top_k must be an integer"):
            defaults.override(top_k=value)
