"""Steps of ``BeamSearch`` against the reference, bit for bit: ties, odd sizes, groups, grammars."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiers
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.engine.beam.params import BeamParams
from nucleate.engine.beam.search import (
    BOUND_LANES,
    BeamSearch,
    SearchError,
    _ranked_candidates,
    logprobs,
    top_score_bound,
)
from nucleate.generation import beam_search as twin
from nucleate.outputs import StepLogprobs, TokenLogprob

FACTS = json.loads((Path(__file__).parents[1] / "data" / "transformers_beam.json").read_text("utf-8"))
EARLY = [True, False, "never"]
LogitsOf = Callable[[tuple[int, ...]], np.ndarray]
Answer = tuple[tuple[int, ...], float, float, str]


def hashed(size: int, seed: int, banned: float = 0.0, *, coarse: bool = False) -> LogitsOf:
    """Logits that depend on all tokens; coarse: on a grid, so that many are equal."""

    def logits_of(ids: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(ids), *ids])
        logits = rng.normal(size=size) * 2
        if coarse:
            logits = np.round(logits * 0.7)
        out = rng.random(size) < banned
        out[rng.integers(size)] = False
        logits[out] = -np.inf
        return logits.astype(np.float32)

    return logits_of


class Tree:
    """A form as a function of what was written: see ``BeamConstraint``."""

    def __init__(self, allowed: twin.AllowedAfter, ids: tuple[int, ...] = ()) -> None:
        self.allowed, self.ids = allowed, ids

    def advance(self, token: int) -> tuple[Tree, bool]:
        tree = Tree(self.allowed, (*self.ids, token))
        return tree, not self.allowed(tree.ids)

    def mask(self, size: int) -> np.ndarray:
        mask_W = np.zeros(-(-size // 32), np.uint32)
        for token in self.allowed(self.ids):
            mask_W[token // 32] |= np.uint32(1 << (token % 32))
        return mask_W.view(np.int32)


def run(model: LogitsOf, prompt: tuple[int, ...], params: BeamParams, ends: Sequence[int], tree: Tree | None = None):
    """All steps of a search: its answers, and the search."""
    assert params.max_tokens is not None
    search, texts = BeamSearch(params, ends, params.max_tokens, tree), [()]
    while search.open:
        assert len(texts) == len(search.open)
        logits_BV = np.stack([model(prompt + ids) for ids in texts])
        before = logits_BV.copy()
        size = logits_BV.shape[1]
        masks = None if tree is None else np.stack([beam.constraint.mask(size) for beam in search.open])
        children = search.step(logits_BV, masks)
        assert np.array_equal(logits_BV, before), "logits are the caller's"
        texts = [(*texts[child.parent], child.token) for child in children]
        assert len(texts) <= params.num_beams
    answers = [(f.token_ids, f.score, f.logprob, "stop" if f.ended else "length") for f in search.best()]
    return answers, search


def wanted(model: LogitsOf, prompt: tuple[int, ...], params: BeamParams, ends: Sequence[int], **more: object):
    names = (
        "num_beams",
        "max_tokens",
        "length_penalty",
        "early_stopping",
        "num_return_sequences",
        "num_beam_groups",
        "diversity_penalty",
    )
    asked = {name: getattr(params, name) for name in names}
    beams = twin.beam_search(model, prompt, eos_token_ids=ends, **asked, **more)
    return [(beam.token_ids, beam.score, beam.logprob, beam.finish_reason) for beam in beams]


@st.composite
def searches(draw: st.DrawFn, most: int = 40) -> tuple[int, BeamParams, list[int]]:
    size, groups = draw(st.integers(1, most)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    num_beams = groups * draw(st.integers(1, 5) | st.just(size))
    params = BeamParams(
        num_beams=num_beams,
        num_beam_groups=groups,
        max_tokens=draw(st.integers(1, 6)),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from(EARLY)),
        diversity_penalty=draw(st.sampled_from([0.0, 0.4, 3.0])),
        num_return_sequences=draw(st.none() | st.integers(1, num_beams)),
    )
    ends = draw(st.lists(st.integers(0, size - 1), max_size=3))
    return size, params, ends


@given(searches(), st.integers(0, 2**32), st.sampled_from([0.0, 0.4]), st.booleans())
@settings(max_examples=tiers.count(80, 400))
def test_answers_are_those_of_the_twin(asked: tuple, seed: int, banned: float, coarse: bool) -> None:
    size, params, ends = asked
    model = hashed(size, seed, banned, coarse=coarse)
    assert run(model, (5,), params, ends)[0] == wanted(model, (5,), params, ends)


@pytest.mark.parametrize(
    "fact", FACTS["vectors"], ids=lambda v: "{num_beams} {length_penalty} {early_stopping}".format(**v)
)
def test_recorded_numbers_of_transformers(fact: dict) -> None:
    table = np.array(FACTS["table"], np.float32)
    asked = {name: fact[name] for name in ("num_beams", "length_penalty", "early_stopping")}
    params = BeamParams(max_tokens=FACTS["max_tokens"], **asked)
    answers, _ = run(lambda ids: table[ids[-1]], tuple(FACTS["prompt_ids"]), params, FACTS["eos_token_ids"])
    assert [list(ids) for ids, *_ in answers] == fact["token_ids"]
    assert [score for _, score, *_ in answers] == pytest.approx(fact["scores"], rel=1e-6)


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize(("size", "ends"), [(4, ()), (5, (1,)), (4, (0, 3))])
@pytest.mark.fast_cases(13)
def test_a_beam_as_wide_as_the_tree_finds_every_sequence_in_order(
    size: int, ends: tuple[int, ...], penalty: float, early: bool | str
) -> None:
    model, longest, every = hashed(size, 3), 4, {}
    for length in range(1, longest + 1):
        for ids in itertools.product(range(size), repeat=length):
            if (ids[-1] in ends or length == longest) and not set(ids[:-1]) & set(ends):
                rows = [twin._logprobs(model((7, *ids[:at])))[token] for at, token in enumerate(ids)]
                every[ids] = float(sum(rows)) / length**penalty
    params = BeamParams(num_beams=size**longest, max_tokens=longest, length_penalty=penalty, early_stopping=early)
    answers, _ = run(model, (7,), params, ends)
    assert {ids for ids, *_ in answers} == set(every)
    assert [score for _, score, *_ in answers] == pytest.approx(sorted(every.values(), reverse=True), abs=1e-12)


@pytest.mark.parametrize("size", [63, 64, 65, 640, 1000, 4097])
@pytest.mark.parametrize("num_beams", [1, 2, 9])
@pytest.mark.parametrize("coarse", [True, False])
def test_answers_of_a_large_vocabulary(size: int, num_beams: int, coarse: bool) -> None:
    """Where parts of the scores stand for all; with a grid of scores, ties across them."""
    model = hashed(size, size, 0.2, coarse=coarse)
    ends = [size - 1, 7]
    params = BeamParams(num_beams=num_beams, max_tokens=3, early_stopping="never")
    assert run(model, (5,), params, ends)[0] == wanted(model, (5,), params, ends)
    flat = BeamParams(num_beams=num_beams, max_tokens=2)
    assert run(lambda ids: np.zeros(size, np.float32), (), flat, [3])[0] == wanted(
        lambda ids: np.zeros(size, np.float32), (), flat, [3]
    )


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 30), st.booleans())
def test_the_order_is_that_of_a_whole_sort(seed: int, size: int, count: int, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    total_BV = rng.normal(size=(3, size))
    if coarse:
        total_BV = np.round(total_BV)
    total_BV[rng.random((3, size)) < rng.choice([0.0, 0.5, 0.97])] = -np.inf
    order = sorted(range(3 * size), key=lambda at: (-total_BV.ravel()[at], at))
    order = [at for at in order if total_BV.ravel()[at] > -np.inf]
    assert list(_ranked_candidates(total_BV, {}, count)) == order
    less = {token: float(rng.choice([0.5, 1.0])) for token in range(0, size, 3)}
    penalised = total_BV - np.array([less.get(token, 0.0) for token in range(size)])
    order.sort(key=lambda at: (-penalised.ravel()[at], at))
    assert list(_ranked_candidates(total_BV, less, count)) == order
    least = top_score_bound(total_BV.ravel(), count)
    assert np.count_nonzero(total_BV >= least) >= min(count, 3 * size)
    if 3 * size >= BOUND_LANES * count and not np.isinf(total_BV).any():
        assert least > -np.inf


@given(st.integers(0, 2**32), st.integers(1, 700), st.integers(1, 5), st.sampled_from([1e-30, 1.0, 1e4, 1e38]))
def test_logprobs_are_those_of_the_twin_to_the_last_bit(seed: int, size: int, rows: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        logits_BV = np.clip(rng.normal(size=(rows, size)) * scale, -3e38, 3e38).astype(np.float32)
    logits_BV[rng.random((rows, size)) < 0.1] = -np.inf
    logits_BV[:, 0] = 0.5
    expected = np.stack([twin._logprobs(row) for row in logits_BV])
    assert np.array_equal(logprobs(logits_BV), expected)
    assert np.array_equal(logprobs(logits_BV[::1][:, :]), expected)
    assert np.array_equal(logprobs(np.asfortranarray(logits_BV)), expected)


def sentences(seed: int, size: int) -> twin.AllowedAfter:
    """What some random sentences allow; the last token of the vocabulary ends one that others go on from."""
    rng = np.random.default_rng(seed)
    texts = {tuple(rng.integers(0, size, rng.integers(1, 6)).tolist()) for _ in range(rng.integers(1, 30))}

    def allowed(ids: tuple[int, ...]) -> set[int]:
        found = {text[len(ids)] for text in texts if text[: len(ids)] == ids and len(text) > len(ids)}
        return found | {size} if ids in texts and found else found

    return allowed


@given(searches(most=70), st.integers(0, 2**32), st.booleans())
@settings(max_examples=tiers.count(60, 300))
def test_answers_of_a_form_are_those_of_the_twin(asked: tuple, seed: int, coarse: bool) -> None:
    size, params, _ = asked
    model, allowed = hashed(size + 1, seed, coarse=coarse), sentences(seed, size)
    for ends in ([size], []):
        answers, _ = run(model, (5,), params, ends, Tree(allowed))
        assert answers == wanted(model, (5,), params, ends, allowed=allowed)
        assert answers
        assert all(answer[3] == "length" or not allowed(answer[0]) or answer[0][-1] in ends for answer in answers)


def test_a_form_that_ends_nearly_everywhere_starves_nobody() -> None:
    """Far more ends than EOS ids come before the tokens with which a text can go on."""
    size, open_ones = 500, {480, 481, 482}

    def allowed(ids: tuple[int, ...]) -> Sequence[int]:
        return range(size) if all(token in open_ones for token in ids) else ()

    def model(ids: tuple[int, ...]) -> np.ndarray:
        return np.linspace(9, 0, size, dtype=np.float32)

    params = BeamParams(num_beams=3, max_tokens=4, length_penalty=4.0, early_stopping="never")
    answers, search = run(model, (), params, (), Tree(allowed))
    assert answers == wanted(model, (), params, (), allowed=allowed)
    assert search.length > 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([0.0, np.nan, 1.0], "NaN at token 1"),
        ([0.0, 1.0, np.inf], r"\+inf at token 2"),
        ([np.inf, np.nan, 0.0], "NaN at token 1"),
        ([-np.inf] * 3, "every token is at -inf"),
    ],
)
def test_a_row_without_a_next_token_is_an_error_that_names_its_beam(bad: list[float], reason: str) -> None:
    search = BeamSearch(BeamParams(num_beams=2, max_tokens=5), (), 5)
    with pytest.raises(SearchError, match=reason) as error:
        search.step(np.array([bad], np.float32))
    assert error.value.beam == 0
    assert len(search.step(np.array([[0.0, 2.0, 1.0]], np.float32))) == 2  # it stays as it was
    with pytest.raises(SearchError, match=reason) as error:
        search.step(np.array([[0.0, 0.0, 0.0], bad], np.float32))
    assert error.value.beam == 1
    assert error.value.reason


def test_a_mask_that_leaves_nothing_is_an_error_that_names_its_beam() -> None:
    search = BeamSearch(BeamParams(num_beams=2, max_tokens=5), (), 5)
    all_of, none_of = np.array([[-1]], np.int32), np.array([[-8]], np.int32)  # bits of no token of the vocabulary
    search.step(np.array([[0.0, 2.0, 1.0]], np.float32), all_of)
    with pytest.raises(SearchError, match="every token that is allowed is at -inf") as error:
        search.step(np.zeros((2, 3), np.float32), np.concatenate([all_of, none_of]))
    assert error.value.beam == 1
    with pytest.raises(SearchError, match="every token that is allowed is at -inf") as error:
        search.step(np.array([[0.0, -np.inf, 0.0], [0.0, 0.0, 0.0]], np.float32), np.array([[2], [1]], np.int32))
    assert error.value.beam == 0


def test_steps_are_told_of_in_the_order_of_the_answer() -> None:
    asked: list[tuple[int, int]] = []

    def told(place: int, token: int) -> StepLogprobs:
        asked.append((place, token))
        return StepLogprobs(TokenLogprob(token, float(place), None), (), ())

    search = BeamSearch(BeamParams(num_beams=2, max_tokens=3), [0], 3)
    model = hashed(9, 1)
    texts: list[tuple[int, ...]] = [()]
    while search.open:
        children = search.step(np.stack([model(ids) for ids in texts]), None, told)
        texts = [(*texts[child.parent], child.token) for child in children]
    assert len(asked) <= 3 * 2 + 3 * 2  # of those that go on or end, no other candidate
    for found in search.best():
        assert [link.logprobs.chosen.token_id for link in found.steps] == list(found.token_ids)
        assert len(found.token_ids) == found.length


def test_a_group_that_is_over_goes_on_with_nothing() -> None:
    params = BeamParams(num_beams=2, num_beam_groups=2, max_tokens=9, early_stopping=True, diversity_penalty=50.0)
    search = BeamSearch(params, [0], 9)
    assert search.step(np.array([[-9.0, 1.0, 0.9, -9.0]], np.float32)) == [(0, 1), (0, 2)]
    rows = [[9.0, -9.0, -9.0, 8.0], [-9.0, -9.0, 0.9, 1.0]]  # the first one ends, though 3 comes next
    assert search.step(np.array(rows, np.float32)) == [(1, 3)]


def test_groups_begin_with_one_beam_and_end_one_by_one() -> None:
    params = BeamParams(num_beams=4, num_beam_groups=2, max_tokens=9, early_stopping=True, diversity_penalty=50.0)
    search = BeamSearch(params, [0, 1], 9)
    assert len(search.open) == 1
    children = search.step(np.array([[5.0, 4.0, 9.0, 8.0, 1.0, 0.5]], np.float32))
    assert children == [(0, 2), (0, 3)]  # of the first group; the second one, where these cost 50, ends with 0 and 1
    assert len(search.open) == 2
    assert search.step(np.array([[0.0] * 6, [1.0, 0.9, 0, 0, 0, 0]], np.float32)) == []
    assert {found.token_ids for found in search.best()} == {(0,), (1,), (2, 0), (2, 1)}
