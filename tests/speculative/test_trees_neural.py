"""Trained heads that draft trees: consistent with chains along every branch, and higher acceptance."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from test_neural import BEGINNINGS, fresh, fresh_of, observe_text
from test_neural_distributions import drafts_of, fits, rows
from toy_requests import drive

import nucleate as nc
from nucleate.engine.request import Request
from nucleate.models.cpu_operations import one_thread
from nucleate.models.numpy_llama import Llama
from nucleate.sampling import noise
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import ROOT, Draft, DraftContext
from nucleate.speculative.neural import EMBEDDED_METHODS, load
from nucleate.speculative.neural.draft_sampling import SiblingRequest, sample_siblings, sample_tokens
from nucleate.speculative.neural.eagle import TreeBuilder
from nucleate.speculative.neural.medusa import HEAD_ACCURACY, tree_structure

TREES = ("medusa", "eagle")


@pytest.fixture(scope="module")
def texts(llm: nc.LLM) -> list[list[int]]:
    return [llm.encode(text) for text in BEGINNINGS]


def gumbel(u: np.ndarray) -> np.ndarray:
    return -np.log(-np.log1p(-u))


# siblings


@pytest.mark.parametrize("size", [700, 256, 257, 5])
def test_siblings_with_the_noise_of_the_target(size: int) -> None:
    """The first is what the target samples; the others follow by their scores in the Gumbel race."""
    logits_RV = rows(8, size)
    logits_RV[4, :-2] = -np.inf
    requests = [
        SiblingRequest(DraftContext(0, [1] * (10 + row), 4, row * 77, (0.5, 1.0)[row % 2]), row % 3, row * 5, 1 + row)
        for row in range(8)
    ]
    firsts = sample_tokens(logits_RV, [one.context for one in requests], [one.depth for one in requests])
    for logits_V, one, found, first in zip(
        logits_RV, requests, sample_siblings(logits_RV, requests), firsts, strict=True
    ):
        x_V = logits_V.astype(np.float64) / one.context.temperature
        seed, step = one.context.seed, one.context.position + one.depth
        groups = np.arange(-(-size // GROUP_SIZE))
        with np.errstate(divide="ignore"):
            mass_G = np.array([np.logaddexp.reduce(x_V[g * GROUP_SIZE : (g + 1) * GROUP_SIZE]) for g in groups])
        group_G = mass_G + gumbel(noise.uniform(seed, step, noise.GROUP, groups))
        token_V = x_V + gumbel(noise.uniform(seed, step, noise.TOKEN, np.arange(size)))
        behind_V = np.full(size, np.inf)
        for g in groups:
            own = slice(g * GROUP_SIZE, (g + 1) * GROUP_SIZE)
            if np.isfinite(group_G[g]):
                behind_V[own] = group_G.max() - group_G[g] + token_V[own].max() - token_V[own]
        expected = [
            token for token in np.argsort(behind_V, kind="stable")[: one.num_siblings] if np.isfinite(behind_V[token])
        ]
        assert [sibling.token for sibling in found] == expected
        assert found[0].token == first.token
        weights = np.exp(-behind_V[expected])
        assert [sibling.probability for sibling in found] == pytest.approx(weights / weights.sum())
        assert all(sibling.distribution is None for sibling in found)


def test_greedy_and_sampled_siblings() -> None:
    logits_RV = rows(3)
    logits_RV[1, 5:] = -np.inf
    logits_RV[2, 9] = np.nan
    cold = DraftContext(0, [1] * 5, 4, 9, 0.0)
    best, few, none = sample_siblings(logits_RV, [SiblingRequest(cold, 0, 0, 8)] * 3)
    assert [sibling.token for sibling in best] == np.argsort(-logits_RV[0])[:8].tolist()
    distribution = np.exp(logits_RV[0].astype(np.float64))
    assert [sibling.probability for sibling in best] == pytest.approx(
        distribution[[sibling.token for sibling in best]] / distribution.sum()
    )
    assert len(few) == 5
    assert none == []
    warm = cold._replace(temperature=0.7, shared_noise=False)
    [sampled] = sample_siblings(logits_RV[:1], [SiblingRequest(warm, 2, 4, 3)])
    assert sampled[0].token == sample_tokens(logits_RV[:1], [warm], [4])[0].token
    left = np.exp(logits_RV[0].astype(np.float64) / 0.7)
    for sibling in sampled:
        np.testing.assert_allclose(sibling.distribution, left / left.sum(), rtol=1e-9)
        left[sibling.token] = 0
    assert len({sibling.token for sibling in sampled}) == 3
    assert sample_siblings(logits_RV[:1], [SiblingRequest(warm, 2, 4, 0)]) == [[]]


# drafts


def test_medusa_trees_are_the_most_likely_combinations() -> None:
    nodes = tree_structure(12, 3, 3)
    chances, depths = [], []
    for rank, parent, depth in nodes:
        chances.append((1.0 if parent == ROOT else chances[parent]) * HEAD_ACCURACY[depth][rank])
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    ranks = [path for size in (1, 2, 3) for path in itertools.product(range(3), repeat=size)]
    every = [np.prod([HEAD_ACCURACY[depth][rank] for depth, rank in enumerate(path)]) for path in ranks]
    assert chances == pytest.approx(sorted(every, reverse=True)[:12])
    assert depths == [depth for *_, depth in nodes]
    assert len({(rank, parent) for rank, parent, _ in nodes}) == 12
    assert len(tree_structure(99, 2, 2)) == 6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", TREES)
def test_the_first_branch_of_a_tree_equals_the_chain(
    name: str, temperature: float, model: Llama, texts: list[list[int]]
) -> None:
    for seed, ids in enumerate(texts[:2]):
        state = {"temperature": temperature, "seed": seed, "num_prompt_tokens": 4}
        chain = fresh(name, model, ids, 4, **state).tokens
        for count, branches in ((1, 4), (8, 2), (16, 3)):
            tree = fresh(name, model, ids, count, branches, **state)
            assert len(tree) == count
            assert tree.distributions is None
            children, index, trunk = tree.children(), ROOT, []
            while index in children:
                index = children[index][0]
                trunk.append(tree.tokens[index])
            assert tuple(trunk[:4]) == chain[: len(trunk)]
            for group in children.values():
                assert len({tree.tokens[each] for each in group}) == len(group) <= branches


@pytest.mark.parametrize("name", TREES)
def test_trees_do_not_depend_on_the_batch(name: str, model: Llama, texts: list[list[int]]) -> None:
    proposer = load(name, model, 3)
    for key, ids in enumerate(texts[:4]):
        observe_text(proposer, model, [key], ids)
    counts, warm, shared = [8, 3, 12, 1], [0.0, 1.0, 0.7, 0.0], [True, True, False, False]
    states = [DraftContext(key, texts[key], 4, key, warm[key], shared[key]) for key in range(4)]
    proposer.propose(states, [16] * 4)  # draft tokens leave no state behind
    for state, count, draft in zip(states, counts, proposer.propose(states, counts), strict=True):
        separate = fresh_of(name, model, state, count, 3)
        assert (draft.tokens, draft.parents) == (separate.tokens, separate.parents)
        assert (draft.distributions is None) == (state.shared_noise or not state.temperature)


def test_eagle_outputs_along_a_branch_equal_those_of_a_chain(
    model: Llama, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs after each expanded token equal those computed step by step."""
    grown: list[TreeBuilder] = []
    draft = TreeBuilder.build
    monkeypatch.setattr(TreeBuilder, "build", lambda growth: (grown.append(growth), draft(growth))[1])
    ids = texts[0]
    fresh("eagle", model, ids, 14, 3, temperature=0.0)
    [growth] = grown
    assert len(growth.expanded) > 5
    tree = Draft(tuple(growth.chain.tokens), tuple(growth.parents))
    for looked in growth.expanded:
        proposer = load("eagle", model)
        observe_text(proposer, model, [9], ids)
        chain = growth.chain.__class__(DraftContext(9, ids, temperature=0.0), 14)
        assert proposer._prepare(chain, [9])
        with one_thread():
            x_RX = proposer._process_pending([chain])
            for index, node in enumerate(tree.path(looked)):
                chain.ids.append(tree.tokens[node])
                x_RX = proposer._step([chain], x_RX, index)
        np.testing.assert_allclose(growth.outputs[looked], x_RX[0], atol=2e-4)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.fast_cases(0)
