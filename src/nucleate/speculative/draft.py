"""A draft: tokens that may come next, and how they were guessed. Proposers make them. Knows no target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nucleate.speculative.draft_distribution import Law

ROOT = -1
"""The place before a draft: the last token of the sequence."""

PACE = 4096
"""Tokens of a sequence that one ``propose`` reads, so that a long prompt makes nobody wait. Those not yet read are
matched, but not with each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Drafted tokens: a chain, or a tree. Raises ValueError for parts that do not belong together.

    parents: for each token the place of the one it follows, ROOT or an earlier one; None: a chain. Tokens with the same
    parent are siblings, and are tried in their order.

    laws: for each token the law [V] it was drawn from, given the tokens before it and the siblings before it; None for
    a token that could have been no other, or of which nothing is known: less of what was drawn is kept then. None for
    all: none has a law. Verification is exact for the true law only, and if no token, once drawn, is left out for what
    it is: what follows it may be.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    laws: tuple[Law | None, ...] | None = None

    def __post_init__(self) -> None:
        for name, given in (("parents", self.parents), ("laws", self.laws)):
            if given is not None and len(given) != len(self.tokens):
                raise ValueError(f"a draft of {len(self.tokens)} tokens has {len(given)} {name}")
        for place, parent in enumerate(self.parents or ()):
            if not ROOT <= parent < place:
                raise ValueError(f"parent of the token at {place} must be in {ROOT}..{place - 1}, got {parent}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def chain(self) -> bool:
        """Whether each token follows the one before it."""
        return self.parents is None or all(parent == place - 1 for place, parent in enumerate(self.parents))

    @property
    def depth(self) -> int:
        """The tokens of the longest branch."""
        return len(self.tokens) if self.parents is None else max(self.depths(), default=-1) + 1

    def before(self) -> Sequence[int]:
        """For each token the place of the one it follows."""
        return range(ROOT, len(self.tokens) + ROOT) if self.parents is None else self.parents

    def depths(self) -> Sequence[int]:
        """For each token how many drafted ones lead to it."""
        if self.parents is None:
            return range(len(self.tokens))
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == ROOT else found[parent] + 1)
        return found

    def path(self, place: int) -> list[int]:
        """The places that lead to one, and itself; none for ROOT."""
        path, before = [], self.before()
        while place != ROOT:
            path.append(place)
            place = before[place]
        return path[::-1]

    def law(self, place: int) -> Law | None:
        """The law that a token was drawn from, if it has one."""
        return None if self.laws is None else self.laws[place]

    def children(self) -> dict[int, list[int]]:
        """The places of the tokens that follow each place, ROOT among them, in order; of those that have any."""
        if self.parents is None:
            return {place - 1: [place] for place in range(len(self.tokens))}
        found: dict[int, list[int]] = {}
        for place, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(place)
        return found

    def prefix(self, count: int) -> Draft:
        """The first so many tokens: whatever they are, what is left is a draft."""
        if count >= len(self.tokens):
            return self
        count = max(0, count)
        parents = None if self.parents is None else self.parents[:count]
        return Draft(self.tokens[:count], parents, None if self.laws is None else self.laws[:count])


NO_DRAFT = Draft()


class DraftContext(NamedTuple):
    """A sequence as of now. Until it is forgotten it only grows."""

    key: int  #: of the sequence; never used for another one
    token_ids: Sequence[int]  #: prompt and output
    prompt: int = 0  #: how many of these are the prompt
    seed: int = 0  #: of its noise: with (seed, position) a drafted token can be drawn as the target will draw its own
    temperature: float = 1.0  #: that the target draws at; 0: it takes the best token
    shared: bool = True
    """Whether to draw with the noise of the target, so that the two agree more often: then laws are of no use. If not,
    a token that is drawn is drawn with noise of the stream ``noise.DRAFT``, and its law is told."""

    @property
    def position(self) -> int:
        """The place in the output of the next token, which is the step of its noise."""
        return len(self.token_ids) - self.prompt


class TargetOutput(NamedTuple):
    """Tokens of a sequence that the target has read, and that stay; in the order of the sequence.

    Of a sequence that begins like another one, or was read before it had to make room, the beginning may be missing:
    the first that is told may be at any place. What was told once may come again; what was read while adaptive drafts
    rested may be missing for good, in the middle too.
    """

    key: int
    start: int  #: the place of the first of them in the sequence
    token_ids: Sequence[int]  #: those that were read, T of them
    features_TF: NDArray[np.float32]  #: of each, what the target's layers that the proposer asked for gave


class Proposer(Protocol):
    """Guesses how sequences go on. What it guesses may change the time that they take, never what they say.

    One may be of this class, so that it need not say what makes no difference to it.
    """

    layers: tuple[int, ...] = ()
    """The layers of the target whose features it reads, see ``Runner.watch``; none for most."""

    def propose(self, states: Sequence[DraftContext], counts: Sequence[int]) -> list[Draft]:
        """For each of some sequences at most so many tokens, of all branches of its draft together.

        An empty draft where nothing suggests itself, or nothing is asked for.
        """
        raise NotImplementedError

    def read(self, readings: Sequence[TargetOutput]) -> None:
        """What the target has read in a step; never called where ``layers`` is empty."""
        return

    def accepted(self, key: int, count: int) -> None:
        """So many tokens of the last draft of a sequence were kept."""
        return

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """A sequence is over, or is not to be guessed any more. output_ids: its output, if it is to be learned from.

        Nothing happens if it is not known.
        """
        return
