"""Drafts and their token distributions, tree drafts, and the interface of the proposers (draft methods) that make them.

A tree is pruned and truncated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]
"""Probabilities [V] that sum to 1."""


def normalize(weights_V: Any) -> Distribution | None:
    """Normalize weights [V]. None if they are invalid: NaN, infinite or negative ones, or none above 0."""
    x_V = np.asarray(weights_V, np.float64)
    if x_V.ndim != 1:
        raise ValueError(f"a distribution has the shape [vocabulary], got {list(x_V.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(x_V.sum())
    if not 0 < total < np.inf or x_V.min() < 0:
        return None
    return np.asarray(x_V / total)


def sample_inverse_cdf(weights_V: Distribution, u: float) -> int:
    """Inverse-CDF sampling: the first token at which the cumulative weight exceeds u times the total; u in 0..1.

    The token has a weight above 0, whatever rounding does: u = 0 gives the first such token, 1 the last.
    """
    sums_V = weights_V.cumsum()
    token = int(sums_V.searchsorted(u * sums_V[-1], side="right"))
    return token if token < len(weights_V) else int(np.flatnonzero(weights_V)[-1])


def exclude_token(p_V: Distribution, token: int) -> Distribution | None:
    """The distribution without one token, renormalized; None if no other token has a probability."""
    weights_V = p_V.copy()
    weights_V[token] = 0.0
    return normalize(weights_V)


def sample_without_replacement(
    p_V: Distribution, uniforms: Iterable[float]
) -> tuple[tuple[int, ...], tuple[Distribution, ...]]:
    """Sample tokens without replacement, one per uniform number: the tokens, and the distribution of each.

    There are fewer if no other token has a probability above 0.
    """
    tokens: list[int] = []
    distributions: list[Distribution] = []
    remaining: Distribution | None = p_V
    for u in uniforms:
        if tokens:
            remaining = exclude_token(distributions[-1], tokens[-1])
        if remaining is None:
            break
        distributions.append(remaining)
        tokens.append(sample_inverse_cdf(remaining, u))
    return tuple(tokens), tuple(distributions)


ROOT = -1
"""The index of the root of a draft: the last token of the sequence."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens: a chain, or a tree. Raises ValueError for inconsistent arguments.

    parents: for each token the index of its parent, ROOT or an earlier token; of a chain, it becomes None. Tokens with
    the same parent are siblings, and are tried in order.

    distributions: for each token the distribution [V] it was sampled from, given its ancestors and earlier siblings;
    None for a token that was not sampled, or whose distribution is unknown (then fewer sampled tokens are accepted).
    None for all: no token has one. Verification is exact only if these are the true distributions, and if no sampled
    token is dropped because of its value.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    distributions: tuple[Distribution | None, ...] | None = None

    def __post_init__(self) -> None:
        for name, values in (("parents", self.parents), ("distributions", self.distributions)):
            if values is not None and len(values) != len(self.tokens):
                raise ValueError(f"a draft of {len(self.tokens)} tokens has {len(values)} {name}")
        for index, parent in enumerate(self.parents or ()):
            if not ROOT <= parent < index:
                raise ValueError(f"parent of the token at {index} must be in {ROOT}..{index - 1}, got {parent}")
        if self.parents is not None and all(parent == index - 1 for index, parent in enumerate(self.parents)):
            object.__setattr__(self, "parents", None)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """The number of tokens in the longest branch."""
        return len(self.tokens) if self.parents is None else max(self.depths(), default=-1) + 1

    def parent_indices(self) -> Sequence[int]:
        """The parents, also of a chain."""
        return range(ROOT, len(self.tokens) + ROOT) if self.parents is None else self.parents

    def depths(self) -> Sequence[int]:
        """For each token the number of its draft ancestors."""
        if self.parents is None:
            return range(len(self.tokens))
        result: list[int] = []
        for parent in self.parents:
            result.append(0 if parent == ROOT else result[parent] + 1)
        return result

    def path(self, index: int) -> list[int]:
        """The indices from the root to a token, itself included; none for ROOT."""
        path, parent_indices = [], self.parent_indices()
        while index != ROOT:
            path.append(index)
            index = parent_indices[index]
        return path[::-1]

    def distribution(self, index: int) -> Distribution | None:
        """The distribution that a token was sampled from, if it has one."""
        return None if self.distributions is None else self.distributions[index]

    def children(self) -> dict[int, list[int]]:
        """The children of each node that has any, ROOT included, in order."""
        if self.parents is None:
            return {index - 1: [index] for index in range(len(self.tokens))}
        result: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            result.setdefault(parent, []).append(index)
        return result

    def prefix(self, count: int) -> Draft:
        """The first ``count`` tokens, which are a draft too."""
        return select_nodes(self, range(max(0, min(count, len(self.tokens)))))


