"""Speculative decoding in the engine: gets drafts from a proposer, verifies them, and reports the results back.

If a proposer fails, sequences continue without drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from nucleate.engine.beam_scheduler import RunningBeam
from nucleate.engine.companions import Companions
from nucleate.engine.kv_cache import COMPANION_START
from nucleate.engine.running_request import RunningSequence
from nucleate.engine.scheduler import NO_ROW, ScheduledSequence, Scheduler
from nucleate.engine.token_sampler import TokenSampler
from nucleate.engine.verification import InvalidDistributionError, Path, filter_draft, verify_by_rule, verify_coupled
from nucleate.jit.kernel_libraries import DRAFTS
from nucleate.jit.native_library import ensure_loaded
from nucleate.models.runner import Move, Runner
from nucleate.outputs import SpeculativeStats
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.distributions import supports_rejection_sampling
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stages.selection import Greedy
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.config import COUPLED, FIELD, Speculation
from nucleate.speculative.draft import NO_DRAFT, ROOT, Draft, DraftContext, TargetOutput, truncate

logger = logging.getLogger("nucleate")

MAX_LOGITS = 1 << 26
"""Maximum number of logits of a step with drafts: rows times vocabulary size."""


class Speculator:
    """Speculative decoding of one engine. Raises ParameterError, ModelError."""

    def __init__(
        self,
        config: Speculation,
        runner: Runner,
        companions: Companions,
        scheduler: Scheduler,
        sampler: Sampler,
        token_sampler: TokenSampler,
    ) -> None:
        if not runner.paged:
            why = f": {runner.unpaged_reason}" if runner.unpaged_reason else ""
            raise ParameterError(FIELD, f"speculative decoding needs a model with a paged KV cache{why}")
        self.config, self.proposer = config, config.create_proposer()
        self.coupled = config.acceptance_rule == COUPLED  #: tokens are sampled first, and then compared with drafts
        self._adaptive = self.proposer if isinstance(self.proposer, AdaptiveProposer) else None
        self.layers = tuple(self.proposer.layers)
        if self.layers:
            runner.capture_hidden_states(self.layers)
        for each in companions.runners:
            if (warm := getattr(each, "warm", None)) is not None:
                warm()  # verification must be bit-identical to decoding, which needs the compiled kernels
        ensure_loaded([DRAFTS])  # no request waits for them
        self._runner, self._companions, self._scheduler = runner, companions, scheduler
        self._sampler, self._token_sampler = sampler, token_sampler
        supports_trees = all(getattr(each, "tree_attention", False) for each in companions.runners)
        self._tree_width = config.effective_tree_width if supports_trees else 1
        self._paths: dict[int, Path] = {}  # accepted paths of the trees of this step, by key
        self._steps = self._drafted = self._accepted = 0
        count = config.num_speculative_tokens
        self._verified_at, self._accepted_at = [0] * count, [0] * count
        self._seconds = 0.0
        self._drafting = False  # whether this step has any draft
        self._rest = self._rested = 0  # steps to come, and past ones, that the adaptive controller does not see
        self._awake = False  # whether the next step does not rest
        self._failed = False

    @property
    def stats(self) -> SpeculativeStats:
        """Counters so far."""
        per_position = tuple(self._verified_at), tuple(self._accepted_at)
        return SpeculativeStats(self._steps, self._drafted, self._accepted, *per_position, self._seconds)

    def wake(self) -> None:
        """The next step, or the one after this one, does not rest: a sequence may start in it."""
        self._rest, self._awake = 0, True

    def begin_step(self, scheduled: list[ScheduledSequence]) -> bool:
        """Add drafts to decoding sequences, as far as the token budget and free blocks allow, without preemption.

        Draft tokens are appended to the tokens of their sequences until ``end_forward`` or ``withdraw``. False: this
        step has no use of the draft method; it runs, and is counted, as without speculation.
        """
        if self._rest:
            self._rest, self._rested, self._steps = self._rest - 1, self._rested + 1, self._steps + len(scheduled)
            return False
        self._drafting = False
        if self._adaptive is None or self._adaptive.active():
            self._draft(scheduled)
        if self.layers:
            self._runner.capture_enabled = self._needs_hidden_states(scheduled)
        return True

    def _draft(self, scheduled: list[ScheduledSequence]) -> None:
        begin = perf_counter()
        ones = [one for one in scheduled if _can_draft(one)]
        if ones:
            counts = self._counts(scheduled, ones)
            contexts = [self._context(one.sequence) for one in ones]
            drafts = self._propose(contexts, counts) if any(counts) else [NO_DRAFT] * len(ones)
            for one, count, draft in zip(ones, counts, drafts, strict=True):
                if draft:
                    self._add_draft(one, draft, count)
        seconds = perf_counter() - begin
        self._seconds += seconds
        if self._adaptive is not None:
            self._adaptive.charge(seconds - self._adaptive.propose_seconds)

    def _counts(self, scheduled: list[ScheduledSequence], ones: list[ScheduledSequence]) -> list[int]:
        """The maximum number of draft tokens of each sequence."""
        budget = self._scheduler.max_num_batched_tokens - sum([one.stop - one.start for one in scheduled])
        budget = min(budget, MAX_LOGITS // self._runner.vocab_size - len(scheduled))
        counts = []
        for one in ones:
            depth = _max_depth(one.sequence)
            limit = self.config.num_speculative_tokens if self._verifiable(one.sequence) else 0
            rows = len(one.group)
            count = max(0, min(limit, budget // rows, limit if depth > 0 and self._tree_width > 1 else depth))
            counts.append(count)
            budget -= rows * count
        return counts

    def _verifiable(self, sequence: RunningSequence) -> bool:
        """Whether the acceptance rule supports the pipeline of a sequence."""
        return self.coupled or supports_rejection_sampling(self._sampler.stages(sequence.row))

    def _context(self, sequence: RunningSequence) -> DraftContext:
        """The proposer's view of a sequence. It is created once, and shares the list of tokens."""
        if sequence.draft_context is None:
            request, greedy = sequence.running.request, isinstance(self._sampler.stages(sequence.row)[-1], Greedy)
            temperature = 0.0 if greedy else request.params.temperature
            prompt, seed = len(request.prompt_ids), sequence.processor.seed
            context = DraftContext(sequence.key, sequence.token_ids, prompt, seed, temperature, self.coupled)
            sequence.draft_context = context
        return sequence.draft_context

    def _propose(self, contexts: list[DraftContext], counts: list[int]) -> list[Draft]:
        drafts = self._guarded(self.proposer.propose, contexts, counts)
        if drafts is None or len(drafts) != len(contexts) or not all(isinstance(draft, Draft) for draft in drafts):
            if drafts is not None:
                self._warn("it did not return one draft per sequence")
            return [NO_DRAFT] * len(contexts)
        return list(drafts)

    def _add_draft(self, one: ScheduledSequence, draft: Draft, count: int) -> None:
        """Add as much of a draft as fits and as the grammar allows."""
        sequence: RunningSequence = one.sequence
        draft = truncate(draft, self._tree_width, _max_depth(sequence), count)
        draft = filter_draft(draft, self._runner.vocab_size, sequence.processor.guide)
        for each in sequence.group:
            draft = draft.prefix(self._scheduler.reserve(each, len(draft)))
        if not draft:
            self._guarded(self.proposer.accepted, sequence.key, 0)
            return
        self._drafting = True
        for part in one.group:
            part.sequence.token_ids += draft.tokens
            part.draft = draft

    def end_forward(self, scheduled: Sequence[ScheduledSequence]) -> Any:
        """Remove the draft tokens from their sequences. Returns the hidden states, if the proposer needs them now."""
        self._remove_draft_tokens(scheduled)
        return self._runner.hidden_states if self.layers and self._runner.capture_enabled else None

    def _remove_draft_tokens(self, scheduled: Sequence[ScheduledSequence]) -> None:
        for one in scheduled if self._drafting else ():
            if one.draft:
                del one.sequence.token_ids[one.stop :]

    def withdraw(self, scheduled: Sequence[ScheduledSequence]) -> None:
        """Drop the drafts, after a failed forward pass."""
        self._remove_draft_tokens(scheduled)
        for one in scheduled:
            if one.draft:
                one.draft = NO_DRAFT
                self._scheduler.trim(one.sequence)
                if one.sequence.owner is None:
                    self._guarded(self.proposer.accepted, one.sequence.key, 0)

    def sample(self, ready: Sequence[ScheduledSequence], logits_LV: Any) -> None:
        """Sample a token for each sequence, after the tokens of its draft that are accepted."""
        drafted = [one for one in ready if one.draft is not NO_DRAFT]
        if self.coupled and drafted:
            paths = verify_coupled(ready, logits_LV, self._token_sampler)
        else:
            plain = [one for one in ready if one.draft is NO_DRAFT] if drafted else ready
            self._token_sampler.sample([one.sequence for one in plain], [one.logits_row for one in plain], logits_LV)
            paths = [self._verify_by_rule(one, logits_LV) for one in drafted]
        self._steps += len(ready)
        if self._tree_width > 1:
            self._compact_trees(drafted, paths)
        for one, path in zip(drafted, paths, strict=True):
            self._record(one, path)

    def _compact_trees(self, ready: Sequence[ScheduledSequence], paths: Sequence[Path]) -> None:
        """Move the KV cache entries of the accepted path of each tree to the positions that a chain has."""
        moves: dict[Runner, list[Move]] = {}
        for one, path in zip(ready, paths, strict=True):
            if one.sequence.finished or one.draft.parents is None:
                continue
            if self.layers:
                self._paths[one.sequence.key] = path
            in_place = next((depth for depth, node in enumerate(path) if node != depth), len(path))
            if in_place < len(path):
                for part in one.group:
                    sources = [part.stop + node for node in path[in_place:]]
                    move = Move(part.sequence.key, part.sequence.block_ids, sources, part.stop + in_place)
                    moves.setdefault(self._companions.runner_of(part.sequence), []).append(move)
        for runner, own in moves.items():
            runner.move(own)

    def _verify_by_rule(self, one: ScheduledSequence, logits_LV: Any) -> Path:
        try:
            return verify_by_rule(one, logits_LV, self._token_sampler, self._sampler, self.config.acceptance_rule)
        except InvalidDistributionError as error:
            self._warn(str(error))
            self._token_sampler.sample([one.sequence], [one.logits_row], logits_LV)
            return ()

    def _record(self, one: ScheduledSequence, path: Path) -> None:
        """Update the counters, and advance the sequence by its accepted draft tokens, which are already computed."""
        sequence, draft = one.sequence, one.draft
        if sequence.recorder is not None:
            position = one.stop - len(sequence.running.request.prompt_ids)
            rejected = [draft.tokens[node] for node in draft.children().get(path[-1] if path else ROOT, ())]
            sequence.recorder.record_draft(sequence.processor.index, position, len(path), rejected)
        accepted = len(path)
        self._drafted += len(draft)
        self._accepted += accepted
        for position in range(min(draft.depth, accepted + 1)):
            self._verified_at[position] += 1
            self._accepted_at[position] += position < accepted
        if not sequence.finished:
            for part in one.group:
                self._scheduler.advance(part.sequence, part.stop + accepted)
                self._scheduler.trim(part.sequence)
            self._guarded(self.proposer.accepted, sequence.key, accepted)

    def _needs_hidden_states(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        adaptive = self._adaptive
        return (
            adaptive is None
            or not adaptive.is_idle()
            or (not all(map(_only_decodes, scheduled)) and not adaptive.is_idle(new_sequence=True))
        )

    def observe(self, scheduled: Sequence[ScheduledSequence], states_TF: Any) -> None:
        """Pass the hidden states of all accepted tokens to the proposer, if it needs them."""
        if states_TF is None:
            return
        begin, end = perf_counter(), 0
        observed = []
        for one in scheduled:
            sequence, draft = one.sequence, one.draft
            if sequence.root == COMPANION_START:
                continue
            start, end = end, end + one.stop - one.start + len(draft)
            if isinstance(sequence, RunningSequence) and not sequence.finished:
                ids = sequence.token_ids[one.start : sequence.num_computed]
                rows: Any = slice(start, start + len(ids))
                if draft.parents is not None:
                    first = start + one.stop - one.start
                    path = self._paths.get(sequence.key, ())
                    rows = [*range(start, first), *[first + node for node in path]]
                observed.append(TargetOutput(sequence.key, one.start, ids, states_TF[rows]))
        self._paths.clear()
        if observed:
            self._guarded(self.proposer.observe, observed)
        self._seconds += perf_counter() - begin

    def end_step(self, scheduled: Sequence[ScheduledSequence], seconds: float) -> None:
        """Report a step to the adaptive controller: its number of tokens, drafts included, and its duration."""
        if self._adaptive is None:
            return
        if all(map(_only_decodes, scheduled)):
            computed = sum([one.stop - one.start + len(one.draft) for one in scheduled])
            self._adaptive.end_step(len(scheduled), computed, seconds, self._rested)
            self._rest, self._rested, self._awake = 0 if self._awake else self._adaptive.rest, 0, False
            if self._rest and self.layers:
                self._runner.capture_enabled = False
        else:
            self._adaptive.sequence_started()
            self._awake = False

    def forget(self, sequence: RunningSequence) -> None:
        """Drop the proposer's state of a finished sequence."""
        begin = perf_counter()
        output = sequence.token_ids[len(sequence.running.request.prompt_ids) :]
        self._guarded(self.proposer.forget, sequence.key, output)
        self.wake()
        self._seconds += perf_counter() - begin

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the proposer. Returns None if it raises."""
        try:
            return function(*arguments)
        except Exception as error:  # noqa: BLE001  # a custom proposer may raise anything
            self._warn(f"{type(error).__name__}: {error}")
            return None

    def _warn(self, what: str) -> None:
        if not self._failed:
            logger.warning("speculative decoding: the proposer failed, continuing without drafts: %.300s", what)
        self._failed = True


def _max_depth(sequence: RunningSequence) -> int:
    """The maximum depth of a draft: the token at the maximum length is always sampled."""
    return sequence.max_length - len(sequence.token_ids) - 1


def _can_draft(one: ScheduledSequence) -> bool:
    """Whether a sequence has generated a token, and all its tokens are scheduled."""
    sequence = one.sequence
    if not one.last or sequence.row == NO_ROW or sequence.all_logits:
        return False
    reasoning = sequence.processor.reasoning
    return reasoning is None or reasoning.allows_draft


def _only_decodes(one: ScheduledSequence) -> bool:
    """Whether the only token to compute, apart from a draft, is the last one. Not of a beam."""
    return one.last and one.stop - one.start == 1 and not isinstance(one.sequence, RunningBeam)
