"""Steps of ``BeamSearch`` against the reference, bit for bit: ties, odd sizes, groups, grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tiers
from beam_searches import NAMES, hashed
from hypothesis import given, settings
from hypothesis import strategies as st

from nucleate.engine.beam_params import BeamParams
from nucleate.engine.beam_search import (
    BOUND_LANES,
    BeamSearch,
    SearchError,
    _ranked_candidates,
    logprobs,
    top_score_bound,
)
from nucleate.generation import beam_search as reference
from nucleate.outputs import StepLogprobs, TokenLogprob

EARLY = [True, False, "never"]
LogitsOf = Callable[[tuple[int, ...]], np.ndarray]
Beam = tuple[tuple[int, ...], float, float, str]


class Tree:
    """A constraint as a function of the tokens so far, see ``BeamConstraint``."""

    def __init__(self, allowed: reference.AllowedAfter, ids: tuple[int, ...] = ()) -> None:
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
    """Run a search. Returns its beams and the search."""
    assert params.max_tokens is not None
    search, texts = BeamSearch(params, ends, params.max_tokens, tree), [()]
    while search.open:
        assert len(texts) == len(search.open)
        logits_BV = np.stack([model(prompt + ids) for ids in texts])
        before = logits_BV.copy()
        size = logits_BV.shape[1]
        masks = None if tree is None else np.stack([beam.constraint.mask(size) for beam in search.open])
        children = search.step(logits_BV, masks)
        assert np.array_equal(logits_BV, before), "logits must not be modified"
        texts = [(*texts[child.parent], child.token) for child in children]
        assert len(texts) <= params.num_beams
    beams = [(f.token_ids, f.score, f.logprob, "stop" if f.ended else "length") for f in search.best()]
    return beams, search


def expected_beams(model: LogitsOf, prompt: tuple[int, ...], params: BeamParams, ends: Sequence[int], **more: object):
    case = {name: getattr(params, name) for name in ("max_tokens", *NAMES)}
    beams = reference.beam_search(model, prompt, eos_token_ids=ends, **case, **more)
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


@pytest.mark.slow
@given(searches(), st.integers(0, 2**32), st.sampled_from([0.0, 0.4]), st.booleans())
@settings(max_examples=tiers.count(80, 400))
def test_beams_equal_the_reference(case: tuple, seed: int, banned: float, coarse: bool) -> None:
    size, params, ends = case
    model = hashed(size, seed, banned, coarse=coarse)
    assert run(model, (5,), params, ends)[0] == expected_beams(model, (5,), params, ends)


@pytest.mark.slow
@pytest.mark.parametrize("size", [63, 64, 65, 640, 1000, 4097])
@pytest.mark.parametrize("num_beams", [1, 2, 9])
@pytest.mark.parametrize("coarse", [True, False])
def test_beams_of_large_vocabularies(size: int, num_beams: int, coarse: bool) -> None:
    """Where blocks bound the scores; with rounded scores, ties across blocks."""
    model = hashed(size, size, 0.2, coarse=coarse)
    ends = [size - 1, 7]
    params = BeamParams(num_beams=num_beams, max_tokens=3, early_stopping="never")
    assert run(model, (5,), params, ends)[0] == expected_beams(model, (5,), params, ends)
    flat = BeamParams(num_beams=num_beams, max_tokens=2)
    assert run(lambda ids: np.zeros(size, np.float32), (), flat, [3])[0] == expected_beams(
        lambda ids: np.zeros(size, np.float32), (), flat, [3]
    )


@given(st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 30), st.booleans())
def test_candidates_are_in_the_order_of_a_full_sort(seed: int, size: int, count: int, coarse: bool) -> None:
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
def test_logprobs_are_bit_equal_to_the_reference(seed: int, size: int, rows: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(over="ignore"):
        logits_BV = np.clip(rng.normal(size=(rows, size)) * scale, -3e38, 3e38).astype(np.float32)
    logits_BV[rng.random((rows, size)) < 0.1] = -np.inf
    logits_BV[:, 0] = 0.5
    expected = np.stack([reference._logprobs(row) for row in logits_BV])
    assert np.array_equal(logprobs(logits_BV), expected)
    assert np.array_equal(logprobs(logits_BV[::1][:, :]), expected)
    assert np.array_equal(logprobs(np.asfortranarray(logits_BV)), expected)


def sentences(seed: int, size: int) -> reference.AllowedAfter:
    """A constraint that allows some random sentences. The last token of the vocabulary ends a sentence."""
    rng = np.random.default_rng(seed)
    texts = {tuple(rng.integers(0, size, rng.integers(1, 6)).tolist()) for _ in range(rng.integers(1, 30))}

    def allowed(ids: tuple[int, ...]) -> set[int]:
        found = {text[len(ids)] for text in texts if text[: len(ids)] == ids and len(text) > len(ids)}
        return found | {size} if ids in texts and found else found

    return allowed


@pytest.mark.slow
@given(searches(most=70), st.integers(0, 2**32), st.booleans())
@settings(max_examples=tiers.count(60, 300))
def test_constrained_beams_equal_the_reference(case: tuple, seed: int, coarse: bool) -> None:
    size, params, _ = case
    model, allowed = hashed(size + 1, seed, coarse=coarse), sentences(seed, size)
    for ends in ([size], []):
        beams, _ = run(model, (5,), params, ends, Tree(allowed))
        assert beams == expected_beams(model, (5,), params, ends, allowed=allowed)
        assert beams
        assert all(beam[3] == "length" or not allowed(beam[0]) or beam[0][-1] in ends for beam in beams)


def test_many_possible_ends_do_not_starve_open_beams() -> None:
    """Far more tokens that end a text have higher scores than those that continue it."""
    size, open_ones = 500, {480, 481, 482}

    def allowed(ids: tuple[int, ...]) -> Sequence[int]:
        return range(size) if all(token in open_ones for token in ids) else ()

    def model(ids: tuple[int, ...]) -> np.ndarray:
        return np.linspace(9, 0, size, dtype=np.float32)

    params = BeamParams(num_beams=3, max_tokens=4, length_penalty=4.0, early_stopping="never")
    beams, search = run(model, (), params, (), Tree(allowed))
    assert beams == expected_beams(model, (), params, (), allowed=allowed)
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
def test_rows_without_a_valid_token_are_errors_of_their_beam(bad: list[float], reason: str) -> None:
    search = BeamSearch(BeamParams(num_beams=2, max_tokens=5), (), 5)
    with pytest.raises(SearchError, match=reason) as error:
        search.step(np.array([bad], np.float32))
    assert error.value.beam == 0
    assert len(search.step(np.array([[0.0, 2.0, 1.0]], np.float32))) == 2  # the search is unchanged
    with pytest.raises(SearchError, match=reason) as error:
        search.step(np.array([[0.0, 0.0, 0.0], bad], np.float32))
    assert error.value.beam == 1
    assert error.value.reason


def test_masks_that_allow_nothing_are_errors_of_their_beam() -> None:
    search = BeamSearch(BeamParams(num_beams=2, max_tokens=5), (), 5)
    all_of, none_of = np.array([[-1]], np.int32), np.array([[-8]], np.int32)  # only bits outside the vocabulary
    search.step(np.array([[0.0, 2.0, 1.0]], np.float32), all_of)
    with pytest.raises(SearchError, match="every token that is allowed is at -inf") as error:
        search.step(np.zeros((2, 3), np.float32), np.concatenate([all_of, none_of]))
    assert error.value.beam == 1
    with pytest.raises(SearchError, match="every token that is allowed is at -inf") as error:
        search.step(np.array([[0.0, -np.inf, 0.0], [0.0, 0.0, 0.0]], np.float32), np.array([[2], [1]], np.int32))
    assert error.value.beam == 0


def test_logprobs_are_in_the_order_of_the_output() -> None:
    case: list[tuple[int, int]] = []

    def logprobs_of(position: int, token: int) -> StepLogprobs:
        case.append((position, token))
        return StepLogprobs(TokenLogprob(token, float(position), None), (), ())

    search = BeamSearch(BeamParams(num_beams=2, max_tokens=3), [0], 3)
    model = hashed(9, 1)
    texts: list[tuple[int, ...]] = [()]
    while search.open:
        children = search.step(np.stack([model(ids) for ids in texts]), None, logprobs_of)
        texts = [(*texts[child.parent], child.token) for child in children]
    assert len(case) <= 3 * 2 + 3 * 2  # only for beams that continue or end
    for found in search.best():
        assert [link.logprobs.chosen.token_id for link in found.steps] == list(found.token_ids)
        assert len(found.token_ids) == found.length