def test_siblings_have_the_reported_distributions(name: str, model: Llama) -> None:
    """Tested for the first and second sibling, and for the first one after a sibling."""
    drafts = drafts_of(name, model, 500, 5, width=2)
    for draft in drafts:
        assert len(draft) == 5
        for group in draft.children().values():
            for number, index in enumerate(group):  # without its earlier siblings
                older = [draft.tokens[each] for each in group[:number]]
                assert sorted(np.flatnonzero(draft.distributions[index] == 0)) == sorted(older)
        first, second = draft.children()[ROOT][:2]
        left = draft.distributions[first].copy()
        left[draft.tokens[first]] = 0
        np.testing.assert_allclose(draft.distributions[second], left / left.sum(), atol=1e-12)
    for index in (0, 1):
        assert fits([draft.tokens[index] for draft in drafts], [draft.distributions[index] for draft in drafts])
        wrong = [np.roll(draft.distributions[index], 1) for draft in drafts]
        assert not fits([draft.tokens[index] for draft in drafts], wrong)
    some = [(draft, children[0][0]) for draft in drafts if 0 in (children := draft.children())]
    middle = np.median([draft.tokens[0] for draft, _ in some])
    for own in (some, [(draft, index) for draft, index in some if draft.tokens[0] < middle]):
        assert len(own) > 50  # and each uniform number is used for one token only
        assert fits([draft.tokens[index] for draft, index in own], [draft.distributions[index] for draft, index in own])


