"""Reference beam search against recorded results, exhaustive search, greedy search and edge cases."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from beam_searches import hashed
from hypothesis import given
from hypothesis import strategies as st

from nucleate.generation.beam_search import Beam, beam_search

FACTS = json.loads((Path(__file__).parents[1] / "data" / "transformers_beam.json").read_text("utf-8"))
EARLY = [True, False, "never"]
LogitsOf = Callable[[tuple[int, ...]], np.ndarray]


def steps(*rows: list[float], prompt: int = 0) -> LogitsOf:
    """A model whose logits depend on the number of tokens only."""
    return lambda ids: np.array(rows[len(ids) - prompt])


def logprobs(logits: np.ndarray) -> list[float]:
    weights = [math.exp(x) for x in logits]
    return [math.log(w / math.fsum(weights)) if w else -math.inf for w in weights]


@pytest.mark.parametrize(
    "fact", FACTS["vectors"], ids=lambda v: "{num_beams} {length_penalty} {early_stopping}".format(**v)
)
def test_recorded_numbers_of_transformers(fact: dict) -> None:
    table = np.array(FACTS["table"], np.float32)
    options = {name: fact[name] for name in ("num_beams", "length_penalty", "early_stopping")}
    same = {name: FACTS[name] for name in ("prompt_ids", "max_tokens", "eos_token_ids")}
    beams = beam_search(lambda ids: table[ids[-1]], **same, **options)
    assert [list(beam.token_ids) for beam in beams] == fact["token_ids"]
    assert [beam.score for beam in beams] == pytest.approx(fact["scores"], rel=1e-6)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("size", "ends"), [(3, ()), (3, (1,)), (4, (0, 3)), (3, (0, 1, 2)), (1, ())])
@pytest.mark.parametrize("banned", [0.0, 0.4])
@pytest.mark.fast_cases(22)
def test_enough_beams_find_every_sequence_in_order(
    size: int, ends: tuple[int, ...], penalty: float, early: bool | str, banned: float
) -> None:
    model, longest, all_sequences = hashed(size, 3, banned), 4, {}
    for length in range(1, longest + 1):
        for ids in itertools.product(range(size), repeat=length):
            over = ids[-1] in ends or length == longest
            if over and not set(ids[:-1]) & set(ends):
                total = math.fsum(logprobs(model((7, *ids[:i])))[token] for i, token in enumerate(ids))
                if total > -math.inf:
                    all_sequences[ids] = total / length**penalty
    beams = beam_search(
        model, [7], num_beams=999, max_tokens=longest, eos_token_ids=ends, length_penalty=penalty, early_stopping=early
    )
    assert {beam.token_ids for beam in beams} == set(all_sequences)
    assert [beam.score for beam in beams] == pytest.approx(sorted(all_sequences.values(), reverse=True), abs=1e-12)
    assert all(beam.score == pytest.approx(all_sequences[beam.token_ids], abs=1e-12) for beam in beams)
    assert all(beam.finish_reason == ("stop" if beam.token_ids[-1] in ends else "length") for beam in beams)


@given(
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 5),
    st.sets(st.integers(0, 5)),
    st.sampled_from([-2.0, 0.0, 0.7, 1.0, 3.0]),
)
def test_properties(seed: int, size: int, num_beams: int, longest: int, ends: set[int], penalty: float) -> None:
    model, ends = hashed(size, seed, banned=0.2), {token for token in ends if token < size}
    found = {}
    for early in EARLY:
        options = dict(
            num_beams=num_beams, max_tokens=longest, eos_token_ids=ends, length_penalty=penalty, early_stopping=early
        )
        beams = found[early] = beam_search(model, (5, 5), **options)
        assert 1 <= len(beams) <= num_beams
        assert len({beam.token_ids for beam in beams}) == len(beams)
        assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
        for beam in beams:
            assert beam.score == beam.logprob / len(beam.token_ids) ** penalty
            parts = [logprobs(model((5, 5, *beam.token_ids[:i])))[token] for i, token in enumerate(beam.token_ids)]
            assert beam.logprob == pytest.approx(math.fsum(parts), abs=1e-12)
            assert not set(beam.token_ids[:-1]) & ends
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] in ends else "length")
            assert beam.finish_reason == "stop" or len(beam.token_ids) == longest
        for count in range(1, num_beams + 1):
            assert beam_search(model, (5, 5), **options, num_return_sequences=count) == beams[:count]
    for hasty, patient in itertools.pairwise(EARLY):  # a longer search can only find better ones
        assert len(found[hasty]) <= len(found[patient])
        assert all(a.score <= b.score for a, b in zip(found[hasty], found[patient], strict=False))


def search(model: LogitsOf, **options: object) -> list[Beam]:
    return beam_search(model, (5, 5), **options)


@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.0, 0.5, 9.0]))
def test_groups_without_a_penalty_and_a_single_group_with_one(
    seed: int, size: int, num_beams: int, longest: int, weight: float
) -> None:
    model = hashed(size, seed, banned=0.2)
    options = dict(max_tokens=longest, eos_token_ids=[1], early_stopping=EARLY[seed % 3], length_penalty=0.5)
    single = search(model, num_beams=num_beams, **options)
    assert search(model, num_beams=num_beams, num_beam_groups=1, diversity_penalty=weight, **options) == single
    assert search(model, num_beams=3 * num_beams, num_beam_groups=3, **options) == single  # all groups find the same


@given(st.integers(0, 2**32), st.integers(2, 7), st.integers(1, 5), st.integers(1, 5), st.sampled_from([0.3, 2.0, 1e6]))
def test_groups_of_one_beam_are_greedy_with_a_diversity_penalty(
    seed: int, size: int, groups: int, longest: int, weight: float
) -> None:
    model, end = hashed(size, seed), 1
    texts: list[list[int]] = [[] for _ in range(groups)]
    for _ in range(longest):
        counts = [0] * size
        for text in texts:
            if text[-1:] == [end]:
                continue
            scores = [x - weight * n for x, n in zip(logprobs(model((5, 5, *text))), counts, strict=True)]
            text.append(scores.index(max(scores)))
            counts[text[-1]] += text[-1] != end
    beams = search(
        model,
        num_beams=groups,
        num_beam_groups=groups,
        diversity_penalty=weight,
        max_tokens=longest,
        eos_token_ids=[end],
        early_stopping=True,
    )
    assert {beam.token_ids for beam in beams} == set(map(tuple, texts))
    assert len(beams) == len(set(map(tuple, texts)))
    for beam in beams:  # the score does not include the penalty
        parts = [logprobs(model((5, 5, *beam.token_ids[:i])))[token] for i, token in enumerate(beam.token_ids)]
        assert beam.logprob == pytest.approx(math.fsum(parts), abs=1e-9)


def test_a_group_is_penalized_for_tokens_of_earlier_groups() -> None:
    model = steps([3.0, 2.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 6)
    beams = beam_search(model, (), num_beams=4, num_beam_groups=2, diversity_penalty=1.5, max_tokens=1)
    assert [beam.token_ids[0] for beam in beams] == [0, 1, 2]  # in the second step 0 at 1.5, then 2 at 1
    beams = beam_search(model, (), num_beams=4, num_beam_groups=2, diversity_penalty=99.0, max_tokens=1)
    assert [beam.token_ids[0] for beam in beams] == [0, 1, 2, 3]
    ends = beam_search(
        model, (), num_beams=2, num_beam_groups=2, diversity_penalty=99.0, max_tokens=1, eos_token_ids=[0]
    )
    assert [beam.token_ids[0] for beam in ends] == [0]  # tokens that end a beam are not penalized


TEXTS = [(0, 1), (0, 1, 2), (0, 2, 2, 2), (1,), (2, 0, 1, 0), (2, 0, 1, 1), (2, 1)]


def after(ids: tuple[int, ...]) -> set[int]:
    """The tokens that can follow in the texts above; 3 ends a text that is a prefix of others."""
    found = {text[len(ids)] for text in TEXTS if text[: len(ids)] == ids and len(text) > len(ids)}
    return found | {3} if ids in TEXTS and found else found


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("seed", range(5))
def test_only_allowed_texts_are_found_and_complete_ones_end(seed: int, early: bool | str) -> None:
    model = hashed(4, seed)
    expected = {}
    for text in TEXTS:
        ids = (*text, 3) if after(text) else text
        expected[ids] = math.fsum(logprobs(model((5, 5, *ids[:i])))[token] for i, token in enumerate(ids))
    options = dict(max_tokens=9, eos_token_ids=[3], allowed=after, early_stopping=early, length_penalty=0.0)
    beams = search(model, num_beams=20, **options)
    assert [beam.token_ids for beam in beams] == sorted(expected, key=lambda ids: -expected[ids])
    assert [beam.score for beam in beams] == pytest.approx(sorted(expected.values(), reverse=True), abs=1e-9)
    assert {beam.finish_reason for beam in beams} == {"stop"}
    short = search(model, num_beams=20, **options | {"max_tokens": 2})
    assert {beam.token_ids for beam in short if beam.finish_reason == "stop"} == {(1,), (2, 1)}
    assert {beam.token_ids for beam in short if beam.finish_reason == "length"} == {(0, 1), (0, 2), (2, 0)}
    assert search(model, num_beams=2, **options)[0].token_ids in expected


def test_the_search_fails_without_an_allowed_token() -> None:
    with pytest.raises(ValueError, match="no token that is allowed has a finite score"):
        beam_search(steps([0.0, -np.inf]), (), num_beams=2, max_tokens=3, allowed=lambda ids: {1})
    with pytest.raises(ValueError, match="no token that is allowed has a finite score"):
        beam_search(steps([0.0, 0.0]), (), num_beams=2, max_tokens=3, allowed=lambda ids: set())


def test_ties_prefer_the_lower_beam_then_token_and_the_earlier_end() -> None:
    flat = steps(*[[0.0] * 4] * 3)
    assert [b.token_ids for b in beam_search(flat, (), num_beams=3, max_tokens=1)] == [(0,), (1,), (2,)]
    assert [b.token_ids for b in beam_search(flat, (), num_beams=3, max_tokens=2)] == [(0, 0), (0, 1), (0, 2)]
    beams = beam_search(flat, (), num_beams=3, max_tokens=2, eos_token_ids=[0], early_stopping="never")
    assert [(b.token_ids, b.score) for b in beams] == [(ids, -math.log(4)) for ids in [(0,), (1, 0), (1, 1)]]


def test_ends_beyond_the_best_candidates_are_dropped() -> None:
    model = steps([1.0, 0.9, 0.0], [0.0, 0.0, 0.0])  # token 1 alone is more likely than any pair
    [beam] = beam_search(model, (), num_beams=1, max_tokens=2, eos_token_ids=[1], length_penalty=0.0)
    assert (beam.token_ids, beam.finish_reason) == ((0, 0), "length")
    best, _ = beam_search(model, (), num_beams=2, max_tokens=2, eos_token_ids=[1], length_penalty=0.0)
    assert (best.token_ids, best.finish_reason) == ((1,), "stop")


def test_many_ends_do_not_starve_open_beams() -> None:
    model = steps([9.0, 8.0, 7.0, 6.0, 5.0, 4.0], [0.0, 0.0, 0.0, 0.0, 1.5, 2.0])
    beams = beam_search(
        model, (), num_beams=2, max_tokens=2, eos_token_ids=[0, 1, 2, 3], length_penalty=9.0, early_stopping="never"
    )
    assert [beam.token_ids for beam in beams] == [(4, 5), (4, 4)]


@pytest.mark.parametrize(("early", "num_steps"), [(True, 3), (False, 5), ("never", 7)])
def test_when_a_search_ends(early: bool | str, num_steps: int) -> None:
    seen = []
    first, second, flat = [0.4, 0.5, 0.1, 0, 0, 0], [0.5, 0.49, 0.01, 0, 0, 0], [0, 0.2, 0.2, 0.2, 0.2, 0.2]
    # worst finished beam: log(.4); best open one: log(.245) / 2 above it, log(.049) / 3 below, log(.049) / 5 above, ...
    rows = [np.log(np.array(row) + 1e-30) for row in (first, second, flat, flat, flat)]

    def model(ids: tuple[int, ...]) -> np.ndarray:
        seen.append(ids)
        return rows[len(ids) - 1]

    beam_search(model, [2], num_beams=2, max_tokens=5, eos_token_ids=[0], early_stopping=early)
    assert len(seen) == num_steps
    assert len(set(seen)) == num_steps
    assert all(ids[0] == 2 for ids in seen)


def test_a_tie_of_the_best_open_and_the_worst_finished_beam_ends_the_search() -> None:
    [beam] = beam_search(steps([0.0, 0.0]), (), num_beams=1, max_tokens=9, eos_token_ids=[0])  # a second row would fail
    assert beam.token_ids == (0,)


def test_never_uses_the_shortest_length_for_negative_penalties() -> None:
    rows = [np.log(row) for row in ([0.4, 0.58, 0.02], [0.09, 0.9, 0.01], [0.98, 0.01, 0.01], [0.98, 0.01, 0.01])]
    beams = beam_search(
        steps(*rows), (), num_beams=2, max_tokens=20, eos_token_ids=[0], length_penalty=-1.0, early_stopping="never"
    )
    assert [beam.token_ids for beam in beams] == [(0,), (1, 1, 0)]


def test_eos_at_the_last_step_is_a_stop() -> None:
    beams = beam_search(steps([1.0, 0.0]), (), num_beams=2, max_tokens=1, eos_token_ids=[0])
    assert [beam.finish_reason for beam in beams] == ["stop", "length"]


def test_logits_are_converted_to_float32_and_not_modified() -> None:
    row = np.array([1.0, 1.0 + 1e-12, 0.0])  # equal in float32: the lower id wins
    row.flags.writeable = False
    [beam] = beam_search(lambda ids: row, (), num_beams=1, max_tokens=1)
    assert beam.token_ids == (0,)
    [half] = beam_search(lambda ids: row.astype(np.float16), (), num_beams=1, max_tokens=1)
    assert half.logprob == beam.logprob == pytest.approx(logprobs(np.array([1.0, 1.0, 0.0]))[0])
    [huge] = beam_search(lambda ids: np.array([-3e38, 3e38]), (), num_beams=1, max_tokens=3, length_penalty=0.5)
    assert huge.token_ids == (1, 1, 1)
    assert math.isfinite(huge.score)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0.0, np.nan], "NaN"),
        ([0.0, np.inf], r"\+inf"),
        ([0.0, 1e300], r"\+inf"),
        ([-np.inf, -np.inf], "no finite score"),
        ([], "no finite score"),
        ([1, 2], "floats"),
        ([[0.0, 1.0]], "floats"),
    ],
)
def test_invalid_logits_are_an_error_in_any_step_and_beam(bad: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(lambda ids: np.array(bad), (), num_beams=2, max_tokens=3)
    with pytest.raises(ValueError, match=message):
        beam_search(lambda ids: np.array([1.0, 0.0] if ids != (1,) else bad), (), num_beams=2, max_tokens=3)


def test_beams_are_frozen_and_ids_may_be_numpy_or_iterators() -> None:
    model = hashed(6, 1)
    beams = beam_search(model, (1, 2), num_beams=2, max_tokens=3, eos_token_ids=(3, 3, 4))
    assert beams == beam_search(
        model, np.array([1, 2]), num_beams=np.int64(2), max_tokens=3, eos_token_ids=iter(np.array([4, 3]))
    )
    assert all(type(token) is int for beam in beams for token in beam.token_ids)
    with pytest.raises(dataclasses.FrozenInstanceError):
        beams[0].score = 0.0
