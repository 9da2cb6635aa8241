"""Acceptance rules of speculative decoding: which draft tokens are accepted, and the token after them.

The target distribution is the one that tokens are sampled from: after all stages of the pipeline, with the history at
each position of the draft and the grammar mask.

``coupled`` gives, token for token, what would have been sampled without drafts. ``rejection`` and ``block`` sample from
the same distribution, ``typical`` does not. All of them read rows of the target lazily: an invalid row is an error
only if it is reached, and the tokens before it stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling import noise
from nucleate.speculative.draft import ROOT, Distribution, Draft, normalize, sample_inverse_cdf


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
        return [*(draft.tokens[node] for node in self.path), *([] if self.token < 0 else [self.token])]


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
    sample: Callable[[list[int], list[int]], Sequence[int]],
    is_finished: Callable[[int, int], bool] | None = None,
) -> list[AcceptanceResult]:
    """Shared-noise verification: sample as without drafts, while the samples equal draft tokens (arXiv 2408.07978).

    sample(sequences, nodes): samples the next token of some sequences, each after one node of its draft (or ROOT), with
    the noise and history of that sequence, and appends it to the sequence; -1 if no token can be sampled.
    is_finished(sequence, token): whether the sampled token is the last one of the sequence.
    """
    paths: list[list[int]] = [[] for _ in drafts]
    results = [AcceptanceResult((), -1) for _ in drafts]
    children = [draft.children() for draft in drafts]
    active, nodes = list(range(len(drafts))), [ROOT] * len(drafts)
    while active:
        continuing = []
        for sequence, node, token in zip(active, nodes, sample(active, nodes), strict=True):
            error = "no token can be sampled" if token < 0 else None
            results[sequence] = AcceptanceResult(tuple(paths[sequence]), int(token), error)
            if token < 0 or (is_finished is not None and is_finished(sequence, token)):
                continue
            draft = drafts[sequence]
            match = next((child for child in children[sequence].get(node, ()) if draft.tokens[child] == token), None)
            if match is not None:
                paths[sequence].append(match)
                continuing.append(sequence)
        active, nodes = continuing, [paths[sequence][-1] for sequence in continuing]
    return results


def rejection(p: Rows, draft: Draft, u_N: Uniforms, u: float) -> AcceptanceResult:
    """Rejection sampling: accept with probability min(1, p / q), or sample the residual (arXiv 2211.17192, 2302.01318).

    The residual is max(p - q, 0). Siblings are tried in order, each against the residual of the ones before it
    (SpecInfer, arXiv 2305.09781). A token without a distribution is accepted with probability p. If the distribution of
    a token is invalid, or gives the token no probability, the draft ends before it.

    u_N: uniform numbers in [0, 1), one per draft token; u: the number that samples the token after the accepted ones.
    Raises ValueError for tokens or distributions of another vocabulary size.
    """
    children, node = draft.children(), ROOT
    path: list[int] = []
    while True:
        residual_V = normalize(p[node + 1])
        if residual_V is None:
            return _invalid(path)
        match = None
        for child in children.get(node, ()):
            distribution = _distribution(draft, child, len(residual_V))
            if distribution is None:
                break
            token = draft.tokens[child]
            if u_N[child] * distribution[token] < residual_V[token]:
                match = child
                break
            residual_V = _residual(residual_V, distribution, residual_V)
        if match is None:
            return AcceptanceResult(tuple(path), sample_inverse_cdf(residual_V, u))
        path.append(match)
        node = match


def block(p: Rows, draft: Draft, u_N: Uniforms, u: float) -> AcceptanceResult:
    """Block verification: verifies a chain as a whole, which accepts more than token by token (arXiv 2403.10444).

    Arguments as for ``rejection``. Raises ValueError, also for a tree.
    """
    if draft.parents is not None:
        raise ValueError("block verification is for chains, got a tree")
    rows: list[Distribution] = []
    distributions: list[Distribution] = []
    weights = [1.0]  # per prefix: min(1, weight of the shorter one * p / q)
    for node in range(len(draft) + 1):
        row = normalize(p[node])
        if row is None:
            break
        rows.append(row)
        distribution = _distribution(draft, node, len(row)) if node < len(draft) else None
        if distribution is None:
            break
        distributions.append(distribution)
        target, draft_probability = weights[-1] * row[draft.tokens[node]], distribution[draft.tokens[node]]
        weights.append(1.0 if target >= draft_probability else float(target / draft_probability))
        if not target:  # neither it nor what follows it can be accepted
            break
    n = len(distributions)  # the number of accepted tokens
    while n and not u_N[n - 1] < _acceptance_probability(rows, distributions, weights, n):
        n -= 1
    if n == len(rows):
        return _invalid(range(n))
    residual_V = rows[n]
    if n < len(distributions):
        residual_V = _residual(weights[n] * rows[n], distributions[n], rows[n])
    return AcceptanceResult(tuple(range(n)), sample_inverse_cdf(residual_V, u))


def typical(
    p: Rows, draft: Draft, u_N: Uniforms, u: float, posterior_threshold: float = 0.3, posterior_alpha: float = 0.09
) -> AcceptanceResult:
    """Typical acceptance: accepts the longest branch of likely tokens (Medusa, arXiv 2401.10774). Not exact.

    A token is likely if p > min(posterior_threshold, posterior_alpha * exp(-entropy)). Accepted tokens are not samples
    of p: the output depends on the draft method. u_N and the draft distributions are not used.
    """
    rows: dict[int, tuple[Distribution, float] | None] = {}
    depths, parent_indices = {ROOT: 0}, draft.parent_indices()
    for node, token in enumerate(draft.tokens):
        parent = parent_indices[node]
        if parent not in depths:
            continue
        if parent not in rows:
            rows[parent] = _likely_tokens(p[parent + 1], posterior_threshold, posterior_alpha)
        match = rows[parent]
        if match is not None and _token(token, len(match[0])) and match[0][token] > match[1]:
            depths[node] = depths[parent] + 1
    leaf = max(depths, key=lambda child: depths[child])  # the first of the longest
    path, row = draft.path(leaf), normalize(p[leaf + 1])
    return _invalid(path) if row is None else AcceptanceResult(tuple(path), sample_inverse_cdf(row, u))


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


def _distribution(draft: Draft, node: int, vocab_size: int) -> Distribution | None:
    """The distribution a token was sampled from; None if it is invalid, or gives the token no probability."""
    token, draft_distribution = draft.tokens[node], draft.distribution(node)
    _token(token, vocab_size)
    if draft_distribution is None:
        one_V = np.zeros(vocab_size)
        one_V[token] = 1.0
        return one_V
    distribution = normalize(draft_distribution)
    if len(draft_distribution) != vocab_size:
        message = f"a draft distribution has {len(draft_distribution)} probabilities, but the vocabulary of the target"
        raise ValueError(f"{message} {vocab_size}")
    return distribution if distribution is not None and distribution[token] > 0 else None


def _token(token: int, vocab_size: int) -> bool:
    if not 0 <= token < vocab_size:
        raise ValueError(f"a draft token must be in 0..{vocab_size - 1}, got {token}")
    return True


def _residual(p_V: Distribution, q_V: Distribution, fallback: Distribution) -> Distribution:
    """The normalized residual max(p - q, 0); ``fallback`` if rounding makes it zero."""
    residual = normalize(np.maximum(p_V - q_V, 0.0))
    return fallback if residual is None else residual


def _acceptance_probability(
    rows: list[Distribution], distributions: list[Distribution], weights: list[float], num_accepted: int
) -> float:
    """The probability that exactly ``num_accepted`` tokens are accepted, if no more are."""
    weight = weights[num_accepted]
    if weight >= 1.0 or num_accepted == len(distributions):
        return weight
    excess = float(np.maximum(weight * rows[num_accepted] - distributions[num_accepted], 0.0).sum())
    return excess / (excess + 1.0 - weight)


def _likely_tokens(row: Any, posterior_threshold: float, posterior_alpha: float) -> tuple[Distribution, float] | None:
    """A distribution, and the probability that its tokens must exceed."""
    distribution = normalize(row)
    if distribution is None:
        return None
    p_N = distribution[distribution > 0]
    return distribution, min(posterior_threshold, posterior_alpha * float(np.exp((p_N * np.log(p_N)).sum())))


def _invalid(path: Sequence[int]) -> AcceptanceResult:
    after = f" after {len(path)} draft tokens" if len(path) else ""
    return AcceptanceResult(tuple(path), -1, f"the target has no valid distribution{after}")
