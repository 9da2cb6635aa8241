"""Positions of Transformers' stop-string criterion and ours: a stream is stopped at least as early."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from pathlib import Path

import pytest

from nucleate.stopping.stop_matcher import StopMatcher, StopRules

FACTS = json.loads((Path(__file__).parents[1] / "data" / "transformers_stop.json").read_text("utf-8"))["vectors"]
BY_KIND = {kind: [v for v in FACTS if v["kind"] == kind] for kind in {v["kind"] for v in FACTS}}


def fires_at(stop: list[str], parts: list[str]) -> int | None:
    """The index of the token after which the matcher has finished."""
    matcher = StopMatcher(StopRules(stop=tuple(stop)))
    for index, part in enumerate(parts):
        shown = matcher.push(index, part)
        assert not any(string in shown for string in stop)
        if matcher.finish is not None:
            assert matcher.finish.detail in stop
            return index
    return None


def test_every_vector_is_tested() -> None:
    sizes = {kind: len(vectors) for kind, vectors in BY_KIND.items()}
    assert sizes == {"stop_string": 5, "stop_string_text": 5, "stop_string_bytes": 1}


@pytest.mark.parametrize("vector", BY_KIND["stop_string"], ids=lambda v: v["id"])
def test_stop_strings_in_tokens(vector: dict) -> None:
    assert fires_at(vector["stop"], vector["tokens"]) == vector["expected_trigger_index"]


@pytest.mark.parametrize("vector", BY_KIND["stop_string_text"], ids=lambda v: v["id"])
@pytest.mark.parametrize("width", [1, 2, 3, 100])
def test_stop_strings_in_text_for_any_split(vector: dict, width: int) -> None:
    text = vector["text"]
    parts = [text[i : i + width] for i in range(0, len(text), width)]
    assert (fires_at(vector["stop"], parts) is not None) == vector["expected"]


@pytest.mark.parametrize("vector", BY_KIND["stop_string_bytes"], ids=lambda v: v["id"])
def test_characters_split_over_several_tokens(vector: dict) -> None:
    decoder = getincrementaldecoder("utf-8")()
    parts = [decoder.decode(bytes([byte])) for byte in vector["bytes"]]
    index = fires_at(vector["stop"], parts)
    assert index is not None
    assert bytes(vector["bytes"][: index + 1]).decode().endswith(vector["stop"][0])  # with its last byte, not later
