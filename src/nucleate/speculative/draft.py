"""Drafts, and the interface of the proposers (draft methods) that make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.speculative.draft_distribution import Distribution

ROOT = -1
"""The index of the node before a draft: the last token of the sequence."""

INDEX_CHUNK_SIZE = 4096
"""Tokens of a sequence that one call of ``propose`` indexes, so that a long prompt does not stall the others. Tokens
that are not indexed yet are matched against those that are.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Draft tokens: a chain, or a tree. Raises ValueError for inconsistent arguments.

    parents: for each token the index of the token it follows, ROOT or an earlier one; None: a chain. Tokens with the
    same parent are siblings, and are tried in order.

    distributions: for each token the distribution [V] it was sampled from, given the tokens before it and its earlier
    siblings; None for a token that was certain, or whose distribution is unknown (then fewer sampled tokens are
    accepted). None for all: no token has one. Verification is exact only for the true distribution, and only if no
    sampled token is left out for what it is; those after it may be.
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

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether it is a chain: each token follows the one before it."""
        return self.parents is None or all(parent == index - 1 for index, parent in enumerate(self.parents))

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
        if count >= len(self.tokens):
            return self
        count = max(0, count)
        parents = None if self.parents is None else self.parents[:count]
        return Draft(self.tokens[:count], parents, None if self.distributions is None else self.distributions[:count])


NO_DRAFT = Draft()


class DraftContext(NamedTuple):
    """What a proposer sees of a sequence. It only grows, until it is forgotten."""

    key: int  #: of the sequence; unique
    token_ids: Sequence[int]  #: prompt and output
    num_prompt_tokens: int = 0  #: number of prompt tokens
    seed: int = 0  #: of its noise: (seed, position) gives the noise that the target will sample with
    temperature: float = 1.0  #: of the target; 0: greedy
    shared_noise: bool = True
    """Whether to sample with the target's noise, so that both agree more often (coupled); distributions are then not
    needed. Otherwise sampled tokens use noise of the stream ``noise.DRAFT``, and the draft has their distributions.
    """

    @property
    def position(self) -> int:
        """The output position of the next token, which is the step of its noise."""
        return len(self.token_ids) - self.num_prompt_tokens


class TargetOutput(NamedTuple):
    """Tokens of a sequence that the target has computed and that stay, with their hidden states, in order.

    The start of a sequence may be missing, if it came from the prefix cache or was computed before a preemption: the
    first tokens may be at any position. Tokens may be repeated. While adaptive speculation rests, tokens may be missing
    for good, also in the middle.
    """

    key: int
    start: int  #: the position of the first of these tokens in the sequence
    token_ids: Sequence[int]  #: T tokens
    hidden_states_TF: NDArray[np.float32]  #: their hidden states, of the layers that the proposer reads


class Proposer(Protocol):
    """A draft method. It may change the time that sequences take, never what they say.

    A proposer may derive from this class, to define only what it needs.
    """

    layers: tuple[int, ...] = ()
    """The layers of the target whose hidden states it reads, see ``Runner.watch``; most read none."""

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """Draft at most so many tokens for each sequence; in a tree, in all branches together.

        The draft is empty if there is nothing to propose, or the count is 0.
        """
        raise NotImplementedError

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """Receive the target's hidden states of a step; never called if ``layers`` is empty."""
        return

    def accepted(self, key: int, count: int) -> None:
        """So many tokens of a sequence's last draft were accepted."""
        return

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """A sequence has finished, or needs no more drafts. output_ids: its output, to learn from.

        Unknown keys are ignored.
        """
        return
