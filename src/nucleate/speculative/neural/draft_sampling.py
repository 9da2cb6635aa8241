"""Samples draft tokens from the logits of a draft method, and builds chain drafts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.models.numpy_llama import Floats
from nucleate.sampling import noise
from nucleate.speculative.draft import (
    Distribution,
    Draft,
    DraftContext,
    normalize,
    sample_inverse_cdf,
    sample_without_replacement,
)

MIN_TEMPERATURE = 1e-3
"""Temperatures below this one are treated as 0."""


class SampledToken(NamedTuple):
    """A draft token, and the distribution it was sampled from, if needed: without its earlier siblings."""

    token: int  #: -1: no token can be sampled
    distribution: Distribution | None
    probability: float = 1.0  #: of a sibling, estimated by the proposer


def sample_tokens(logits_RV: Floats, contexts: Sequence[DraftContext], depths: Sequence[int]) -> list[SampledToken]:
    """Sample one token per row of logits [R, V], for a sequence and a depth of its draft each.

    At temperature 0: the most likely token. With shared noise: the token that the target samples from these logits.
    Otherwise: a token sampled with the noise stream ``noise.DRAFT`` of the step and the depth, with its distribution.
    """
    best_R = logits_RV.argmax(axis=1)
    sampled = [SampledToken(int(best_R[row]), None) for row in range(len(contexts))]
    invalid_R = ~np.isfinite(logits_RV[np.arange(len(best_R)), best_R])  # argmax returns a NaN if there is one
    if invalid_R.any():
        sampled = [SampledToken(-1, None) if invalid else one for one, invalid in zip(sampled, invalid_R, strict=True)]
    warm_R = [context.temperature >= MIN_TEMPERATURE for context in contexts]
    sampled_rows = [row for row, warm in enumerate(warm_R) if warm and sampled[row].token >= 0]
    shared_rows = [row for row in sampled_rows if contexts[row].shared_noise]
    if shared_rows:
        steps = [contexts[row].position + depths[row] for row in shared_rows]
        tokens_R1, _ = _gumbel_max(logits_RV[shared_rows], [contexts[row] for row in shared_rows], steps)
        for row, [token] in zip(shared_rows, tokens_R1.tolist(), strict=True):
            sampled[row] = SampledToken(token, None)
    for row in sampled_rows:
        if not contexts[row].shared_noise:
            sampled[row] = _sample_one(logits_RV[row], contexts[row], depths[row])
    return sampled


class SiblingRequest(NamedTuple):
    """A request for siblings: the children of one node of a draft."""

    context: DraftContext
    depth: int  #: of the siblings in the draft
    offset: int  #: number of tokens of the draft that were sampled before
    num_siblings: int  #: maximum number of siblings


def sample_siblings(logits_RV: Floats, requests: Sequence[SiblingRequest]) -> list[list[SampledToken]]:
    """Sample siblings for each row of logits [R, V], in the order in which they are tried.

    At temperature 0: the most likely tokens. With shared noise: the token that the target would sample from these
    logits, and the runners-up. Otherwise: tokens sampled without replacement. The first token of each row is that of
    ``sample_tokens``.
    """
    found: list[list[SampledToken]] = []
    for logits_V, one in zip(logits_RV, requests, strict=True):
        if one.num_siblings < 1 or not np.isfinite(logits_V.max()):
            found.append([])
        elif one.context.temperature < MIN_TEMPERATURE:
            found.append(_top_tokens(logits_V, one.num_siblings))
        elif one.context.shared_noise:
            found.append(_shared_noise_siblings(logits_V, one))
        else:
            found.append(_sampled_siblings(logits_V, one))
    return found


def _top_tokens(logits_V: Floats, count: int) -> list[SampledToken]:
    x_V = np.exp((logits_V - logits_V.max()).astype(np.float64))
    x_V /= x_V.sum()
    best = np.argsort(-logits_V, kind="stable")[:count]
    return [SampledToken(int(token), None, float(x_V[token])) for token in best if x_V[token] > 0]


def _shared_noise_siblings(logits_V: Floats, one: SiblingRequest) -> list[SampledToken]:
    tokens_1N, gaps_1N = _gumbel_max(
        logits_V[None], [one.context], [one.context.position + one.depth], one.num_siblings
    )
    weights_N = np.exp(-gaps_1N[0])
    probabilities = (weights_N / weights_N.sum()).tolist()
    return [
        SampledToken(token, None, probability)
        for token, probability in zip(tokens_1N[0].tolist(), probabilities, strict=True)
        if token >= 0
    ]


def _sampled_siblings(logits_V: Floats, one: SiblingRequest) -> list[SampledToken]:
    distribution = _distribution(logits_V, one.context)
    if distribution is None:
        return []
    tokens, distributions = sample_without_replacement(
        distribution, _uniform(one.context, one.offset, one.num_siblings)
    )
    pairs = zip(tokens, distributions, strict=True)
    return [SampledToken(token, each, float(distribution[token])) for token, each in pairs]


def _gumbel_max(
    logits_RV: Floats, contexts: Sequence[DraftContext], steps: Sequence[int], count: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Tokens [R, count] in the order of Gumbel-max sampling, and their gaps to the first one."""
    temperatures_R = np.array([context.temperature for context in contexts])
    seeds_R = np.array([context.seed for context in contexts], np.uint64)
    out_RN, gaps_RN = np.empty((len(contexts), count), np.int64), np.empty((len(contexts), count))
    arguments = np.ascontiguousarray(logits_RV), temperatures_R, seeds_R, np.array(steps, np.uint64)
    workspace_size = 2 * (-(-logits_RV.shape[1] // noise.GROUP_SIZE) + noise.GROUP_SIZE + 8)
    DRAFTS.gumbel_max(*arguments, out_RN, gaps_RN, np.empty(workspace_size))
    return out_RN, gaps_RN


def _sample_one(logits_V: Floats, context: DraftContext, depth: int) -> SampledToken:
    distribution = _distribution(logits_V, context)
    if distribution is None:
        return SampledToken(-1, None)
    return SampledToken(sample_inverse_cdf(distribution, _uniform(context, depth, 1)[0]), distribution)


def _distribution(logits_V: Floats, context: DraftContext) -> Distribution | None:
    x_V = logits_V.astype(np.float64) / context.temperature
    return normalize(np.exp(x_V - x_V.max()))


def _uniform(context: DraftContext, first: int, count: int) -> list[float]:
    """Uniform numbers of the step: ``count`` of them, from number ``first`` on."""
    numbers: list[float] = noise.uniform(
        context.seed, context.position, noise.DRAFT, np.arange(first, first + count)
    ).tolist()
    return numbers


@dataclass
class ChainBuilder:
    """The draft of one sequence."""

    context: DraftContext
    max_tokens: int  #: maximum length
    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  #: the sequence and its draft, if the draft method uses them

    def add(self, sampled: SampledToken) -> bool:
        """Append a token. Returns whether the draft needs another one."""
        if sampled.token < 0 or len(self.tokens) >= self.max_tokens:
            return False
        self.tokens.append(sampled.token)
        self.distributions.append(sampled.distribution)
        return len(self.tokens) < self.max_tokens


def build_drafts(chains: Iterable[ChainBuilder]) -> list[Draft]:
    """The finished drafts."""
    return [
        Draft(
            tuple(chain.tokens),
            None,
            tuple(chain.distributions) if any(each is not None for each in chain.distributions) else None,
        )
        for chain in chains
    ]
