"""Which sequences read which of their tokens next: iteration-level scheduling. Pure Python.

Knows lengths, priorities and blocks; refuses to know models, text and what a token means.

Each step is planned anew (Yu et al., Orca, OSDI 2022). Running sequences of which one token is to be read go first;
what is left of the budget of tokens reads prompts, in parts if need be (Agrawal et al., Sarathi-Serve, arXiv
2403.02310). The order is that of priority, then of arrival; none begins before one that comes first and cannot. A
sequence that begins gets blocks for all its tokens, so that only one that grows can find the pool empty: then the last
of the order is *preempted*: it gives its blocks back, waits, and is read again later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nucleate.engine.kv_cache import START, KVCacheManager, PrefixHit

Order = tuple[int, int, int]
"""Priority (lower is sooner), arrival, and which answer of a request: no two jobs have the same."""


@dataclass(eq=False, slots=True)
class SchedulerEntry:
    """One sequence as the scheduler sees it. ``limit``: the most tokens it will ever have, prompt and output."""

    order: Order
    token_ids: Sequence[int]
    limit: int
    most: int = 1 << 62  #: tokens to be read at a time
    shares: bool = True  #: whether its beginning may be one that is there; not if the logits of its prompt are wanted
    paused: bool = False  #: nobody takes what it writes: it is not read, and is the first to be preempted
    read: int = 0
    reused: int = 0  #: its first tokens that it never had to read, as others had them
    blocks: list[int] = field(default_factory=list)
    sealed: int = 0  #: blocks that can be found by others
    node: int = START  #: the beginning that ends with the last of these
    own: bool = False  #: whether ``token_ids`` is a list of its own
    preempted: bool = False  #: whether it ever was

    @property
    def idle(self) -> bool:
        """Whether nothing is to be read for now: it is paused, or has all its tokens."""
        return self.paused or len(self.token_ids) >= self.limit

    def push(self, token: int) -> None:
        """One more token. Until then the tokens may be those of other jobs too."""
        if not self.own:
            self.token_ids, self.own = list(self.token_ids), True
        self.token_ids.append(token)  # type: ignore[attr-defined]


class ScheduledChunk(NamedTuple):
    """What a job reads in a step: its tokens from ``start`` to ``stop``."""

    job: SchedulerEntry
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether it ends with the last token there is, after which comes a new one."""
        return self.stop == len(self.job.token_ids)


