"""Parameters: ranges, words, tables, JSON; every error names the field, the value and the accepted values."""

from __future__ import annotations

import copy
import enum
import pickle
from fractions import Fraction

import numpy as np
import pytest

from nucleate.parameters.parameter import MISSING, Parameter, ParameterError, TokenTable, read_json, unknown


def make(kind, **changes):
    base = dict(name="field", kind=kind, default=None, neutral=MISSING, off=(), low=None, high=None)
    return Parameter(
        **{**base, "open_low": False, "choices": (), "help": "", "optional": False, "public": True, **changes}
    )


class Colour(enum.IntEnum):
    RED = 3


class Word(str):
    __slots__ = ()


NUMBER = make("float", low=0.0, high=1.0)
OPEN = make("float", low=0.0, high=1.0, open_low=True)
COUNT = make("int", low=0, high=2**64 - 1, off=(-1,), optional=True)
SWITCH = make("bool")
IDS = make("tuple[int, ...]", low=0)
WORDS = make("tuple[str, ...]")
TABLE = make("Mapping[int, float]")
CHOICE = make("str", choices=("raw", "processed"))
CHOICES = make("str | tuple[str, ...]", choices=("hf", "vllm"))
WORDS_OR_IDS = make("tuple[str | tuple[int, ...], ...]", low=0)


@pytest.mark.parametrize(
    ("parameter", "value", "canonical"),
    [
        (NUMBER, 1, 1.0),
        (NUMBER, 0.0, 0.0),
        (NUMBER, np.float32(0.5), 0.5),
        (NUMBER, np.float16(0.5), 0.5),
        (NUMBER, np.int8(1), 1.0),
        (NUMBER, Fraction(1, 4), 0.25),
        (OPEN, 5e-324, 5e-324),
        (COUNT, -1, -1),
        (COUNT, 2**64 - 1, 2**64 - 1),
        (COUNT, np.uint64(2**64 - 1), 2**64 - 1),
        (COUNT, Colour.RED, 3),
        (COUNT, None, None),
        (SWITCH, np.True_, True),
        (SWITCH, False, False),
        (IDS, [], ()),
        (IDS, np.array([3, 1], np.uint16), (3, 1)),
        (IDS, (i for i in (1, 1)), (1, 1)),
        (WORDS, "ab", ("ab",)),
        (WORDS, ["a", "b"], ("a", "b")),
        (WORDS, [Word("a"), np.str_("b")], ("a", "b")),
        (CHOICE, Word("raw"), "raw"),
        (CHOICES, "hf", "hf"),
        (CHOICES, np.str_("vllm"), "vllm"),
        (CHOICES, ["x", Word("y")], ("x", "y")),  # names of stages, which are checked where the stages are defined
        (CHOICES, (), ()),
        (WORDS_OR_IDS, ["a b"], ("a b",)),
        (WORDS_OR_IDS, ["a", Word("b"), [1, np.uint8(2)], (3,)], ("a", "b", (1, 2), (3,))),
        (WORDS_OR_IDS, (i for i in ((0,), "a")), ((0,), "a")),
        (WORDS_OR_IDS, [np.array([4, 5])], ((4, 5),)),
        (WORDS_OR_IDS, np.array([[4, 5], [6, 7]]), ((4, 5), (6, 7))),
        (WORDS_OR_IDS, [], ()),
        (TABLE, {}, TokenTable()),
        (TABLE, {"7": 1, 5: np.float32(2)}, TokenTable({5: 2.0, 7: 1.0})),
    ],
)
def test_good_values_become_canonical(parameter, value, canonical):
    got = parameter.check(value)
    assert got == canonical
    assert type(got) is type(canonical)
    if isinstance(got, tuple):
        assert [type(item) for item in got] == [type(item) for item in canonical]


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        (
            NUMBER,
            [-1e-300, 1.0000000001, True, np.True_, "0.5", None, [0.5], np.array(0.5), 1j, float("nan"), float("inf")],
        ),
        (
            NUMBER,
            [-float("inf"), np.float32("nan"), 10**400, -(10**5000), Fraction(1, 10**400) - 1, b"1", {}, object()],
        ),
        (OPEN, [0, -0.0, 0.0, Fraction(1, 10**400)]),
        (COUNT, [-2, 2**64, 1.0, np.float64(1), "1", True, np.False_, 10**5000, [1], float("nan"), np.array([1])]),
        (SWITCH, [0, 1, None, "true", np.int8(1), []]),
        (IDS, [5, None, "12", b"12", {1: 2}, [[1]], [1, [2]], [True], [1.0], ["1"], [-1], [None], np.zeros(2)]),
        (WORDS, ["", [""], b"a", [b"a"], {"a": 1}, 5, None, [["a"]], [1]]),
        (CHOICE, ["", "Raw", "raw ", None, 0, b"raw", ["raw"], ("raw", "processed"), {}]),
        (CHOICES, ["", "x", "hf,vllm", None, 0, True, b"hf", [""], [1], [None], [["hf"]], [b"x"], {"hf": 1}]),
        (WORDS_OR_IDS, ["", [""], [()], ["a", []], 5, [5], [True], None, [None], b"a", [b"a"], {"a": 1}, [{"a": 1}]]),
        (
            WORDS_OR_IDS,
            [[[1, "a"]], [["a"]], [[1.0]], [[True]], [[-1]], [[[1]]], [10**5000], np.array([1, 2]), [np.array(1)]],
        ),
        (TABLE, [None, [], [(1, 2.0)], "x", {1: None}, {1: "2"}, {1: True}, {1: float("nan")}, {1: float("-inf")}]),
        (TABLE, [{-1: 1.0}, {"-1": 1.0}, {1.0: 1.0}, {True: 1.0}, {"a": 1.0}, {"٣": 1.0}, {"5": 1, 5: 2}, {" 5": 1}]),
        (TABLE, [{"": 1.0}, {"9" * 5000: 1.0}, {None: 1.0}, {(1,): 1.0}, {1: [1.0]}, {1: 10**400}]),
    ],
)
def test_bad_values_are_errors_that_name_the_field(parameter, values):
    for value in values:
        with pytest.raises(ParameterError) as caught:
            parameter.check(value)
        assert caught.value.field == "field"
        assert str(caught.value).startswith(f"field must be {parameter.allowed}, got ")
        assert len(str(caught.value)) < 200
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (NUMBER, "a number >= 0 and <= 1"),
        (OPEN, "a number > 0 and <= 1"),
        (make("float"), "a number"),
        (make("float", low=-2.5), "a number >= -2.5"),
        (COUNT, "an integer >= 0 and <= 2**64 - 1 or -1 or none"),
        (make("int", low=0, high=2**31 - 1), "an integer >= 0 and <= 2**31 - 1"),
        (SWITCH, "true or false"),
        (IDS, "a list of integers >= 0"),
        (WORDS, "a non-empty string or a list of such"),
        (CHOICE, "one of raw, processed"),
        (CHOICES, "one of hf, vllm or a list of stage names"),
        (WORDS_OR_IDS, "a list of non-empty strings or non-empty lists of token ids >= 0"),
        (TABLE, "a mapping of token ids (>= 0) to finite numbers"),
    ],
)
def test_the_accepted_values_are_described(parameter, words):
    assert parameter.allowed == words


