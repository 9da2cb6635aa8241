"""``nucleate bench`` and ``nucleate warm``: they run, and say what they measured or did."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nucleate.cli.bench import CHAINS, KINDS, logits, medians
from nucleate.cli.main import main


def test_bench_prints_a_line_per_chain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--vocabulary", "3000", "--rows", "2", "--seconds", "0", "--logits", "ties"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 x 3000 scores, ties: microseconds per call"
    assert [line[:44].rstrip() for line in lines] == list(CHAINS)
    for line in lines:
        own, floor, ratio = map(float, line[44:].split())
        assert own > 0
        assert ratio == pytest.approx(own / floor, rel=0.2, abs=0.1)


def test_bench_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--vocabulary", "300", "--seconds", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["chain"] for case in found] == list(CHAINS)
    assert all(set(case["microseconds"]) == {"nucleate", "numpy max"} for case in found)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--rows", "0", "--rows must be at least 1, got 0"),
        ("--vocabulary", "-5", "--vocabulary must be at least 1, got -5"),
        ("--seconds", "nan", "--seconds must be at least 0, got nan"),
        ("--logits", "round", "invalid choice: 'round'"),
    ],
)
def test_bench_refuses_what_makes_no_sense(
    flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", f"{flag}={value}"]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_what_they_are_called(kind: str) -> None:
    x = logits(kind, 2, 4000)
    assert x.shape == (2, 4000)
    assert x.dtype == np.float32
    assert (len(np.unique(x)) < 40) == (kind == "ties")
    assert (x.mean() > 40) == (kind == "shifted")
    assert (x.max() - x.mean() > 12) == (kind in ("peaked", "shifted"))


def test_contenders_take_turns() -> None:
    said: list[str] = []
    times = medians({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, 0.0)
    assert "".join(said).startswith("ab" + "aaaaaabbbbbb")
    assert times.keys() == {"a", "b"}
    assert all(0 < time < 1e4 for time in times.values())


def test_warm_says_where_the_kernels_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("CPU kernels ready after ")
    assert told.count("\n") == 1