NO_DRAFT = Draft()


class DraftContext(NamedTuple):
    """A sequence, as input of a proposer. ``token_ids`` only grows, until the sequence is forgotten."""

    key: int  #: of the sequence; unique
    token_ids: Sequence[int]  #: prompt and output
    num_prompt_tokens: int = 0  #: number of prompt tokens
    seed: int = 0  #: with the position, the seed of the noise that the target samples with
    temperature: float = 1.0  #: of the target; 0: greedy
    shared_noise: bool = True
    """Whether to sample with the target's noise, so that more tokens are accepted (acceptance rule "coupled"); the
    draft then needs no distributions. Otherwise sampled tokens use the noise stream ``noise.DRAFT``, and the draft has
    their distributions.
    """

    @property
    def position(self) -> int:
        """The output position of the next token, which is also the step of its noise."""
        return len(self.token_ids) - self.num_prompt_tokens


class TargetOutput(NamedTuple):
    """Tokens of a sequence that the target has computed and that stay, with their hidden states, in order.

    The first token may be at any position: earlier ones can come from the prefix cache or from before a preemption.
    Tokens may be repeated. Tokens of steps without speculation (see ``AdaptiveProposer.is_idle``) are missing.
    """

    key: int
    start: int  #: the position of the first of these tokens in the sequence
    token_ids: Sequence[int]  #: T tokens
    hidden_states_TF: NDArray[np.float32]  #: their hidden states, of the layers that the proposer reads


class Proposer(Protocol):
    """A draft method. It affects the speed of generation, never its output distribution.

    Custom proposers may derive from this class and override only what they need.
    """

    layers: tuple[int, ...] = ()
    """The layers of the target whose hidden states the proposer uses (see ``Runner.watch``); usually none."""

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """Draft at most ``max_tokens`` tokens for each sequence; of a tree, in all branches together.

        The draft is empty if there is nothing to propose, or if ``max_tokens`` is 0.
        """
        raise NotImplementedError

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """Receive the target's hidden states of a step; never called if ``layers`` is empty."""
        return

    def accepted(self, key: int, count: int) -> None:
        """Report that ``count`` tokens of a sequence's last draft were accepted."""
        return

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """Drop the state of a finished sequence. output_ids: its output, for proposers that cache past outputs.

        Unknown keys are ignored.
        """
        return


def select_nodes(draft: Draft, indices: Sequence[int]) -> Draft:
    """The sub-draft of some nodes, in order, whose parents are among them."""
    if len(indices) == len(draft):
        return draft
    new_index = {ROOT: ROOT} | {index: new for new, index in enumerate(indices)}
    parent_indices = draft.parent_indices()
    parents = tuple(new_index[parent_indices[index]] for index in indices)
    distributions = None if draft.distributions is None else tuple(draft.distributions[index] for index in indices)
    return Draft(tuple(draft.tokens[index] for index in indices), parents, distributions)


def truncate(draft: Draft, tree_width: int, depth: int, max_tokens: int) -> Draft:
    """Limit a draft to ``tree_width`` children per node, to a depth, and to ``max_tokens``; the first ones stay.

    A width of 1 keeps the first branch.
    """
    if draft.parents is None:
        return draft.prefix(min(depth, max_tokens))
    num_children: dict[int, int] = {}
    depth_of = {ROOT: 0}
    indices: list[int] = []
    for index, parent in enumerate(draft.parents):
        num_children[parent] = num_children.get(parent, 0) + 1
        if len(indices) < max_tokens and num_children[parent] <= tree_width and depth_of.get(parent, depth) < depth:
            depth_of[index] = depth_of[parent] + 1
            indices.append(index)
    return select_nodes(draft, indices)