def test_errors_are_short_and_can_be_pickled():
    error = NUMBER.error("x" * 10_000)
    assert len(str(error)) < 120
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.field, str(again)) == (ParameterError, "field", str(error))
    assert str(copy.copy(error)) == str(error)
    assert str(COUNT.error(10**5000)).endswith("got a very large int")


def test_an_unknown_name_is_an_error_with_the_nearest_and_all_names():
    error = unknown("top_q", ["top_p", "min_p"])
    assert str(error) == "unknown parameter 'top_q'; did you mean top_p? (known: min_p, top_p)"
    assert str(unknown("zzz", ["a"], "stage")) == "unknown stage 'zzz' (known: a)"
    assert len(str(unknown("x" * 100_000, ["a"]))) < 200


def test_a_table_is_a_value():
    table = TokenTable({5: 1.0, 2: -1.0})
    assert list(table) == [2, 5]
    assert table == {5: 1.0, 2: -1.0} == table
    assert hash(table) == hash(TokenTable([(2, -1.0), (5, 1.0)]))
    assert (repr(table), len(table), table[5], 3 in table) == ("{2: -1.0, 5: 1.0}", 2, 1.0, False)
    assert pickle.loads(pickle.dumps(table)) == copy.deepcopy(table) == table
    assert TokenTable() == {}
    assert table != TokenTable({5: 1.0})
    source = {1: 2.0}
    token_table = TokenTable(source)
    source[1] = 3.0
    assert token_table == {1: 2.0}
    with pytest.raises(TypeError):
        table[2] = 0.0


ONCE_TOO_OFTEN = '{"a": 1, "a": 1}', '[{"b": {"a": 1, "a": 2}}]'


@pytest.mark.parametrize(
    "text", ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000, *ONCE_TOO_OFTEN, "9" * 5000, b"\xff", 5]
)
def test_hostile_json_is_a_parameter_error(text):
    with pytest.raises(ParameterError, match=r"^params must be JSON: "):
        read_json(text, "params")


def test_duplicate_json_names_are_errors():
    with pytest.raises(ParameterError, match="duplicate name 'b'"):
        read_json('{"a": 1, "b": 1, "b": 1}', "params")
