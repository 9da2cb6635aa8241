"""What trained draft methods share: sampling draft tokens from logits, and drafting for several sequences at once."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
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
    Proposer,
    normalize,
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
    valid_R = np.isfinite(logits_RV[np.arange(len(best_R)), best_R])  # argmax returns a NaN if there is one
    sampled = [SampledToken(token, None) for token in np.where(valid_R, best_R, -1).tolist()]
    warm_rows = [row for row in valid_R.nonzero()[0] if contexts[row].temperature >= MIN_TEMPERATURE]
    shared_rows = [row for row in warm_rows if contexts[row].shared_noise]
    if shared_rows:
        steps = [contexts[row].position + depths[row] for row in shared_rows]
        tokens_R1, _ = _gumbel_max(logits_RV[shared_rows], [contexts[row] for row in shared_rows], steps)
        for row, [token] in zip(shared_rows, tokens_R1.tolist(), strict=True):
            sampled[row] = SampledToken(token, None)
    for row in warm_rows:
        if not contexts[row].shared_noise:
            one = SiblingRequest(contexts[row], depths[row], depths[row], 1)
            sampled[row] = next(iter(_sampled_siblings(logits_RV[row], one)), SampledToken(-1, None))
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
    step = one.context.position + one.depth
    tokens_1N, gaps_1N = _gumbel_max(logits_V[None], [one.context], [step], one.num_siblings)
    weights_N = np.exp(-gaps_1N[0])
    pairs = zip(tokens_1N[0].tolist(), (weights_N / weights_N.sum()).tolist(), strict=True)
    return [SampledToken(token, None, probability) for token, probability in pairs if token >= 0]


def _sampled_siblings(logits_V: Floats, one: SiblingRequest) -> list[SampledToken]:
    x_V = logits_V.astype(np.float64) / one.context.temperature
    distribution = normalize(np.exp(x_V - x_V.max()))
    if distribution is None:
        return []
    numbers = np.arange(one.offset, one.offset + one.num_siblings)  # of the uniform numbers of the step
    uniforms = noise.uniform(one.context.seed, one.context.position, noise.DRAFT, numbers).tolist()
    pairs = zip(*sample_without_replacement(distribution, uniforms), strict=True)
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


@dataclass
class ChainBuilder:
    """The draft of one sequence."""

    context: DraftContext
    max_tokens: int  #: maximum length
    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution | None] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  #: the sequence and its draft, if the draft method uses them
    tree: Draft | None = None  #: the finished draft, if it is not the chain

    def add(self, sampled: SampledToken) -> bool:
        """Append a token. Returns whether the draft needs another one."""
        if sampled.token < 0 or len(self.tokens) >= self.max_tokens:
            return False
        self.tokens.append(sampled.token)
        self.distributions.append(sampled.distribution)
        return len(self.tokens) < self.max_tokens

    def build(self) -> Draft:
        if self.tree is not None:
            return self.tree
        sampled = any(each is not None for each in self.distributions)
        return Draft(tuple(self.tokens), None, tuple(self.distributions) if sampled else None)


def add_blocks(chains: Sequence[ChainBuilder], logits_NV: Floats, count: int) -> None:
    """Sample tokens of each chain from its ``count`` rows of logits [R * count, V], one for each depth."""
    contexts = [chain.context for chain in chains for _ in range(count)]
    sampled = sample_tokens(logits_NV, contexts, [*range(count)] * len(chains))
    for row, chain in enumerate(chains):
        for one in sampled[row * count : (row + 1) * count]:
            if not chain.add(one):
                break


class TrainedProposer(Proposer):
    """Base class of draft methods that draft for several sequences at once."""

    _limit = sys.maxsize  #: maximum number of tokens of a draft

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. The draft is empty for a sequence that is not ready."""
        limit, keys = self._limit, [context.key for context in contexts]
        chains = [ChainBuilder(context, min(count, limit)) for context, count in zip(contexts, max_tokens, strict=True)]
        active = [chain for chain in chains if chain.max_tokens > 0 and self._prepare(chain, keys)]
        if active:
            self._draft(active)
        return [chain.build() for chain in chains]

    @abstractmethod
    def _prepare(self, chain: ChainBuilder, keys: Sequence[int]) -> bool:
        """Prepare a sequence. Returns whether it can have a draft now. keys: of all sequences of this call."""

    @abstractmethod
    def _draft(self, active: list[ChainBuilder]) -> None:
        """Draft tokens for these sequences."""
