"""Adaptive speculation length: drafts as many tokens as save time, from measured acceptance rates and step times.

A draft token is worth the probability that it is accepted, and costs the time to draft and verify it. It pays if that
probability is higher than the number of tokens that the engine generates in that time anyway: this maximizes throughput
(Dinkelbach, On nonlinear fractional programming, 1967).

Where drafts do not pay, or where that is unknown, *shadow drafts* are made now and then: they are not verified, but
compared with the tokens that are generated. They cost only the time of the draft method, which is limited to a small
share. Between them the engine rests: its steps are those without speculation. The first draft of all is a shadow draft,
which shows what the draft method costs. Drafts that lose time pause, whatever was predicted (``LossLimit``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from nucleate.speculative.adaptive_measurements import (
    BASELINE_INTERVAL,
    PRIOR_RATE,
    PRIOR_WEIGHT,
    TRIAL_INTERVAL,
    AcceptanceCounts,
    AcceptanceRates,
    LossLimit,
    ShadowBudget,
    StepCosts,
)
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer, TargetOutput, truncate

MAX_SHADOW_TOKENS = 4

WIDTH_EMA_WEIGHT = 0.1
"""Weight of one tree in the moving average of the width of trees."""

MAX_REST_STEPS = 64
"""The most steps in a row that a controller without drafts does not see. The next one is measured, and counts for all.
"""

MAX_RETRY_STEPS, NEVER = 32, 1 << 62
"""After an empty proposal a sequence waits for 2 steps, then 4, up to so many; and a step that does not come."""

ITERATIONS = 3
"""Iterations of the fixed point between draft lengths and throughput."""

RECENT_PROPOSALS = 16
"""Calls of the draft method of which the fastest shows what it costs: others load kernels or catch up with many tokens.
"""

MARGIN = 1.15, 0.01
"""Safety margin on the estimated cost of a token: a factor and a summand."""


class _DraftRequest(NamedTuple):
    """A draft to request from the proposer."""

    sequence: int  #: index of its sequence
    num_tokens: int  #: number of tokens to draft
    rates: AcceptanceRates
    best_length: int  #: how many of them to verify; of a tree, its depth; 0 for a shadow draft
    charge_budget: bool  #: whether it counts against the time for shadow drafts


class AdaptiveProposer(Proposer):
    """Wraps a proposer, and drafts only as many tokens as save time.

    The engine reports every step without prompts (``end_step``) and every verified draft (``accepted``).

    trees: whether drafts are trees. They are drafted at full size and truncated to the depth that pays: at each depth
    at most one token is accepted, at the price of the average number of tokens per depth.
    """

    def __init__(self, proposer: Proposer, *, trees: bool = False) -> None:
        self.costs, self.layers = StepCosts(), proposer.layers
        self._proposer, self._trees, self._tokens_per_depth = proposer, trees, 1.0
        self._rates: dict[int, AcceptanceRates] = {}
        self._shared_counts = AcceptanceCounts(0.95)
        self._new_sequence_rates = AcceptanceRates(self._shared_counts)
        self._shadow_budget = ShadowBudget(hidden_states=bool(proposer.layers))
        self._step_seconds = 0.0  # duration of the last step
        self._recent_seconds: deque[float] = deque(maxlen=RECENT_PROPOSALS)  # that the draft method took
        self.propose_seconds = 0.0  # time that this step spent on drafts,
        self._hidden_seconds = 0.0  # and on hidden states for later ones
        self._num_steps, self._retry_step = 0, NEVER  # and the step after which a sequence is to be asked again
        self._unpaid_seconds = 0.0  # time of this step spent on empty proposals, except for shadow drafts
        self._max_length = 1  # twice the longest draft so far: the cost of longer ones is unknown
        self._loss_limit, self._num_accepted = LossLimit(), 0  # accepted: draft tokens of the current step
        self._num_drafted = 1  # how many sequences had a draft to verify in the last step

    def active(self) -> bool:
        """Whether ``propose`` may return a draft, as far as that is known without the sequences."""
        wanted = self._num_drafted > 0 or self._retry_step <= self._num_steps
        return self._shadow_budget.due or (wanted and not self._baseline_due)

    @property
    def _baseline_due(self) -> bool:
        """Whether a step without drafts is due, to measure it now: more often while it is open whether drafts pay."""
        interval = BASELINE_INTERVAL if self._loss_limit.gained else TRIAL_INTERVAL
        return self.costs.steps_since_baseline >= interval

    @property
    def _acceptance_rate(self) -> float:
        """The acceptance rate of first draft tokens, shadow drafts included."""
        return self._shared_counts.rate(0, PRIOR_RATE, PRIOR_WEIGHT)

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        begin = perf_counter()
        if self._baseline_due:  # a step without drafts, to measure it
            return [NO_DRAFT] * len(contexts)
        requests = self._requests(contexts, max_tokens)
        drafts = [NO_DRAFT] * len(contexts)
        if requests:
            selected = [contexts[request.sequence] for request in requests]
            asked = perf_counter()
            proposed = self._proposer.propose(selected, [request.num_tokens for request in requests])
            self._recent_seconds.append(perf_counter() - asked)
            for request, context, draft in zip(requests, selected, proposed, strict=True):
                drafts[request.sequence] = self._select_draft(request, context, draft)
            later = [each.rates.retry_step for each in requests if each.best_length and each.rates.retry_wait]
            self._retry_step = min([self._retry_step, *later])
        self._num_drafted = sum(map(bool, drafts))
        self.propose_seconds = perf_counter() - begin
        share = 1 - sum([not request.charge_budget for request in requests]) / max(len(contexts), 1)
        self._unpaid_seconds = 0.0 if self._num_drafted else self.propose_seconds * (1 - share)
        self._shadow_budget.spend(self.propose_seconds * share, settle=bool(requests))
        return drafts

    def _requests(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[_DraftRequest]:
        """The drafts to request: those that save time, and shadow drafts if the time budget allows them."""
        shadow_due, found = self._shadow_budget.due, []
        for index, (context, count) in enumerate(zip(contexts, max_tokens, strict=True)):
            if count < 1:
                continue
            rates = self._rates.get(context.key)
            if rates is None:
                rates = self._rates[context.key] = AcceptanceRates(self._shared_counts)
            rates.compare(context.token_ids, context.num_prompt_tokens)
            found.append((index, count, rates))
        lengths = self._best_lengths([(rates, count) for _, count, rates in found], len(contexts))
        requests, self._retry_step = [], NEVER
        for (index, count, rates), best_length in zip(found, lengths, strict=True):
            verify = best_length > 0 and rates.retry_step <= self._num_steps
            if best_length and not verify:
                self._retry_step = min(self._retry_step, rates.retry_step)
            if verify or (shadow_due and not rates.shadow_draft):
                num_tokens = (count if self._trees else best_length) if best_length else min(count, MAX_SHADOW_TOKENS)
                requests.append(_DraftRequest(index, num_tokens, rates, best_length, charge_budget=not verify))
        return requests

    def _best_lengths(self, found: Sequence[tuple[AcceptanceRates, int]], sequences: int) -> list[int]:
        """The draft lengths that maximize the joint throughput, up to the given maxima.

        The first iteration uses the throughput without drafts and requires a margin; later ones that of the result.
        """
        self._loss_limit.end_pause_if_risen(self._acceptance_rate)
        if self._loss_limit.pause:
            return [0] * len(found)
        baseline = self.costs.nearest_baseline(sequences)
        if baseline is None or not self._recent_seconds:  # first a step without drafts and a shadow draft are measured
            return [0] * len(found)
        token_cost = self.costs.token_cost(sequences) * self._tokens_per_depth
        fixed_cost = self._fixed_cost(baseline)
        rate, (times, more) = 1.0, MARGIN
        lengths = [0] * len(found)
        for _ in range(ITERATIONS):
            worth = times * rate
            prices = worth * token_cost + more, worth * fixed_cost
            best = [rates.best_length(count, *prices) for rates, count in found]
            if not any(length for length, _ in best):
                break
            lengths, times, more = [length for length, _ in best], 1.0, 0.0
            generated = sequences + sum([accepted for _, accepted in best])
            rate = max(rate, generated / (sequences * (1 + fixed_cost) + token_cost * sum(lengths)))
        return [min(length, self._max_length) for length in lengths]

    def _fixed_cost(self, step_seconds: float) -> float:
        """The cost of having a draft at all, in steps: as measured, but at least the time of the draft method."""
        return max(self.costs.fixed_cost, min(self._recent_seconds, default=0.0) / step_seconds)

    def _select_draft(self, request: _DraftRequest, context: DraftContext, draft: Draft) -> Draft:
        """The draft to verify; none if it becomes a shadow draft."""
        rates, best_length = request.rates, request.best_length
        rates.retry_wait = 0 if draft else min(2 * max(rates.retry_wait, 1), MAX_RETRY_STEPS)
        rates.retry_step = self._num_steps + rates.retry_wait
        if self._trees and best_length and draft:
            self._tokens_per_depth += WIDTH_EMA_WEIGHT * (len(draft) / draft.depth - self._tokens_per_depth)
            draft = truncate(draft, len(draft), best_length, len(draft))
        if not best_length and draft.distributions is not None:  # acceptance of sampled tokens needs verification
            best_length, draft = 1, draft.prefix(1)
            self._shadow_budget.seconds -= (self.costs.token_cost(1) + self.costs.fixed_cost) * self._step_seconds
        if best_length or not draft:
            rates.drafted = draft.depth
            self._max_length = max(self._max_length, 2 * draft.depth)
            return draft
        rates.shadow_draft, rates.drafted = draft, 0
        rates.shadow_start = len(context.token_ids) - context.num_prompt_tokens
        self._proposer.accepted(context.key, 0)
        return NO_DRAFT

    def is_idle(self, *, new_sequence: bool = False) -> bool:
        """Whether no draft is expected soon, so that hidden states are not needed.

        new_sequence: whether a new sequence starts, for which only the shared acceptance rates are known.
        """
        if self._shadow_budget.seconds >= 0 or self._num_drafted or self._retry_step <= self._num_steps:
            return False
        if not new_sequence or self._loss_limit.pause:
            return True
        token_cost = MARGIN[0] * self.costs.token_cost(1) * self._tokens_per_depth + MARGIN[1]
        fixed_cost = self._fixed_cost(self._step_seconds) if self._step_seconds else self.costs.fixed_cost
        return not self._new_sequence_rates.best_length(MAX_SHADOW_TOKENS, token_cost, fixed_cost)[0]

    def sequence_started(self) -> None:
        """Request drafts again, if they may pay for a sequence that has started."""
        if not self.is_idle(new_sequence=True):
            self._num_drafted = max(1, self._num_drafted)

    @property
    def rest(self) -> int:
        """The number of steps to come without drafts and hidden states, unless a sequence starts."""
        if not self._step_seconds or not self.is_idle():
            return 0
        steps = self._shadow_budget.steps_to_earn(self._step_seconds)
        return int(min(steps, self._loss_limit.pause or steps, self._retry_step - self._num_steps, MAX_REST_STEPS))

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        begin = perf_counter()
        self._proposer.observe(outputs)
        self._shadow_budget.observe()
        self._hidden_seconds += perf_counter() - begin
        self.charge(perf_counter() - begin)

    def charge(self, seconds: float) -> None:
        """Count time that the engine spent around ``propose`` and ``observe`` as time for shadow drafts, if it was."""
        if not self._num_drafted:
            self._shadow_budget.charge(seconds)

    def accepted(self, key: int, count: int) -> None:
        rates = self._rates.get(key)
        if rates is not None and rates.drafted:
            rates.record(rates.drafted, count)
            rates.drafted = 0
            self._num_accepted += count
            self._proposer.accepted(key, count)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        rates = self._rates.pop(key, None)
        if rates is not None:
            rates.compare(output_ids)
        self._proposer.forget(key, output_ids)

    def end_step(self, sequences: int, computed: int, seconds: float, rested: int = 0) -> None:
        """Record a step: its sequences, computed tokens (drafts included) and duration (drafting included).

        A step in which the model failed for some sequences is ignored. rested: steps before it that were not recorded,
        see ``rest``.
        """
        num_accepted, self._num_accepted = self._num_accepted, 0
        draft_seconds = self.propose_seconds + self._hidden_seconds
        self.propose_seconds = self._hidden_seconds = 0.0
        self._num_steps += 1 + rested
        if computed < max(sequences, 1):
            return
        self._step_seconds = self.costs.capped_seconds(sequences, computed, seconds)
        self._shadow_budget.earn(self._step_seconds, 1 + rested)
        if computed == sequences:
            self._loss_limit.record_plain(1 + rested)
            if self._unpaid_seconds and sequences in self.costs.baseline:
                duration = 1 + self._unpaid_seconds / self.costs.baseline[sequences]
                self._loss_limit.record_drafts(duration, 1.0, self._acceptance_rate)
                self._unpaid_seconds = 0.0
            if draft_seconds < seconds:  # shadow drafts and hidden states are not part of a step without drafts
                plain_seconds = self.costs.capped_seconds(sequences, computed, seconds - draft_seconds)
                self.costs.record(sequences, computed, plain_seconds, 1 + rested)
            return
        baseline = self.costs.baseline.get(sequences)
        if baseline is not None and self.costs.first_step_seen:
            tokens = 1 + num_accepted / sequences
            self._loss_limit.record_drafts(self._step_seconds / baseline, tokens, self._acceptance_rate)
        self.costs.record(sequences, computed, self._step_seconds)
