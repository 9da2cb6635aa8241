"""Acceptance rules of speculative decoding: which draft tokens are accepted, and the token after them.

The rules are functions of numbers. Their target distribution is the one that a token is finally sampled from: after the
whole pipeline, with the history at each position of the draft, grammar mask included.

``coupled`` gives, token for token, what would have been sampled without drafts. ``rejection`` and ``block`` sample from
the same distribution, ``typical`` does not. All of them read rows of the target lazily, so that an invalid row is an
error only if it is reached; the tokens before it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.draft_distribution import Distribution, choose, normalize


class Rows(Protocol):
    """Target probabilities [N + 1, V]: row 0 after the sequence, row i + 1 after draft token i."""

    def __getitem__(self, row: int, /) -> Any: ...


Uniforms = Sequence[float] | NDArray[np.float64]


class AcceptanceResult(NamedTuple):
    """The result of verifying a draft."""

    path: tuple[int, ...]  #: indices of the accepted draft tokens, each following the one before it
    token: int  #: the token after them; -1 on an error
    error: str | None = None

    def tokens(self, draft: Draft) -> list[int]:
        """The new tokens of the sequence."""
        return [*(draft.tokens[place] for place in self.path), *([] if self.token < 0 else [self.token])]


def acceptance_uniforms(seed: int, step: int, count: int) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per draft token, that decide on acceptance in the verification step of ``step``.

    ``step`` is the output position of the first token to sample. Numbers belong to verification steps, not to output
    positions: a rule may have used those of rejected tokens. The same holds for the numbers that drafts are sampled
    with, which come from the stream ``noise.DRAFT``.
    """
    return noise.uniform(seed, step, noise.ACCEPT, np.arange(count))


def residual_uniform(seed: int, step: int) -> float:
    """The uniform number that samples the token after the accepted ones, in the verification step of ``step``."""
    return float(noise.uniform(seed, step, noise.RESIDUAL, np.zeros(1, np.int64))[0])


def coupled(
    drafts: Sequence[Draft],
    draw: Callable[[list[int], list[int]], Sequence[int]],
    ended: Callable[[int, int], bool] | None = None,
) -> list[AcceptanceResult]:
    """Shared-noise verification: sample as without drafts, while the samples equal draft tokens (arXiv 2408.07978).

    draw(sequences, places): samples the next token of some sequences, each after the draft token at a place of its
    draft (or ROOT), with the noise and history of that sequence, and appends it there; -1 if it cannot be sampled.
    ended(sequence, token): whether the sampled token is the sequence's last one.
    """
    paths: list[list[int]] = [[] for _ in drafts]
    results = [AcceptanceResult((), -1) for _ in drafts]
    followers = [draft.children() for draft in drafts]
    alive, places = list(range(len(drafts))), [ROOT] * len(drafts)
    while alive:
        going = []
        for sequence, place, token in zip(alive, places, draw(alive, places), strict=True):
            error = "no token can be sampled" if token < 0 else None
            results[sequence] = AcceptanceResult(tuple(paths[sequence]), int(token), error)
            if token < 0 or (ended is not None and ended(sequence, token)):
                continue
            draft = drafts[sequence]
            found = next((each for each in followers[sequence].get(place, ()) if draft.tokens[each] == token), None)
            if found is not None:
                paths[sequence].append(found)
                going.append(sequence)
        alive, places = going, [paths[sequence][-1] for sequence in going]
    return results


def rejection(p: Rows, draft: Draft, u_N: Uniforms, u: float) -> AcceptanceResult:
    """Rejection sampling: accept with probability min(1, p / q), or sample the residual (arXiv 2211.17192, 2302.01318).

    The residual is max(p - q, 0). Siblings are tried in order, each against what the ones before it left (Miao et al.,
    SpecInfer, arXiv 2305.09781). A token without a distribution is accepted with probability p. u_N: numbers in [0, 1),
    one per draft token; u: the one that samples the token that follows. If the distribution of a token is invalid, or
    gives the token no probability, the draft ends before it.
    Raises ValueError for tokens and distributions of another vocabulary.
    """
    followers, place = draft.children(), ROOT
    path: list[int] = []
    while True:
        left = normalize(p[place + 1])
        if left is None:
            return _invalid(path)
        found = None
        for each in followers.get(place, ()):
            distribution = _distribution(draft, each, len(left))
            if distribution is None:
                break
            token = draft.tokens[each]
            if u_N[each] * distribution[token] < left[token]:
                found = each
                break
            left = _residual(left, distribution, left)
        if found is None:
            return AcceptanceResult(tuple(path), choose(left, u))
        path.append(found)
        place = found


