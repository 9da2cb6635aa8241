"""Values in messages: truncated, at a cost that does not depend on their size."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nucleate.parameters.converters import shown

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab\n\ud800é", max_size=80),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text("xy", max_size=70), inner, max_size=20),
)


@given(PLAIN)
def test_a_shown_value_is_its_repr_truncated_to_60_characters(value: Any) -> None:
    text = repr(value)
    assert shown(value) == (text if len(text) <= 60 else text[:57] + "...")


@pytest.mark.parametrize(
    "value",
    [[1] * 10**6, "x" * 10**8, [["x" * 10**4] * 1000] * 1000, {i: [i] * 10**5 for i in range(20)}, (None,) * 10**6],
    ids=["list", "text", "nested", "object", "tuple"],
)
def test_large_values_cost_no_more_than_small_ones(value: Any) -> None:
    began = time.thread_time()
    assert len(shown(value)) == 60
    assert time.thread_time() - began < 0.02


def test_deeply_nested_values() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "[" * 57 + "..."
    while isinstance(value, list):  # iteratively: the destructor would recurse
        value = value[0]
