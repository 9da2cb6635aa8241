"""Tree drafts keep the output distribution, whether siblings are sampled or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_proposers import NoDrafts, most_likely_tree, sampled_tree, shared_siblings
from test_acceptance_coupled import PARAMS
from test_acceptance_distribution import DRAFTED
from test_speculation_distributions import (
    SIZE,
    SUPPORTED,
    assert_text_distribution,
    count_texts,
    honest,
    packed,
    small,
)

import nucleate as nc
from nucleate.engine.verification import DraftMasks
from nucleate.sampling import noise
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Draft, DraftContext
from nucleate.structured_output import GrammarCompiler, Guide


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_distributions_along_a_branch_equal_those_of_a_chain(name: str, masked: bool) -> None:
    """With any stage, also stateful ones, and in any order."""
    rng = np.random.default_rng(5)
    parents = [-1, -1, 0, 1, 1, 2, -1, 4, 4, 0]
    tokens = rng.integers(0, SIZE, len(parents)).tolist()
    draft = Draft(tuple(tokens), tuple(parents))
    logits = rng.normal(0, 2, (len(parents) + 1, SIZE)).astype(np.float32)
    masks = packed(rng.random((len(parents) + 1, SIZE)) < 0.7) if masked else None
    sampler = Sampler(SIZE, "reference")
    row = sampler.add(PARAMS[name], [1, 2, 3], output_ids=[4, 1, 4], seed=5)
    distributions = sampler.distributions(row, logits, tokens, masks, parents=parents)
    for line in rng.permutation(len(parents) + 1).tolist():
        path = draft.path(line - 1)
        lines = [0, *[index + 1 for index in path]]
        separate = sampler.distributions(
            row, logits[lines], [tokens[index] for index in path], None if masks is None else masks[lines]
        )
        np.testing.assert_array_equal(distributions[line], separate[len(path)])
    assert sampler.output_ids(row) == (4, 1, 4)


def test_masks_along_branches(llm: nc.LLM) -> None:
    grammars = GrammarCompiler(llm.tokenizer, llm.tokenizer.vocab_size)
    a, b = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb"))
    grammar = grammars.compile(nc.StructuredOutputs(regex="(aab|bba|abc)+"))
    draft = Draft((a, b, a, b, b, a), (-1, -1, 0, 0, 1, 4))
    masks = DraftMasks(Guide(grammar), draft)
    for line in (6, 2, 4, 0, 3, 1, 5):
        guide = Guide(grammar)
        for index in draft.path(line - 1):
            guide.accept_token(draft.tokens[index])
        np.testing.assert_array_equal(masks[line], guide.mask()[0])


class Trees(NoDrafts):
    """Proposes trees. report: maps their distributions to the reported ones."""

    def __init__(self, make: Callable[..., Draft], report: Any = honest, **more: Any) -> None:
        super().__init__()
        self.make, self.report, self.more = make, report, more

    def draft(self, state: DraftContext, count: int) -> Draft:
        assert not state.shared_noise
        before, distributions_VV = state.token_ids[-1], DRAFTED[3]
        if self.make is most_likely_tree:
            return most_likely_tree(before, count, distributions_VV)
        draft = self.make(before, count, state.seed, state.position, distributions_VV, **self.more)
        return Draft(draft.tokens, draft.parents, self.report(draft.distributions))


def texts_of(
    llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, proposer: Trees, values: dict[str, Any], trials: int
) -> Counter:
    new_config = lambda made, *given, **more: Speculation(made, 6, "rejection", adaptive=False, tree_width=2)
    monkeypatch.setattr("test_speculation_distributions.Speculation", new_config)
    return count_texts(small(**values), trials, "rejection", proposer, llm)


PENALTIES = {"top_p": 0.8, "presence_penalty": 0.6}
MAKERS = {
    "sampled": Trees(sampled_tree),
    "most likely": Trees(most_likely_tree),
    "same siblings in all branches": Trees(shared_siblings),
    "sampled, without distributions": Trees(sampled_tree, lambda distributions: None),
}


@pytest.mark.parametrize(
    ("name", "values", "trials"),
    [
        ("sampled", PENALTIES, 300),
        ("most likely", {}, 250),
        ("same siblings in all branches", {}, 250),
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
    assert_text_distribution(texts_of(llm, monkeypatch, MAKERS[name], values, trials), small(**values))


@pytest.mark.parametrize(
    "proposer",
    [
        Trees(sampled_tree, stream=noise.ACCEPT),  # sampled with the noise of its verification
        pytest.param(
            Trees(
                sampled_tree,
                lambda distributions: tuple(
                    distribution**0.3 / (distribution**0.3).sum() for distribution in distributions
                ),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["noise", "distributions"],
)
def test_texts_with_wrong_draft_distributions(llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, proposer: Trees) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        assert_text_distribution(texts_of(llm, monkeypatch, proposer, {}, 500), small())