def block(p: Rows, draft: Draft, u_N: Uniforms, u: float) -> AcceptanceResult:
    """Block verification: verifies a chain as a whole, which accepts more than token by token (arXiv 2403.10444).

    Arguments as for ``rejection``. Raises ValueError, also for a tree.
    """
    if not draft.chain:
        raise ValueError("block verification is for chains, got a tree")
    rows: list[Distribution] = []
    distributions: list[Distribution] = []
    weights = [1.0]  # per prefix: min(1, weight of the shorter one * p / q)
    for place in range(len(draft) + 1):
        row = normalize(p[place])
        if row is None:
            break
        rows.append(row)
        distribution = _distribution(draft, place, len(row)) if place < len(draft) else None
        if distribution is None:
            break
        distributions.append(distribution)
        target, drafted = weights[-1] * row[draft.tokens[place]], distribution[draft.tokens[place]]
        weights.append(1.0 if target >= drafted else float(target / drafted))
        if not target:  # neither it nor what follows it can be accepted
            break
    kept = len(distributions)
    while kept and not u_N[kept - 1] < _acceptance_probability(rows, distributions, weights, kept):
        kept -= 1
    if kept == len(rows):
        return _invalid(range(kept))
    left = rows[kept]
    if kept < len(distributions):
        left = _residual(weights[kept] * rows[kept], distributions[kept], rows[kept])
    return AcceptanceResult(tuple(range(kept)), choose(left, u))


def typical(
    p: Rows, draft: Draft, u_N: Uniforms, u: float, limit: float = 0.3, factor: float = 0.09
) -> AcceptanceResult:
    """Typical acceptance: accepts the longest branch of likely tokens (Medusa, arXiv 2401.10774). Not exact.

    A token is likely if p > min(limit, factor * exp(-entropy)). Accepted tokens are not samples of p: the output
    depends on the draft method. u_N and the draft distributions are not used.
    """
    rows: dict[int, tuple[Distribution, float] | None] = {}
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
    path, row = draft.path(last), normalize(p[last + 1])
    return _invalid(path) if row is None else AcceptanceResult(tuple(path), choose(row, u))


class AcceptanceRule(NamedTuple):
    """An acceptance rule."""

    verify: Callable[[Rows, Draft, Uniforms, float], AcceptanceResult]
    exact: bool  #: whether the output has the target distribution
    trees: bool


RULES: Mapping[str, AcceptanceRule] = MappingProxyType(
    {
        "rejection": AcceptanceRule(rejection, exact=True, trees=True),
        "block": AcceptanceRule(block, exact=True, trees=False),
        "typical": AcceptanceRule(typical, exact=False, trees=True),
    }
)
"""The rules that compare distributions. ``coupled`` is not one of them: it samples."""


def _distribution(draft: Draft, place: int, size: int) -> Distribution | None:
    """The distribution a token was sampled from; None if it is invalid, or gives the token no probability."""
    token, given = draft.tokens[place], draft.distribution(place)
    _token(token, size)
    if given is None:
        one_V = np.zeros(size)
        one_V[token] = 1.0
        return one_V
    distribution = normalize(given)
    if len(given) != size:
        message = f"a draft distribution has {len(given)} probabilities, but the vocabulary of the target {size}"
        raise ValueError(message)
    return distribution if distribution is not None and distribution[token] > 0 else None


def _token(token: int, size: int) -> bool:
    if not 0 <= token < size:
        raise ValueError(f"a draft token must be in 0..{size - 1}, got {token}")
    return True


def _residual(p_V: Distribution, q_V: Distribution, otherwise: Distribution) -> Distribution:
    """The normalized residual max(p - q, 0). If it is zero, which only rounding can lead to, ``otherwise``."""
    residual = normalize(_positive(p_V - q_V))
    return otherwise if residual is None else residual


def _positive(x_V: Distribution) -> Distribution:
    return np.maximum(x_V, 0.0, out=x_V)


def _acceptance_probability(
    rows: list[Distribution], distributions: list[Distribution], weights: list[float], kept: int
) -> float:
    """The probability that exactly so many tokens are accepted, if no more are."""
    weight = weights[kept]
    if weight >= 1.0 or kept == len(distributions):
        return weight
    x_V = weight * rows[kept]
    x_V -= distributions[kept]
    excess = float(_positive(x_V).sum())
    return excess / (excess + 1.0 - weight)


def _likely(row: Any, limit: float, factor: float) -> tuple[Distribution, float] | None:
    """A distribution, and the probability that its tokens must exceed."""
    distribution = normalize(row)
    if distribution is None:
        return None
    p_N = distribution[distribution > 0]
    return distribution, min(limit, factor * float(np.exp((p_N * np.log(p_N)).sum())))


def _invalid(path: Sequence[int]) -> AcceptanceResult:
    after = f" after {len(path)} draft tokens" if len(path) else ""
    return AcceptanceResult(tuple(path), -1, f"the target has no valid distribution{after}")
