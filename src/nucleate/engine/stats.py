"""An engine in figures. Refuses to know where they come from."""

from __future__ import annotations

from typing import NamedTuple


class SpeculativeStats(NamedTuple):
    """The drafts of an engine in figures, counted from its beginning."""

    rounds: int = 0  #: forwards that gave an answer tokens, each counted for each such answer
    drafted: int = 0  #: tokens that were read
    accepted: int = 0  #: of these
    tried: tuple[int, ...] = ()  #: by place in the draft (in a tree: by depth): how often those before it were accepted
    kept: tuple[int, ...] = ()  #: the same: how often it was accepted
    seconds: float = 0.0  #: that proposers took

    @property
    def tau(self) -> float:
        """Tokens that a forward gives an answer, those aside that a form forced; 1 without drafts."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0


class EngineStats(NamedTuple):
    """An engine in figures, as of now; from ``steps`` on they are counted from its beginning."""

    running: int  #: answers
    waiting: int  #: answers that have not begun, or were preempted
    blocks: int  #: of keys and values
    blocks_used: int
    steps: int
    read: int  #: tokens
    reused: int  #: tokens that did not have to be read, as others begin with the same
    drawn: int  #: tokens
    preempted: int  #: answers
    forward_seconds: float
    sampler_seconds: float
    mask_seconds: float  #: for the tokens that forms of text allow
    forced: int  #: tokens that were neither drawn nor read by themselves, as nothing else could follow
    drafts: SpeculativeStats = SpeculativeStats()  #: tokens that were guessed, and read to see whether they are right
