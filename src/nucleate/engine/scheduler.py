"""Scheduler of continuous batching: decides which tokens of which sequences the next forward pass computes.

Scheduling is iteration-level: each step is planned from scratch (Yu et al., Orca, OSDI 2022). Sequences that decode
(one token to compute) come first; the rest of the token budget goes to prompts, in chunks if needed (chunked prefill:
Agrawal et al., Sarathi-Serve, arXiv 2403.02310). The order is priority, then arrival; a sequence never starts before an
earlier one that cannot start. A sequence gets blocks for all its tokens when it starts, so the KV cache can only run
out when a sequence grows: then the last sequence in the order is *preempted*. It frees its blocks, waits, and is
recomputed later.

A sequence may have a *companion*, whose logits are combined with its own (guidance, contrastive decoding): a second
sequence with the same output. Both start, are preempted and end together, and their last tokens are always computed in
the same step.

The scheduler is pure Python and sees only lengths, priorities and blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from nucleate.engine.kv_cache import START, KVCacheManager, PrefixHit
from nucleate.engine.state_cache import StateCache
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
    key: int = 0  #: of the sequence in the model: unique
    max_chunk: int = 1 << 62  #: the most tokens to compute per step
    all_logits: bool = False  #: the logits of all its tokens are needed, so it takes none from the prefix cache
    row: int = NO_ROW  #: of the sampler, from the first token on
    paused: bool = False  #: back-pressure: it is not scheduled, and is the first to be preempted
    num_computed: int = 0  #: tokens whose keys and values are in the KV cache
    num_cached: int = 0  #: prompt tokens that came from the prefix cache and were never computed
    save_at: int = 0  #: the length of the prefix whose state is saved; a chunk ends there. 0: none
    reusable: bool = True  #: whether its state is saved when it stops
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

    sequence: Any  #: a SchedulerEntry; in an engine, a RunningSequence, its companion, or a RunningBeam
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


_order = attrgetter("order")


class Scheduler:
    """Sequences are added and removed; ``schedule`` plans a step, ``mark_computed`` records that it ran.

    max_num_seqs: sequences that run at a time. max_num_batched_tokens: tokens per step. whole_prompts: prompts are not
    split to fit the budget (only by their ``max_chunk``); the first prompt of a step may then exceed it. With a
    ``StateCache``, only the first prompt of a step is split, as those that are whole share a forward pass.
    """

    def __init__(
        self, kv_cache: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, whole_prompts: bool = False
    ) -> None:
        self.kv_cache, self.max_num_seqs = kv_cache, max_num_seqs
        self.max_num_batched_tokens, self.whole_prompts = max_num_batched_tokens, whole_prompts
        self._states = kv_cache if isinstance(kv_cache, StateCache) else None
        self._paged = self._states is None and not whole_prompts
        self.running: list[SchedulerEntry] = []  # sorted by order, like those that wait
        self.waiting: list[SchedulerEntry] = []  # not started, or preempted
        self.num_preemptions = 0
        self.num_companions = 0  # running ones
        self._decoding: dict[SchedulerEntry, ScheduledSequence] = {}  # of the plan in progress: one token each
        self._copies: dict[int, int] = {}  # blocks to copy before the next forward pass: source by target
        self._preempted: list[SchedulerEntry] = []  # since the last forward pass

    def add(self, entry: SchedulerEntry) -> None:
        """Add a sequence. Raises ValueError for one that is too long for the KV cache."""
        needed = [self.kv_cache.blocks_needed(one.max_length - 1) for one in entry.group]  # the last is not computed
        if sum(needed) > self.kv_cache.num_blocks:
            blocks = f"{self.kv_cache.num_blocks} blocks of {self.kv_cache.block_size}"
            raise ValueError(f"{' and '.join(str(one.max_length) for one in entry.group)} tokens do not fit {blocks}")
        insort(self.waiting, entry, key=_order)

    def fork(self, parent: SchedulerEntry, child: SchedulerEntry) -> tuple[int, int] | None:
        """Add a sequence that continues the tokens and the KV cache of another one.

        If there is room, it runs at once: full blocks are shared, and a partial last block must be copied, because both
        sequences will write to it (the result: source and target). Otherwise it waits, as after ``add``.
        """
        cache = self.kv_cache
        child.token_ids, child.owns_tokens, child.paused = list(parent.token_ids), True, parent.paused
        full, rest = divmod(parent.num_computed, cache.block_size) if self._paged else (0, parent.num_computed)
        has_slot = len(self.running) < self.max_num_seqs
        taken = cache.allocate(cache.blocks_needed(rest)) if has_slot and parent.num_computed else None
        if taken is None:
            insort(self.waiting, child, key=_order)
            return None
        cache.add_reference(parent.block_ids[:full])
        child.block_ids = parent.block_ids[:full] + taken
        child.num_computed = child.num_cached = parent.num_computed
        child.num_cached_blocks, child.prefix_node = parent.num_cached_blocks, parent.prefix_node
        insort(self.running, child, key=_order)
        return (parent.block_ids[full], taken[0]) if taken and self._paged else None

    def remove(self, entry: SchedulerEntry) -> None:
        """Remove a sequence and its companion, whatever their state, and free their blocks."""
        if entry.block_ids:
            self._stop(entry)
        else:
            _take_out(self.waiting, entry)
        for one in entry.group:
            one.finished = True

    def schedule(self) -> list[ScheduledSequence]:
        """Plan a step, without idle sequences. A plan that did not run can be made again: it is the same."""
        decoding = self._decoding = {}
        prompts, size = [], self.kv_cache.block_size
        for entry in self.running.copy():
            length = len(entry.token_ids)
            if entry.paused or length >= entry.max_length or not entry.block_ids:  # preempted by an earlier one
                continue
            if length > len(entry.block_ids) * size and not self._grow(entry):
                continue
            computed = entry.num_computed
            if computed == length - 1:
                decoding[entry] = ScheduledSequence(entry, computed, length, True)
            elif computed < length:
                prompts.append(entry)
        chunks = self._schedule_prompts(prompts) if prompts or self.waiting else []
        return self._together([*decoding.values(), *chunks]) if self.num_companions else [*decoding.values(), *chunks]

    def take_changes(self) -> tuple[list[SchedulerEntry], list[tuple[int, int]]]:
        """What changed since the last forward pass: preempted sequences, and then the blocks to copy, in order."""
        changes = self._preempted, [(source, target) for target, source in self._copies.items()]
        self._preempted, self._copies = [], {}
        return changes

    def mark_computed(self, scheduled: Iterable[ScheduledSequence]) -> None:
        """Record that chunks were computed, of those sequences that have not finished. Drafts do not count."""
        size = self.kv_cache.block_size
        for one in scheduled:
            entry = one.sequence
            if not entry.finished:
                entry.num_computed = one.stop
                if one.stop >= (entry.num_cached_blocks + 1) * size:
                    self.advance(entry, one.stop)
                if one.stop == entry.save_at and self._states is not None:
                    self._states.keep(entry.key, entry.token_ids[: one.stop])

    def advance(self, entry: SchedulerEntry, stop: int) -> None:
        """A sequence is computed up to ``stop``: put the blocks that are full now into the prefix cache."""
        entry.num_computed = stop
        size = self.kv_cache.block_size
        while stop >= (end := (entry.num_cached_blocks + 1) * size):
            block = entry.block_ids[entry.num_cached_blocks]
            entry.prefix_node = self.kv_cache.cache_block(block, entry.prefix_node, entry.token_ids[end - size : end])
            entry.num_cached_blocks += 1

    def reserve(self, entry: SchedulerEntry, count: int) -> int:
        """Allocate blocks for ``count`` more tokens of a running sequence, without preempting anybody.

        Returns how many of these tokens fit.
        """
        length, cache = len(entry.token_ids), self.kv_cache
        while cache.blocks_needed(length + count) > len(entry.block_ids):
            if (taken := cache.allocate(1)) is None:
                return len(entry.block_ids) * cache.block_size - length
            entry.block_ids += taken
        return count

    def trim(self, entry: SchedulerEntry) -> None:
        """Free the blocks of a running sequence that its tokens do not need."""
        needed = self.kv_cache.blocks_needed(len(entry.token_ids))
        if needed < len(entry.block_ids):
            self.kv_cache.free(entry.block_ids[needed:])
            del entry.block_ids[needed:]

    def _grow(self, entry: SchedulerEntry) -> bool:
        """Allocate blocks for all tokens of a running sequence, preempting others; False if it was preempted itself."""
        while self.kv_cache.blocks_needed(len(entry.token_ids)) > len(entry.block_ids):
            if (taken := self.kv_cache.allocate(1)) is not None:
                entry.block_ids += taken
            else:
                self._preempt()
                if not entry.block_ids:
                    return False
        return True

    def _together(self, planned: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Let a sequence and its companion compute their last tokens in the same step: the first one waits."""
        by_entry = {one.sequence: one for one in planned}
        kept = []
        for one in planned:
            entry: SchedulerEntry = one.sequence
            partner = entry.companion or entry.owner
            if one.last and partner is not None:
                other = by_entry.get(partner)
                if other is None or other.stop < len(partner.token_ids):
                    one.stop, one.last = one.stop - 1, False
                elif partner is entry.companion:
                    one.companion = other
            if one.start < one.stop:
                kept.append(one)
        return kept

    def _schedule_prompts(self, prompts: list[SchedulerEntry]) -> list[ScheduledSequence]:
        """Spend what is left of the token budget on prompts. At least one token is left, as max_num_seqs fit."""
        chunks: list[ScheduledSequence] = []
        spent = 0
        for entry in self._candidates(prompts):
            if self._states is not None and not entry.num_computed:
                self._resume(entry, self._states)
            left = self.max_num_batched_tokens - len(self._decoding) - spent
            start, length = entry.num_computed, len(entry.token_ids)
            count = min(length - start, entry.max_chunk)
            if start < entry.save_at:
                count = min(count, entry.save_at - start)
            if self._paged or not (self.whole_prompts or chunks):
                count = min(count, left)
            one = ScheduledSequence(entry, start, start + count, start + count == length)
            if length - start == 1:
                self._decoding[entry] = one
                left -= 1
            elif chunks and count > left:
                break
            else:
                chunks.append(one)
                spent, left = spent + count, left - count
            if chunks and left <= 0:
                break
        return chunks

    def _candidates(self, running: list[SchedulerEntry]) -> Iterator[SchedulerEntry]:
        """Running prompts and, in between by order, waiting sequences as they are started."""
        place, waiting = 0, self.waiting
        for entry in [*running, None]:
            while place < len(waiting) and (entry is None or waiting[place].order < entry.order):
                first = waiting[place]
                if first.idle:
                    place += 1
                elif self._start(first):
                    yield from first.group
                else:
                    place = len(waiting)
            if entry is not None and entry.block_ids:  # it may have been preempted by one that started
                yield entry

    def _start(self, entry: SchedulerEntry) -> bool:
        """Start a sequence if there is room, preempting paused sequences and those of a lower priority."""
        while not self._allocate(entry):
            if not self.running:
                return False
            victim = self._victim()
            if not victim.paused and victim.order[0] <= entry.order[0]:
                return False
            self._preempt()
        _take_out(self.waiting, entry)
        for one in entry.group:
            insort(self.running, one, key=_order)
        self.num_companions += entry.companion is not None
        return True

    def _allocate(self, entry: SchedulerEntry) -> bool:
        """Allocate the blocks of a sequence and its companion; False, without any effect, if there is no room."""
        if len(self.running) + len(entry.group) > self.max_num_seqs or not self._allocate_blocks(entry):
            return False
        if entry.companion is None or self._allocate_blocks(entry.companion):
            return True
        self._free(entry)
        return False

    def _allocate_blocks(self, entry: SchedulerEntry) -> bool:
        """Allocate the blocks of a sequence, from the prefix cache where possible; False if there is no room."""
        cache, root = self.kv_cache, entry.root
        hit = cache.match_prefix(entry.token_ids, root) if not entry.all_logits else PrefixHit([], root)
        taken = cache.allocate(cache.blocks_needed(len(entry.token_ids)) - len(hit.block_ids))
        if taken is None:
            cache.free(hit.block_ids)
            return False
        entry.block_ids, entry.prefix_node = hit.block_ids + taken, hit.node
        entry.num_cached_blocks = len(hit.block_ids)
        entry.num_computed = len(hit.block_ids) * cache.block_size
        if hit.partial is not None:
            source, count = hit.partial
            entry.num_computed += count
            if source != taken[0]:  # it may have been evicted for this very sequence
                self._copies[taken[0]] = source
        entry.num_cached = min(entry.num_cached, entry.num_computed) if entry.preempted else entry.num_computed
        return True

    def _resume(self, entry: SchedulerEntry, states: StateCache) -> None:
        """Begin to compute a sequence that has started: at a state, if there is one by now."""
        if entry.all_logits or entry.root != START:
            return
        running = [one for one in self.running if one.root == START and one is not entry]
        pending = [(one.token_ids, one.save_at if one.num_computed < one.save_at else 0) for one in running]
        entry.num_computed, entry.save_at = states.resume(entry.key, entry.token_ids, pending)
        entry.num_cached = min(entry.num_cached, entry.num_computed) if entry.preempted else entry.num_computed

    def _victim(self) -> SchedulerEntry:
        """The sequence to preempt: the last paused one, or else the last of all."""
        return next((entry for entry in reversed(self.running) if entry.paused), self.running[-1])

    def _preempt(self) -> SchedulerEntry:
        """Move a running sequence, with its companion, back to the waiting ones, and return it."""
        victim = self._victim()
        entry = victim.owner or victim
        self._stop(entry)
        insort(self.waiting, entry, key=_order)
        for one in entry.group:
            self._decoding.pop(one, None)
            one.preempted = True
            self._preempted.append(one)
        self.num_preemptions += 1
        return entry

    def _stop(self, entry: SchedulerEntry) -> None:
        """Remove a sequence and its companion from the running ones, and free their blocks."""
        for one in entry.group:
            _take_out(self.running, one)
            computed = one.token_ids[: one.num_computed]
            self._free(one)
            if self._states is not None and one.reusable and one.root == START:
                self._states.take(one.key, computed)
        self.num_companions -= entry.companion is not None

    def _free(self, entry: SchedulerEntry) -> None:
        cache, full = self.kv_cache, entry.num_cached_blocks
        if cache.copies and entry.num_computed > full * cache.block_size:
            block, last = entry.block_ids[full], entry.token_ids[full * cache.block_size : entry.num_computed]
            if self._copies.pop(block, None) is None:  # it was copied, if it had to be
                cache.cache_block(block, entry.prefix_node, last)
        cache.free(entry.block_ids)
        entry.block_ids, entry.num_computed, entry.num_cached_blocks, entry.prefix_node = [], 0, 0, entry.root


def _take_out(entries: list[SchedulerEntry], entry: SchedulerEntry) -> None:
    """Remove an entry from a sorted list."""
    place = bisect_left(entries, entry.order, key=_order)
    if place == len(entries) or entries[place] is not entry:
        raise ValueError(f"no sequence {entry.order} here")
    del entries[place]
