"""Sequences as the scheduler sees them, and the tokens of a step.

A sequence may have a *companion*, whose logits are combined with its own (guidance, contrastive decoding): a second
sequence with the same output. Both start, are preempted and end together, and their last tokens are always computed in
the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nucleate.engine.kv_cache import START
from nucleate.speculative.draft import NO_DRAFT, Draft

NO_ROW = 1 << 62
"""The sampler row of a sequence that has none yet. It sorts after all others."""

Order = tuple[int, int, int]
"""Priority (lower runs first), arrival, and index of the sequence in its request: unique per sequence."""


@dataclass(eq=False, slots=True)
class SchedulerEntry:
    """One sequence as the scheduler sees it. ``max_length``: its maximum number of tokens, prompt and output."""

    order: Order
    token_ids: Sequence[int]
    max_length: int
    max_chunk: int = 1 << 62  #: the most tokens to compute per step
    use_prefix_cache: bool = True  #: False if the logits of the whole prompt are needed
    paused: bool = False  #: back-pressure: it is not scheduled, and is the first to be preempted
    num_computed: int = 0  #: tokens whose keys and values are in the KV cache
    num_cached: int = 0  #: prompt tokens that came from the prefix cache and were never computed
    block_ids: list[int] = field(default_factory=list)
    root: int = START  #: the prefix node before its first token; sequences of another model have another one
    num_cached_blocks: int = 0  #: its full blocks, which are in the prefix cache
    prefix_node: int = START  #: the prefix that ends with the last of these
    owns_tokens: bool = False  #: whether ``token_ids`` is a list that no other sequence shares
    preempted: bool = False  #: whether it ever was
    finished: bool = False  #: whether it was removed from the scheduler
    companion: SchedulerEntry | None = None
    owner: SchedulerEntry | None = None  #: the sequence that this one is the companion of

    @property
    def idle(self) -> bool:
        """Whether it has nothing to compute for now: it is paused, or at its maximum length."""
        return self.paused or len(self.token_ids) >= self.max_length

    @property
    def max_draft_depth(self) -> int:
        """The maximum depth of a draft: the token at the maximum length is always sampled."""
        return self.max_length - len(self.token_ids) - 1

    @property
    def group(self) -> tuple[SchedulerEntry, ...]:
        """The sequence and its companion."""
        return (self,) if self.companion is None else (self, self.companion)

    def append(self, token: int) -> None:
        """Append a token, also to the companion. Token lists are shared between sequences until the first append."""
        if not self.owns_tokens:
            self.token_ids, self.owns_tokens = list(self.token_ids), True
        self.token_ids.append(token)  # type: ignore[attr-defined]
        if self.companion is not None:
            self.companion.append(token)


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """The tokens ``start`` to ``stop`` of a sequence, computed in one step."""

    sequence: Any  #: a SchedulerEntry; in an engine, a RunningSequence, CompanionSequence or RunningBeam
    start: int
    stop: int
    last: bool  #: whether this chunk ends with the sequence's last token, so that a new token follows
    draft: Draft = NO_DRAFT  #: not empty, if it is not NO_DRAFT; computed after ``stop``
    logits_row: int = -1  #: row of its last token in the step's logits; the rows of the draft tokens follow
    companion: ScheduledSequence | None = None  #: the last tokens of its companion, if these are its own last tokens

    @property
    def group(self) -> tuple[ScheduledSequence, ...]:
        """The sequence and its companion, if both compute their last token."""
        return (self,) if self.companion is None else (self, self.companion)
