"""Which drafted tokens stay, and the token after them: rules of speculative decoding, as functions of numbers.

Knows neither models nor samplers. What a rule is given of the target is the law that it draws from in the end: after
the whole pipeline, at each place of the draft with the history that leads there, the mask of a grammar among it.

``coupled`` gives, token for token, what would have been drawn without drafts. ``rejection`` and ``block`` draw from the
same law, and ``typical`` does not. All of them look at rows of the target as they need them, so that a row from which
nothing can be drawn is an error only where it is come to: the tokens before it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.draft_distribution import Law, choose, law_of


class Rows(Protocol):
    """The target's chances [N + 1, V]: row 0 after the sequence, row i + 1 after the drafted token at place i."""

    def __getitem__(self, row: int, /) -> Any: ...


Coins = Sequence[float] | NDArray[np.float64]


class AcceptanceResult(NamedTuple):
    """What becomes of a draft."""

    path: tuple[int, ...]  #: the places of the tokens that stay, each following the one before it
    token: int  #: what follows them; -1 if there is an error
    error: str | None = None

    def tokens(self, draft: Draft) -> list[int]:
        """How the sequence goes on."""
        return [*(draft.tokens[place] for place in self.path), *([] if self.token < 0 else [self.token])]


def acceptance_uniforms(seed: int, step: int, count: int) -> NDArray[np.float64]:
    """What decides on drafted tokens, a number in (0, 1) each, in the round whose first token is that of ``step``.

    Numbers belong to rounds, not to places in the output: a rule may have looked at those of tokens that did not stay.
    The same holds for those that drafts are drawn with, which have a stream of their own, ``noise.DRAFT``.
    """
    return noise.uniform(seed, step, noise.ACCEPT, np.arange(count))


def residual_uniform(seed: int, step: int) -> float:
    """What chooses the token after those that stay, in the round of ``step``."""
    return float(noise.uniform(seed, step, noise.RESIDUAL, np.zeros(1, np.int64))[0])


def coupled(
    drafts: Sequence[Draft],
    draw: Callable[[list[int], list[int]], Sequence[int]],
    ended: Callable[[int, int], bool] | None = None,
) -> list[AcceptanceResult]:
    """Draw as without drafts, while what is drawn has been drafted (Daliri, Musco, Suresh, arXiv 2408.07978).

    draw(sequences, places) gives the next token of some of the sequences, each after the drafted token at a place of
    its draft, or ROOT: with the noise and the history of that sequence, to which the token belongs from then on. -1: it
    cannot be drawn. ended(sequence, token): whether the token that was drawn is the last one.
    """
    paths: list[list[int]] = [[] for _ in drafts]
    verdicts = [AcceptanceResult((), -1) for _ in drafts]
    followers = [draft.children() for draft in drafts]
    alive, places = list(range(len(drafts))), [ROOT] * len(drafts)
    while alive:
        going = []
        for sequence, place, token in zip(alive, places, draw(alive, places), strict=True):
            error = "no token can be drawn" if token < 0 else None
            verdicts[sequence] = AcceptanceResult(tuple(paths[sequence]), int(token), error)
            if token < 0 or (ended is not None and ended(sequence, token)):
                continue
            draft = drafts[sequence]
            found = next((each for each in followers[sequence].get(place, ()) if draft.tokens[each] == token), None)
            if found is not None:
                paths[sequence].append(found)
                going.append(sequence)
        alive, places = going, [paths[sequence][-1] for sequence in going]
    return verdicts


def rejection(p: Rows, draft: Draft, coins_N: Coins, coin: float) -> AcceptanceResult:
    """Keep a token with chance min(1, p / q), or else draw from what p has over q (arXiv 2211.17192, 2302.01318).

    Of siblings each is tried against what the ones before it left (Miao et al., SpecInfer, arXiv 2305.09781). A token
    without a law stays with chance p. coins_N: numbers in [0, 1), one for each token; coin: one for the token that
    follows. Where the law of a token is none, or could not have given it, the draft ends before it.
    Raises ValueError for tokens and laws of another vocabulary.
    """
    followers, place = draft.children(), ROOT
    path: list[int] = []
    while True:
        left = law_of(p[place + 1])
        if left is None:
            return _broken(path)
        found = None
        for each in followers.get(place, ()):
            law = _law(draft, each, len(left))
            if law is None:
                break
            token = draft.tokens[each]
            if coins_N[each] * law[token] < left[token]:
                found = each
                break
            left = _over(left, law, left)
        if found is None:
            return AcceptanceResult(tuple(path), choose(left, coin))
        path.append(found)
        place = found