class Scheduler:
    """Jobs come and go; ``plan`` says what the next forward reads, ``done`` that it has been read.

    max_num_seqs: how many run at a time. max_tokens: how many tokens a forward reads. whole: prompts are not cut for
    that, but for the ``most`` of their jobs only; the first of a step is then read however long it is.
    """

    def __init__(self, pool: KVCacheManager, *, max_num_seqs: int, max_tokens: int, whole: bool = False) -> None:
        if max_num_seqs < 1 or max_tokens < max_num_seqs:
            raise ValueError(f"{max_num_seqs} sequences and {max_tokens} tokens: there must be a token for each")
        self.pool, self.max_num_seqs, self.max_tokens, self.whole = pool, max_num_seqs, max_tokens, whole
        self.running: list[SchedulerEntry] = []  # in order, as are those that wait
        self.waiting: list[SchedulerEntry] = []  # they have not begun, or have to begin again
        self.preemptions = 0
        self._planned: dict[SchedulerEntry, ScheduledChunk] = {}

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, job: SchedulerEntry) -> None:
        """Take a job. Raises ValueError for one that could never end: that the pool cannot hold, even alone, or that
        has nothing to read or no token to come.
        """
        if not 0 < len(job.token_ids) < job.limit or job.most < 1:
            raise ValueError(f"nothing can be read of {len(job.token_ids)} of {job.limit} tokens, {job.most} at a time")
        if self.pool.blocks_for(job.limit) > self.pool.count:
            raise ValueError(f"{job.limit} tokens do not fit {self.pool.count} blocks of {self.pool.block_size}")
        insort(self.waiting, job, key=_order)

    def fork(self, parent: SchedulerEntry, order: Order) -> tuple[SchedulerEntry, tuple[int, int] | None]:
        """A new job with the tokens of one that is there, and with what that one has read.

        If there is room it runs at once: full blocks are shared, and one that is not full is to be copied, from the
        first to the second of the pair, as both jobs will write to it. If not, it waits, as one that was added does.
        """
        child = SchedulerEntry(order, list(parent.token_ids), parent.limit, parent.most, paused=parent.paused, own=True)
        full, rest = (0, parent.read) if self.whole else divmod(parent.read, self.pool.block_size)
        taken = self.pool.take(self.pool.blocks_for(rest)) if self._seat() and parent.read else None
        if taken is None:
            insort(self.waiting, child, key=_order)
            return child, None
        self.pool.join(parent.blocks[:full])
        child.blocks = parent.blocks[:full] + taken
        child.read, child.reused, child.sealed, child.node = parent.read, parent.read, parent.sealed, parent.node
        insort(self.running, child, key=_order)
        return child, (parent.blocks[full], taken[0]) if taken and not self.whole else None

    def remove(self, job: SchedulerEntry) -> None:
        """Forget a job, whatever its state."""
        if job.blocks:
            _take_out(self.running, job)
            self._give_back(job)
        else:
            _take_out(self.waiting, job)

    def plan(self) -> list[ScheduledChunk]:
        """What the next forward reads. Jobs that have all their tokens, or are paused, are left out.

        A plan that was not carried out can be made again: it is the same.
        """
        planned = self._planned = {}
        prompts, size = [], self.pool.block_size
        for job in self.running.copy():
            length = len(job.token_ids)
            if job.paused or length >= job.limit or not job.blocks:  # it may have been preempted by one before it
                continue
            if length > len(job.blocks) * size and not self._grow(job):
                continue
            if job.read == length - 1:
                planned[job] = ScheduledChunk(job, job.read, length)
            elif job.read < length:
                prompts.append(job)
        chunks = self._read(prompts) if prompts or self.waiting else []
        return [*planned.values(), *chunks]

    def done(self, chunks: Sequence[ScheduledChunk]) -> None:
        """The chunks, of jobs that are still there, have been read."""
        size = self.pool.block_size
        for job, _, stop in chunks:
            job.read = stop
            while stop >= (end := (job.sealed + 1) * size):
                ids = job.token_ids[end - size : end]
                job.node = self.pool.seal(job.blocks[job.sealed], job.node, ids)
                job.sealed += 1

    def reserve(self, job: SchedulerEntry, count: int) -> int:
        """Find a running job blocks for so many tokens that it may have soon, if nobody must make room for them.

        Returns how many fit.
        """
        length, pool = len(job.token_ids), self.pool
        while pool.blocks_for(length + count) > len(job.blocks):
            if (taken := pool.take(1)) is None:
                return len(job.blocks) * pool.block_size - length
            job.blocks += taken
        return count

    def trim(self, job: SchedulerEntry) -> None:
        """Give back the blocks of a running job that its tokens do not need."""
        needed = self.pool.blocks_for(len(job.token_ids))
        if needed < len(job.blocks):
            self.pool.release(job.blocks[needed:])
            del job.blocks[needed:]

    def _grow(self, job: SchedulerEntry) -> bool:
        """Find a running job the blocks for all its tokens, unless it must make room itself."""
        while self.pool.blocks_for(len(job.token_ids)) > len(job.blocks):
            if (taken := self.pool.take(1)) is not None:
                job.blocks += taken
            elif self._preempt() is job:
                return False
        return True

    def _read(self, prompts: list[SchedulerEntry]) -> list[ScheduledChunk]:
        """What is read of prompts with the tokens that are left: one at least, as there is one for each that runs."""
        chunks: list[ScheduledChunk] = []
        read = 0
        for job in self._prompts(prompts):
            left = self.max_tokens - len(self._planned) - read
            unread = len(job.token_ids) - job.read
            part = min(unread, job.most) if self.whole else min(unread, job.most, left)
            if unread == 1:
                self._planned[job] = ScheduledChunk(job, job.read, job.read + 1)
                left -= 1
            elif chunks and part > left:
                break
            else:
                chunks.append(ScheduledChunk(job, job.read, job.read + part))
                read, left = read + part, left - part
            if chunks and left <= 0:
                break
        return chunks

    def _prompts(self, running: list[SchedulerEntry]) -> Iterator[SchedulerEntry]:
        """Jobs that run, and in between, in order, those that wait and can begin."""
        place, waiting = 0, self.waiting
        for job in [*running, None]:
            while place < len(waiting) and (job is None or waiting[place].order < job.order):
                first = waiting[place]
                if first.idle:
                    place += 1
                elif self._begin(first):
                    yield first
                else:
                    place = len(waiting)
            if job is not None and job.blocks:  # it may have been preempted by one that began
                yield job

    def _begin(self, job: SchedulerEntry) -> bool:
        """Make a job run, if there is room. For one of a better priority others make room, as do the paused ones."""
        while not self._room(job):
            if not self.running:
                return False
            victim = self._victim()
            if not victim.paused and victim.order[0] <= job.order[0]:
                return False
            self._preempt()
        _take_out(self.waiting, job)
        insort(self.running, job, key=_order)
        return True

    def _room(self, job: SchedulerEntry) -> bool:
        """Give a job the blocks that it needs now, if there is room for it."""
        if not self._seat():
            return False
        shared = self.pool.share(job.token_ids) if job.shares else PrefixHit([], START)
        taken = self.pool.take(self.pool.blocks_for(len(job.token_ids)) - len(shared.blocks))
        if taken is None:
            self.pool.release(shared.blocks)
            return False
        job.blocks, job.node, job.sealed = shared.blocks + taken, shared.node, len(shared.blocks)
        job.read = len(shared.blocks) * self.pool.block_size
        job.reused = min(job.reused, job.read) if job.preempted else job.read
        return True

    def _seat(self) -> bool:
        return len(self.running) < self.max_num_seqs

    def _victim(self) -> SchedulerEntry:
        """The last of the running jobs that are paused, or else of all."""
        return next((job for job in reversed(self.running) if job.paused), self.running[-1])

    def _preempt(self) -> SchedulerEntry:
        """Make a running job wait, and return it."""
        job = self._victim()
        _take_out(self.running, job)
        self._planned.pop(job, None)
        self._give_back(job)
        insort(self.waiting, job, key=_order)
        job.preempted = True
        self.preemptions += 1
        return job

    def _give_back(self, job: SchedulerEntry) -> None:
        self.pool.release(job.blocks)
        job.blocks, job.read, job.sealed, job.node = [], 0, 0, START


def _order(job: SchedulerEntry) -> Order:
    return job.order


def _take_out(jobs: list[SchedulerEntry], job: SchedulerEntry) -> None:
    """Remove a job from a list in order."""
    place = bisect_left(jobs, job.order, key=_order)
    if place == len(jobs) or jobs[place] is not job:
        raise ValueError(f"there is no job {job.order} here")
    del jobs[place]
