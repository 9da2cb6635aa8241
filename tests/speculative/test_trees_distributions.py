"""Tree drafts keep the output distribution, whether siblings are sampled or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_proposers import Silent
from test_acceptance_coupled import PARAMS
from test_acceptance_distribution import DRAFTED
from test_speculation_distributions import COINLESS, SIZE, assert_fours, first_is_drawn, honest, packed, small
from tree_proposers import drawn_tree, guessed_tree, shared_draws

import nucleate as nc
from nucleate.engine.verification import DraftMasks
from nucleate.sampling import noise
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Draft, DraftContext
from nucleate.structured_output import GrammarCompiler, Guide


@pytest.mark.parametrize("name", COINLESS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_distributions_along_a_branch_equal_those_of_a_chain(name: str, masked: bool) -> None:
    """With any stage, also those that learn; and in any order."""
    rng = np.random.default_rng(5)
    parents = [-1, -1, 0, 1, 1, 2, -1, 4, 4, 0]
    tokens = rng.integers(0, SIZE, len(parents)).tolist()
    draft = Draft(tuple(tokens), tuple(parents))
    logits = rng.normal(0, 2, (len(parents) + 1, SIZE)).astype(np.float32)
    masks = packed(rng.random((len(parents) + 1, SIZE)) < 0.7) if masked else None
    sampler = Sampler(SIZE, "reference")
    row = sampler.add(PARAMS[name], [1, 2, 3], output_ids=[4, 1, 4], seed=5)
    laws = sampler.distributions(row, logits, tokens, masks, parents=parents)
    for line in rng.permutation(len(parents) + 1).tolist():
        path = draft.path(line - 1)
        lines = [0, *[place + 1 for place in path]]
        alone = sampler.distributions(
            row, logits[lines], [tokens[place] for place in path], None if masks is None else masks[lines]
        )
        np.testing.assert_array_equal(laws[line], alone[len(path)])
    assert sampler.output_ids(row) == (4, 1, 4)


def test_masks_along_branches(llm: nc.LLM) -> None:
    grammars = GrammarCompiler(llm.tokenizer, llm.tokenizer.vocab_size)
    a, b = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb"))
    form = grammars.compile(nc.StructuredOutputs(regex="(aab|bba|abc)+"))
    draft = Draft((a, b, a, b, b, a), (-1, -1, 0, 0, 1, 4))
    masks = DraftMasks(Guide(form), draft)
    for line in (6, 2, 4, 0, 3, 1, 5):
        alone = Guide(form)
        for place in draft.path(line - 1):
            alone.accept_token(draft.tokens[place])
        np.testing.assert_array_equal(masks[line], alone.mask()[0])


class Trees(Silent):
    """Drafts of a tree, and what is told of its laws."""

    def __init__(self, make: Callable[..., Draft], told: Any = honest, **more: Any) -> None:
        super().__init__()
        self.make, self.told, self.more = make, told, more

    def draft(self, state: DraftContext, count: int) -> Draft:
        assert not state.shared_noise
        before, laws_VV = state.token_ids[-1], DRAFTED[3]
        if self.make is guessed_tree:
            return guessed_tree(before, count, laws_VV)
        draft = self.make(before, count, state.seed, state.position, laws_VV, **self.more)
        return Draft(draft.tokens, draft.parents, self.told(draft.distributions))


def said(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, proposer: Trees, values: dict[str, Any], trials: int) -> Counter:
    asked = lambda made, *given, **more: Speculation(made, 6, "rejection", adaptive=False, tree_width=2)
    monkeypatch.setattr("test_speculation_distributions.Speculation", asked)
    return first_is_drawn(small(**values), trials, "rejection", proposer, llm)


PENALTIES = {"top_p": 0.8, "presence_penalty": 0.6}
MAKERS = {
    "drawn": Trees(drawn_tree),
    "guessed": Trees(guessed_tree),
    "drawn once for all branches": Trees(shared_draws),
    "drawn, and not told": Trees(drawn_tree, lambda laws: None),
}


@pytest.mark.parametrize(
    ("name", "values", "trials"),
    [
        ("drawn", PENALTIES, 300),
        ("guessed", {}, 250),
        ("drawn once for all branches", {}, 250),
        *[
            pytest.param(name, values, 2000, marks=pytest.mark.exhaustive)
            for name in MAKERS
            for values in ({}, PENALTIES)
        ],
    ],
)
@pytest.mark.fast_cases(1)
def test_texts_of_an_engine(
    llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, name: str, values: dict[str, Any], trials: int
) -> None:
    assert_fours(said(llm, monkeypatch, MAKERS[name], values, trials), small(**values))


@pytest.mark.parametrize(
    "proposer",
    [
        Trees(drawn_tree, stream=noise.ACCEPT),  # drawn with the noise that decides on it
        pytest.param(
            Trees(drawn_tree, lambda laws: tuple(law**0.3 / (law**0.3).sum() for law in laws)), marks=pytest.mark.slow
        ),
    ],
    ids=["noise", "laws"],
)
def test_texts_with_wrong_draft_distributions(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, proposer: Trees) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        assert_fours(said(llm, monkeypatch, proposer, {}, 500), small())