def block(p: Rows, draft: Draft, coins_N: Coins, coin: float) -> AcceptanceResult:
    """Verify a chain as a whole: more of it stays than token by token (Sun et al., arXiv 2403.10444).

    Arguments and laws as of ``rejection``. Raises ValueError, also for a tree.
    """
    if not draft.chain:
        raise ValueError("block verification is for chains, got a tree")
    rows: list[Law] = []
    laws: list[Law] = []
    weights = [1.0]  # of all tokens up to a place: min(1, weight before * p / q)
    for place in range(len(draft) + 1):
        row = law_of(p[place])
        if row is None:
            break
        rows.append(row)
        law = _law(draft, place, len(row)) if place < len(draft) else None
        if law is None:
            break
        laws.append(law)
        target, drafted = weights[-1] * row[draft.tokens[place]], law[draft.tokens[place]]
        weights.append(1.0 if target >= drafted else float(target / drafted))
        if not target:  # neither it nor what follows it can stay
            break
    kept = len(laws)
    while kept and not coins_N[kept - 1] < _stays(rows, laws, weights, kept):
        kept -= 1
    if kept == len(rows):
        return _broken(range(kept))
    left = _over(weights[kept] * rows[kept], laws[kept], rows[kept]) if kept < len(laws) else rows[kept]
    return AcceptanceResult(tuple(range(kept)), choose(left, coin))


def typical(
    p: Rows, draft: Draft, coins_N: Coins, coin: float, limit: float = 0.3, factor: float = 0.09
) -> AcceptanceResult:
    """Keep the longest branch whose tokens are likely enough (Cai et al., Medusa, arXiv 2401.10774). Not exact.

    Likely enough is p > min(limit, factor * exp(-entropy)). Tokens that stay were not drawn from p: what is said
    depends on the proposer. coins_N is not used; laws are not either.
    """
    rows: dict[int, tuple[Law, float] | None] = {}
    depths, before = {ROOT: 0}, draft.before()
    for place, token in enumerate(draft.tokens):
        parent = before[place]
        if parent not in depths:
            continue
        if parent not in rows:
            rows[parent] = _likely(p[parent + 1], limit, factor)
        found = rows[parent]
        if found is not None and _token(token, len(found[0])) and found[0][token] > found[1]:
            depths[place] = depths[parent] + 1
    last = max(depths, key=lambda each: depths[each])  # the first of the longest
    path, row = draft.path(last), law_of(p[last + 1])
    return _broken(path) if row is None else AcceptanceResult(tuple(path), choose(row, coin))


class AcceptanceRule(NamedTuple):
    """How drafts are verified."""

    verify: Callable[[Rows, Draft, Coins, float], AcceptanceResult]
    exact: bool  #: whether what is said has the law of the target
    trees: bool


RULES: Mapping[str, AcceptanceRule] = MappingProxyType(
    {
        "rejection": AcceptanceRule(rejection, exact=True, trees=True),
        "block": AcceptanceRule(block, exact=True, trees=False),
        "typical": AcceptanceRule(typical, exact=False, trees=True),
    }
)
"""The rules that look at laws. ``coupled`` is none of them: it draws."""


def _law(draft: Draft, place: int, size: int) -> Law | None:
    """The law a token was drawn from; None if it is none, or could not have given the token."""
    token, given = draft.tokens[place], draft.law(place)
    _token(token, size)
    if given is None:
        one_V = np.zeros(size)
        one_V[token] = 1.0
        return one_V
    law = law_of(given)
    if len(given) != size:
        raise ValueError(f"the law of a drafted token has {len(given)} chances, but those of the target are {size}")
    return law if law is not None and law[token] > 0 else None


def _token(token: int, size: int) -> bool:
    if not 0 <= token < size:
        raise ValueError(f"a drafted token must be in 0..{size - 1}, got {token}")
    return True


def _over(p_V: Law, q_V: Law, otherwise: Law) -> Law:
    """What p has over q, as a law. If that is nothing, as where they are equal, it is not come to but by rounding."""
    over = law_of(_above(p_V - q_V))
    return otherwise if over is None else over


def _above(x_V: Law) -> Law:
    return np.maximum(x_V, 0.0, out=x_V)


def _stays(rows: list[Law], laws: list[Law], weights: list[float], kept: int) -> float:
    """The chance that so many tokens stay, if no more do."""
    weight = weights[kept]
    if weight >= 1.0 or kept == len(laws):
        return weight
    x_V = weight * rows[kept]
    x_V -= laws[kept]
    over = float(_above(x_V).sum())
    return over / (over + 1.0 - weight)


def _likely(row: Any, limit: float, factor: float) -> tuple[Law, float] | None:
    """A law, and what a token of it must exceed."""
    law = law_of(row)
    if law is None:
        return None
    p_N = law[law > 0]
    return law, min(limit, factor * float(np.exp((p_N * np.log(p_N)).sum())))


def _broken(path: Sequence[int]) -> AcceptanceResult:
    after = f" after {len(path)} drafted tokens" if len(path) else ""
    return AcceptanceResult(tuple(path), -1, f"the target has no token to draw{after}")
