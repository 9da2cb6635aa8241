"""Filtering drafts by vocabulary and grammar: chains and trees, sampled or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_requests import SIZE

import nucleate as nc
from nucleate.engine.verification import filter_draft
from nucleate.speculative.draft import ROOT, Draft
from nucleate.structured_output import GrammarCompiler, Guide

LAW = np.ones(SIZE) / SIZE


@pytest.fixture(scope="module")
def abc(llm: nc.LLM) -> list[int]:
    return [llm.tokenizer.encode(f"x{letter}", add_special_tokens=False)[-1] for letter in "abc"]


@pytest.mark.parametrize(
    ("token", "good"),
    [
        (0, True),
        (SIZE - 1, True),
        (np.int64(3), True),
        (SIZE, False),
        (-1, False),
        (5.0, False),
        ("5", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("tree", [False, True])
def test_draft_tokens_outside_the_vocabulary(token: Any, good: bool, tree: bool) -> None:
    draft = Draft((1, token, 2), (ROOT, ROOT, 0) if tree else None)
    assert filter_draft(draft, SIZE, None).tokens == ((1, token, 2) if good else (1,))


@pytest.mark.parametrize(
    ("text", "length"),
    [("", 0), ("a", 1), ("ab", 2), ("aba", 3), ("b", 0), ("aa", 1), ("abb", 2), ("abac", 4), ("abaca", 4), ("acb", 2)],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_chains_with_a_grammar(
    llm: nc.LLM, grammars: GrammarCompiler, abc: list[int], text: str, length: int, sampled: bool
) -> None:
    """A sampled token that the grammar rejects is kept, but nothing after it; after its end nothing is kept."""
    guide = Guide(grammars.compile(nc.StructuredOutputs(regex="(ab)*ac")))
    tokens = tuple(abc["abc".index(letter)] for letter in text)
    ended = text[:length].endswith("c")
    expected = tokens[: length + (sampled and not ended)]
    for parents in (None, tuple(range(ROOT, len(tokens) + ROOT))):
        distributions = (LAW,) * len(tokens) if sampled else None
        assert filter_draft(Draft(tokens, parents, distributions), SIZE, guide).tokens == expected
    before = guide.mask()  # the grammar state is unchanged
    np.testing.assert_array_equal(before, Guide(guide.grammar).mask())


@pytest.mark.parametrize("tree", [False, True])
def test_filtered_tokens_are_integers(tree: bool) -> None:
    """A proposer may return NumPy integers; results must be serializable as JSON."""
    draft = Draft((np.int64(1), 2, np.uint8(3)), (ROOT, ROOT, 0) if tree else None, (LAW,) * 3)
    found = filter_draft(draft, SIZE, None)
    assert [type(token) for token in found.tokens] == [int] * 3
    assert (found.tokens, found.parents, found.distributions) == (draft.tokens, draft.parents, draft.distributions)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_failed_grammars_allow_no_draft(grammars: GrammarCompiler, abc: list[int], sampled: bool, tree: bool) -> None:
    """Sampled tokens are dropped too."""
    guide = Guide(grammars.compile(nc.StructuredOutputs(regex="(ab)*ac")))
    guide.matcher._error = "it took too long"  # type: ignore[attr-defined]
    assert guide.error is not None
    draft = Draft(tuple(abc[:2]), (ROOT, ROOT) if tree else None, (LAW,) * 2 if sampled else None)
    assert not filter_draft(draft, SIZE, guide)


@pytest.mark.parametrize("sampled", [False, True])
def test_trees_with_a_grammar(llm: nc.LLM, grammars: GrammarCompiler, abc: list[int], sampled: bool) -> None:
    a, b, c = abc
    guide = Guide(grammars.compile(nc.StructuredOutputs(regex="(ab)*ac")))
    tree = Draft((a, b, c, b, a, b, a), (ROOT, ROOT, 0, 0, 3, 2, 1), (LAW,) * 7 if sampled else None)
    found = filter_draft(tree, SIZE, guide)
    if sampled:  # the first b is rejected, with all that follows it; after the c the grammar is complete
        assert (found.tokens, found.parents) == ((a, b, c, b, a), (ROOT, ROOT, 0, 0, 3))
        assert found.distributions == (LAW,) * 5
    else:
        assert (found.tokens, found.parents) == ((a, c, b, a), (ROOT, 0, 0, 2))
    np.testing.assert_array_equal(guide.mask(), Guide(guide.grammar).mask())
