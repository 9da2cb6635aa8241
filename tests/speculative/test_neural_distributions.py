"""Trained proposers sample from the distributions they report, or with the noise of the target."""

from __future__ import annotations

import numpy as np
import pytest
from chi_square import assert_follows
from test_neural import observe_text

import nucleate as nc
from nucleate.models.numpy_llama import Llama
from nucleate.sampling import noise
from nucleate.speculative.draft import Draft, DraftContext, TargetOutput
from nucleate.speculative.neural import EMBEDDED_METHODS, load
from nucleate.speculative.neural.draft_sampling import sample_tokens

TEXT = [0, 2, 417, 3, 905, 11, 262, 1300, 77, 903, 5, 1021]


def drafts_of(
    name: str, model: Llama, count: int, tokens: int, temperature: float = 1.0, width: int = 1
) -> list[Draft]:
    """Drafts of one text with many seeds."""
    proposer = load(name, model, width)
    found = []
    for start in range(0, count, 250):
        keys = range(start, start + 250)
        observe_text(proposer, model, keys, TEXT)
        states = [DraftContext(key, TEXT, 5, 1000 + key, temperature, shared_noise=False) for key in keys]
        found += proposer.propose(states, [tokens] * 250)
        for key in keys:
            proposer.forget(key)
    return found


BINS_V = np.arange(4096) * 7919 % 13
"""The bin of each token: any distribution has some mass in most of them."""


def fits(tokens: list[int], distributions: list[np.ndarray]) -> bool:
    """Whether tokens fit their distributions, by a chi-square test."""
    p = np.mean([np.bincount(BINS_V, distribution_V, 13) for distribution_V in distributions], axis=0)
    try:
        assert_follows(np.bincount(BINS_V[tokens], minlength=13), p)
    except AssertionError:
        return False
    return True


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("name", "temperature"), [*((name, 1.0) for name in EMBEDDED_METHODS), ("eagle", 0.7)])
def test_tokens_have_the_reported_distributions(name: str, temperature: float, model: Llama) -> None:
    drafts = drafts_of(name, model, 1500, 2, temperature)
    distributions = [draft.distributions for draft in drafts]
    first_V = distributions[0][0]
    assert first_V.dtype == np.float64
    assert first_V.shape == (4096,)
    assert first_V.sum() == pytest.approx(1)
    for draft in drafts:
        np.testing.assert_allclose(draft.distributions[0], first_V, atol=1e-5)
    for index in range(2):
        tokens = [draft.tokens[index] for draft in drafts]
        assert fits(tokens, [draft.distributions[index] for draft in drafts])
        assert not fits(tokens, [np.roll(draft.distributions[index], 1) for draft in drafts])  # other distributions
    common = max({draft.tokens[0] for draft in drafts}, key=[draft.tokens[0] for draft in drafts].count)
    after = [draft for draft in drafts if draft.tokens[0] == common]
    assert fits([draft.tokens[1] for draft in after], [draft.distributions[1] for draft in after])
    if name in ("draft", "eagle"):  # the second token depends on the first
        other = next(draft for draft in drafts if draft.tokens[0] != common)
        assert np.abs(other.distributions[1] - after[0].distributions[1]).sum() > 0.1
    else:
        for draft in drafts[:50]:
            np.testing.assert_allclose(draft.distributions[1], after[0].distributions[1], atol=1e-5)


def rows(count: int, size: int = 700, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((count, size)) * 3).astype(np.float32)


@pytest.mark.parametrize("size", [700, 256, 257, 5, 4096])
def test_shared_noise_samples_as_the_target(size: int) -> None:
    logits_RV = rows(12, size)
    logits_RV[4, :-2] = -np.inf
    seeds = [99, 2**64 - 1, 0, 2**33 + 5, *range(8)]
    states = [DraftContext(0, [1] * (10 + row), 4, seeds[row], (0.5, 1.0, 1.7)[row % 3]) for row in range(12)]
    indices = [row % 5 for row in range(12)]
    for row, one in enumerate(sample_tokens(logits_RV, states, indices)):
        params = nc.SamplingParams(temperature=states[row].temperature, seed=states[row].seed)
        assert one.token == nc.sample(logits_RV[row][None], params, step=6 + row + indices[row])[0]
        assert one.distribution is None


def test_draft_noise_has_its_own_stream() -> None:
    logits_RV = rows(4)
    states = [DraftContext(0, [1] * 9, 4, 5, 0.8, shared_noise=False)] * 4
    sampled = sample_tokens(logits_RV, states, range(4))
    for index, one in enumerate(sampled):
        x_V = logits_RV[index].astype(np.float64) / 0.8
        distribution_V = np.exp(x_V - x_V.max())
        distribution_V /= distribution_V.sum()
        assert one.distribution is not None
        np.testing.assert_allclose(one.distribution, distribution_V, rtol=1e-12)
        u = noise.uniform(5, 5, noise.DRAFT, np.array([index]))[0]
        assert one.token == np.flatnonzero(distribution_V.cumsum() > u)[0]
    again = sample_tokens(logits_RV[2:3], states[:1], [2])
    assert again[0].token == sampled[2].token


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_logits_without_a_valid_token(temperature: float, *, shared: bool) -> None:
    logits_RV = rows(6)
    logits_RV[1, 3], logits_RV[2, 0], logits_RV[3] = np.nan, np.inf, -np.inf
    logits_RV[4, 1:] = -np.inf
    states = [DraftContext(0, [1] * 9, 4, 5, temperature, shared)] * 6
    tokens = [one.token for one in sample_tokens(logits_RV, states, [0] * 6)]
    assert tokens[1:5] == [-1, -1, -1, 0]
    assert min(tokens[0], tokens[5]) >= 0
    if temperature < 1:
        assert tokens[0] == logits_RV[0].argmax()


@pytest.mark.parametrize("name", ["medusa", "eagle", "dflash"])
def test_nan_hidden_states_give_no_draft(name: str, model: Llama) -> None:
    proposer = load(name, model)
    observe_text(proposer, model, range(2), TEXT)
    width = 192 * len(proposer.layers)
    proposer.observe([TargetOutput(1, len(TEXT) - 1, TEXT[-1:], np.full((1, width), np.nan, np.float32))])
    states = [DraftContext(0, TEXT, 5, 3), DraftContext(1, [*TEXT, 8], 5, 3)]
    one, other = proposer.propose(states, [3, 3])
    assert len(one) == 3
    assert not other.tokens