# in the engine


def acceptance_length(
    llm: nc.LLM, texts: list[list[int]], *config: Any, temperature: float = 0.0, **more: Any
) -> float:
    engine = llm.new_engine(speculative_config=Speculation(*config, adaptive=False, **more))
    params = nc.SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    drive(engine, [Request(ids, params.replace(seed=seed)) for seed, ids in enumerate(texts)])
    assert not engine._speculator._failed
    return engine.stats.speculative.mean_acceptance_length


LENGTHS = {"draft": 2.4, "medusa": 1.6, "eagle": 2.6, "dflash": 2.1}
"""Lower limits of the mean acceptance length at temperature 0."""


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", EMBEDDED_METHODS)
@pytest.mark.fast_cases(0)
def test_acceptance_lengths_of_chains(name: str, warm: bool, llm: nc.LLM, texts: list[list[int]]) -> None:
    found = acceptance_length(llm, texts, name, 4, temperature=0.85 if warm else 0.0)
    assert found > (1.15 if warm else LENGTHS[name])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.fast_cases(0)
def test_trees_have_a_higher_acceptance_length(name: str, llm: nc.LLM, texts: list[list[int]]) -> None:
    assert acceptance_length(llm, texts[:4], name, 8, tree_width=2) > acceptance_length(llm, texts[:4], name, 8) + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", TREES)
def test_rejection_of_trees_by_the_embedded_model(name: str, llm: nc.LLM, texts: list[list[int]]) -> None:
    found = acceptance_length(llm, texts[:4], name, 8, "rejection", temperature=0.7, tree_width=2)
    assert found > {"medusa": 1.2, "eagle": 1.5}[name]
