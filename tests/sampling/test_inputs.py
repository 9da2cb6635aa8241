"""Inputs: every unambiguous type is accepted, any other is rejected with a message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nucleate as nc
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import LogitsInput, check_ids, contiguous_mask_layout, histories, history, masks, per_row
from nucleate.sampling.stages import Allowed, BadWords, Dry, LogitBias, MinTokens, Suppress, TopK, Xtc


def packed(allowed, size):
    """A bitmask that allows some tokens."""
    words = np.zeros(-(-size // 32), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


# ---- masks


@given(
    st.integers(1, 130).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1)))
)
def test_a_mask_allows_the_tokens_whose_bits_are_set(case):
    size, allowed = case
    p = nc.probabilities(np.zeros((1, size)), (), mask=packed(allowed, size)[None])[0]
    assert np.flatnonzero(p).tolist() == sorted(allowed)
    assert nc.sample(np.zeros((1, size)), (), mask=packed(allowed, size)[None])[0] in allowed


def test_each_row_has_its_own_mask_and_spare_bits_are_ignored():
    logits = np.zeros((3, 33), np.float32)
    mask = np.zeros((3, 2), np.int32)
    mask[0], mask[1], mask[2, 1] = -1, packed({32, 5}, 33), -(2**31) | 1  # the highest bit is the sign
    p = nc.probabilities(logits, (), mask=mask)
    assert [np.flatnonzero(row).tolist() for row in p] == [list(range(33)), [5, 32], [32]]
    assert (nc.probabilities(logits, (), mask=mask.view(np.uint32)) == p).all()
    assert (nc.probabilities(logits, (), mask=np.pad(mask, ((0, 0), (0, 3)), constant_values=-1)) == p).all()
    assert (nc.probabilities(logits, (), mask=np.asfortranarray(mask)) == p).all()
    assert (nc.probabilities(logits, (), mask=np.repeat(mask, 2, axis=1)[:, ::2]) == p).all()
    torch = pytest.importorskip("torch")
    assert (nc.probabilities(logits, (), mask=torch.tensor(mask)) == p).all()


def test_an_empty_mask_is_an_error_of_its_row():
    logits = np.zeros((2, 40), np.float32)
    logits[1, 7] = -np.inf
    mask = np.zeros((2, 2), np.int32)
    mask[1] = packed({7}, 40)
    with pytest.raises(nc.LogitsError) as caught:
        nc.sample(logits, nc.SamplingParams(seed=1, temperature=0.5), mask=mask)
    assert caught.value.errors == dict.fromkeys((0, 1), "every token is at -inf after mask")


def test_a_mask_applies_before_every_truncation():
    logits = np.array([[3.0, 2.0, 1.0, 0.0]])
    for order in nc.PRESETS:
        params = nc.SamplingParams(top_k=2, top_p=0.99, order=order)
        p = nc.probabilities(logits, params, mask=packed({1, 2, 3}, 4)[None])[0]
        assert np.flatnonzero(p).tolist() == [1, 2]
    greedy = nc.sample(logits, nc.SamplingParams(temperature=0), mask=packed({2, 3}, 4)[None])
    assert greedy.tolist() == [2]


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (np.zeros(2, np.int32), ValueError, r"mask must have the shape \[2, 2\], 32 tokens per word, got \[2\]"),
        (np.zeros((2, 1), np.int32), ValueError, r"mask must have the shape \[2, 2\]"),
        (np.zeros((1, 2), np.int32), ValueError, r"mask must have the shape \[2, 2\]"),
        (np.zeros((2, 2, 1), np.int32), ValueError, r"mask must have the shape \[2, 2\]"),
        (np.zeros((2, 40), bool), TypeError, "mask must be of int32, got bool"),
        (np.zeros((2, 2), np.int64), TypeError, "mask must be of int32, got int64"),
        (np.zeros((2, 2), np.float32), TypeError, "mask must be of int32, got float32"),
        (np.zeros((2, 2), ">i4"), TypeError, "mask must be of int32, got >i4"),  # bits in another memory layout
    ],
)
def test_invalid_masks_are_rejected(mask, error, words):
    with pytest.raises(error, match=words):
        masks(mask, 2, 33)
    with pytest.raises(error, match=words):
        nc.sample(np.zeros((2, 33)), (), mask=mask)


def test_no_mask_is_none_per_row():
    assert masks(None, 3, 7) == [None] * 3
    assert masks(np.zeros((0, 1), np.int32), 0, 7) == []


# ---- integers


def test_an_integer_applies_to_all_rows_and_a_list_to_each():
    assert per_row(5, 3, "step") == [5, 5, 5]
    assert per_row(np.array([1, 2]), 2, "step") == [1, 2]
    assert per_row((0, 2**64 - 1), 2, "step") == [0, 2**64 - 1]
    assert per_row(range(2), 2, "step") == [0, 1]
    assert per_row([], 0, "step") == []
    assert [type(one) for one in per_row(np.array([1], np.uint64), 1, "step")] == [int]
    with pytest.raises(ValueError, match="step has 1 entries, but the logits have 2 rows"):
        per_row([1], 2, "step")
    for bad in (-1, 2**64, 1.0, True, None, "1", np.float64(1), np.True_):
        with pytest.raises(ParameterError, match=r"step must be an integer >= 0 and < 2\*\*64, got") as caught:
            per_row(bad, 1, "step")
        assert caught.value.field == "step"


# ---- histories and ids


@pytest.mark.parametrize(
    "ids", [[], (), np.zeros(0), np.zeros(0, np.int32), range(3), np.array([0, 2], np.uint8), [2] * 9]
)
def test_a_history_is_a_list_of_ids_of_any_type(ids):
    got = history(ids, 3, "prompt_ids")
    assert (got.dtype, got.tolist()) == (np.int64, [int(token) for token in ids])


@pytest.mark.parametrize("ids", [[1.0], ["a"], [True], [None], [[1]], "12", 5, np.zeros((1, 1), int), {1: 2}])
def test_invalid_histories_are_rejected(ids):
    with pytest.raises(TypeError, match="prompt_ids must be a list of token ids, got"):
        history(ids, 3, "prompt_ids")


def test_a_text_instead_of_ids_is_an_error_that_says_what_to_do():
    with pytest.raises(TypeError, match="got the text 'Once upon'; encode it with the tokenizer"):
        history("Once upon", 3, "prompt_ids")


@pytest.mark.parametrize("ids", [[3], [-1], [0, 2**63 - 1], np.array([2**64 - 1], np.uint64)])
def test_ids_outside_the_vocabulary_are_rejected(ids):
    with pytest.raises(ValueError, match=r"prompt_ids holds token ids outside the vocabulary \(0\.\.2\)"):
        history(ids, 3, "prompt_ids")


def test_a_history_is_copied():
    given = np.array([1, 2])
    copied = history(given, 3, "prompt_ids")
    given[0] = 0
    assert copied.tolist() == [1, 2]
    assert [ids.tolist() for ids in histories(None, 2, 3, "prompt_ids")] == [[], []]


@pytest.mark.parametrize(
    ("stage", "field", "token"),
    [
        (LogitBias({9: 1.0, 2: 1.0}), "logit_bias", 9),
        (Suppress((1, 10)), "suppress_token_ids", 10),
        (Allowed((11,)), "allowed_token_ids", 11),
        (MinTokens(1, (12,)), "ends", 12),
        (BadWords(("text", (1, 13))), "bad_words", 13),
        (Dry(1.0, breakers=((14, 1),)), "dry_sequence_breakers", 14),
        (Xtc(0.5, exempt=(15,)), "xtc_exempt_token_ids", 15),
    ],
    ids=repr,
)
def test_an_id_in_a_stage_must_be_in_the_vocabulary(stage, field, token):
    words = f"^{field} names token {token}, but the vocabulary ends at {token - 1}$"
    with pytest.raises(ParameterError, match=words) as caught:
        check_ids((TopK(10**6), stage), token)
    assert caught.value.field == field
    check_ids((TopK(10**6), stage), token + 1)


# ---- logits


def test_rows_are_converted_lazily():
    wide = np.zeros((2, 4), np.float64)
    rows = LogitsInput(wide)
    wide[1] = 1.0
    assert rows[1].tolist() == [1.0] * 4
    assert (rows[1].dtype, rows.shape, len(rows)) == (np.float32, (2, 4), 2)
    assert [row.tolist() for row in rows] == [[0.0] * 4, [1.0] * 4]


def test_contiguous_masks_are_not_copied():
    mask = np.full((3, 4), -1, np.int32)
    assert contiguous_mask_layout(None, 3, 100) == (0, 0)
    assert contiguous_mask_layout(mask, 3, 100) == (mask.ctypes.data, 16)
    for other in (
        mask[:, ::2],
        mask.astype(np.int64),
        mask.astype(">i4"),
        mask[:2],
        mask[:, :3],
        mask[0],
        mask.tolist(),
    ):
        assert contiguous_mask_layout(other, 3, 100) is None
