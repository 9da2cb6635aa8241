"""Adaptive speculation length: drafts as many tokens as save time, from measured acceptance rates and step times.

A draft token is worth the probability that it is accepted, and costs the time to draft and verify it. It pays if that
probability is higher than the number of tokens that the engine generates in that time anyway: this maximizes throughput
(Dinkelbach, On nonlinear fractional programming, 1967).

Where drafts do not pay, or where that is unknown, *shadow drafts* are made now and then: they are not verified, but
compared with the tokens that are generated. They cost only the time of the draft method, which is limited to a small
share. Drafts that lose time pause, whatever was predicted (``loss_limit``).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from nucleate.speculative.adaptive.acceptance_rate import AcceptanceCounts, AcceptanceRates
from nucleate.speculative.adaptive.costs import BASELINE_INTERVAL, TRIAL_INTERVAL, StepCosts
from nucleate.speculative.adaptive.loss_limit import LossLimit
from nucleate.speculative.draft import NO_DRAFT, Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.tree import truncate

SHADOW_TIME_SHARE = 0.005
"""The share of the time that shadow drafts may take."""

MAX_SHADOW_TOKENS = 4
"""The most tokens of a shadow draft."""

MAX_CREDIT_STEPS, MAX_DEBT_STEPS = 8, 1000
"""Steps for which unused time for shadow drafts is saved, and for which overspent time is carried over."""

WARMUP_STEPS = 32
"""Number of steps before a shadow draft in which the proposer receives hidden states, which takes time, too."""

WIDTH_EMA_WEIGHT = 0.1
"""Weight of one tree in the moving average of the width of trees."""

MAX_UNRECORDED_STEPS = 7
"""Steps without a draft method at work of which only the next one is measured, and counts for all."""

ITERATIONS = 3
"""Iterations of the fixed point between draft lengths and throughput."""

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
        self._shadow_seconds = 0.0  # left for shadow drafts
        self._step_seconds = 0.0  # duration of the last step
        self._propose_seconds = 0.0  # time that this step spent on drafts,
        self._hidden_seconds = 0.0  # and on hidden states for later ones
        self._warmup_steps = WARMUP_STEPS if proposer.layers else 0
        self._steps_observed = self._warmup_steps  # steps since hidden states are received again, for a shadow draft,
        self._observe_seconds = 0.0  # and seconds that this took
        self._max_length = 1  # twice the longest draft so far: the cost of longer ones is unknown
        self._loss_limit, self._num_accepted = LossLimit(), 0  # accepted: draft tokens of the current step
        self._unrecorded_steps = 0
        self._num_drafted = 1  # how many sequences had a draft to verify in the last step

    def active(self) -> bool:
        """Whether ``propose`` may return a draft, as far as that is known without the sequences."""
        return self._shadow_due or (self._num_drafted > 0 and not self._baseline_due)

    @property
    def _baseline_due(self) -> bool:
        """Whether a step without drafts is due, to measure it now: more often while it is open whether drafts pay."""
        interval = BASELINE_INTERVAL if self._loss_limit.gained else TRIAL_INTERVAL
        return self.costs.steps_since_baseline >= interval

    @property
    def _shadow_due(self) -> bool:
        """Whether the time budget allows shadow drafts."""
        return self._shadow_seconds >= 0 and self._steps_observed >= self._warmup_steps

    def propose(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``."""
        begin = perf_counter()
        if self._baseline_due:  # a step without drafts, to measure it
            return [NO_DRAFT] * len(contexts)
        requests = self._requests(contexts, max_tokens)
        drafts = [NO_DRAFT] * len(contexts)
        if requests:
            selected = [contexts[request.sequence] for request in requests]
            proposed = self._proposer.propose(selected, [request.num_tokens for request in requests])
            for request, context, draft in zip(requests, selected, proposed, strict=True):
                drafts[request.sequence] = self._select_draft(request, context, draft)
        self._num_drafted = sum(map(bool, drafts))
        self._propose_seconds = perf_counter() - begin
        share = 1 - sum([not request.charge_budget for request in requests]) / max(len(contexts), 1)
        self._shadow_seconds -= self._propose_seconds * share
        if requests:
            self._shadow_seconds, self._observe_seconds = self._shadow_seconds - self._observe_seconds, 0.0
        if self._shadow_seconds < 0:
            self._steps_observed = 0
        return drafts

    def _requests(self, contexts: Sequence[DraftContext], max_tokens: Sequence[int]) -> list[_DraftRequest]:
        """The drafts to request: those that save time, and shadow drafts if the time budget allows them."""
        shadow_due, found = self._shadow_due, []
        for index, (context, count) in enumerate(zip(contexts, max_tokens, strict=True)):
            if count < 1:
                continue
            rates = self._rates.get(context.key)
            if rates is None:
                rates = self._rates[context.key] = AcceptanceRates(self._shared_counts)
            rates.compare(context.token_ids)
            found.append((index, count, rates))
        lengths = self._best_lengths([(rates, count) for _, count, rates in found], len(contexts))
        requests = []
        for (index, count, rates), best_length in zip(found, lengths, strict=True):
            verify = best_length > 0 and not rates.no_proposal
            if verify or (shadow_due and not rates.shadow_draft):
                num_tokens = (count if self._trees else best_length) if best_length else min(count, MAX_SHADOW_TOKENS)
                requests.append(_DraftRequest(index, num_tokens, rates, best_length, charge_budget=not verify))
        return requests

    def _best_lengths(self, found: Sequence[tuple[AcceptanceRates, int]], sequences: int) -> list[int]:
        """The draft lengths that maximize the joint throughput, up to the given maxima.

        The first iteration uses the throughput without drafts and requires a margin; later ones that of the result.
        """
        if self._loss_limit.pause:
            return [0] * len(found)
        token_cost, fixed_cost = self.costs.token_cost(sequences) * self._tokens_per_depth, self.costs.fixed_cost
        rate, (times, more) = 1.0, MARGIN
        lengths = [0] * len(found)
        for _ in range(ITERATIONS):
            worth = times * rate
            prices = worth * token_cost + more, worth * fixed_cost
            best = [rates.best_length(min(count, self._max_length), *prices) for rates, count in found]
            if not any(length for length, _ in best):
                break
            lengths, times, more = [length for length, _ in best], 1.0, 0.0
            generated = sequences + sum([accepted for _, accepted in best])
            rate = max(rate, generated / (sequences * (1 + fixed_cost) + token_cost * sum(lengths)))
        return lengths

    def _select_draft(self, request: _DraftRequest, context: DraftContext, draft: Draft) -> Draft:
        """The draft to verify; none if it becomes a shadow draft."""
        rates, best_length = request.rates, request.best_length
        rates.no_proposal = not draft
        if self._trees and best_length and draft:
            self._tokens_per_depth += WIDTH_EMA_WEIGHT * (len(draft) / draft.depth - self._tokens_per_depth)
            draft = truncate(draft, len(draft), best_length, len(draft))
        if not best_length and draft.distributions is not None:  # acceptance of sampled tokens needs verification
            best_length, draft = 1, draft.prefix(1)
            self._shadow_seconds -= (self.costs.token_cost(1) + self.costs.fixed_cost) * self._step_seconds
        if best_length or not draft:
            rates.drafted = draft.depth
            self._max_length = max(self._max_length, 2 * draft.depth)
            return draft
        rates.shadow_draft, rates.shadow_start, rates.drafted = draft, len(context.token_ids), 0
        self._proposer.accepted(context.key, 0)
        return NO_DRAFT

    def is_idle(self, *, new_sequence: bool = False) -> bool:
        """Whether no draft is expected soon, so that hidden states are not needed.

        new_sequence: whether a new sequence starts, for which only the shared acceptance rates are known.
        """
        if self._shadow_seconds >= 0 or self._num_drafted:
            return False
        if not new_sequence:
            return True
        token_cost = MARGIN[0] * self.costs.token_cost(1) * self._tokens_per_depth + MARGIN[1]
        return not self._new_sequence_rates.best_length(MAX_SHADOW_TOKENS, token_cost, self.costs.fixed_cost)[0]

    def sequence_started(self) -> None:
        """Request drafts again, because a sequence has started."""
        self._num_drafted = max(1, self._num_drafted)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        """See ``Proposer.observe``."""
        begin = perf_counter()
        self._proposer.observe(outputs)
        self._steps_observed += 1
        self._hidden_seconds += perf_counter() - begin
        if not self._num_drafted:
            self._observe_seconds += perf_counter() - begin

    def accepted(self, key: int, count: int) -> None:
        """See ``Proposer.accepted``."""
        rates = self._rates.get(key)
        if rates is not None and rates.drafted:
            rates.record(rates.drafted, count)
            rates.drafted = 0
            self._num_accepted += count
            self._proposer.accepted(key, count)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``."""
        self._rates.pop(key, None)
        self._proposer.forget(key, output_ids)

    def end_step(self, sequences: int, computed: int, seconds: float) -> None:
        """Record a step: its sequences, computed tokens (drafts included) and duration (drafting included).

        A step in which the model failed for some sequences is ignored.
        """
        if computed == sequences and self._unrecorded_steps < MAX_UNRECORDED_STEPS and self._idle(sequences):
            self._unrecorded_steps += 1
            return
        steps, self._unrecorded_steps = 1 + self._unrecorded_steps, 0
        num_accepted, self._num_accepted = self._num_accepted, 0
        draft_seconds, self._propose_seconds, self._hidden_seconds = (
            self._propose_seconds + self._hidden_seconds,
            0.0,
            0.0,
        )
        if computed < max(sequences, 1):
            return
        self._step_seconds = self.costs.capped_seconds(sequences, computed, seconds)
        more = SHADOW_TIME_SHARE * self._step_seconds
        saved = min(self._shadow_seconds + steps * more, MAX_CREDIT_STEPS * more)
        self._shadow_seconds = max(-MAX_DEBT_STEPS * more, saved)
        if computed == sequences:
            self._loss_limit.record_plain(steps)
            if draft_seconds < seconds:  # shadow drafts and hidden states are not part of a step without drafts
                plain_seconds = self.costs.capped_seconds(sequences, computed, seconds - draft_seconds)
                self.costs.record(sequences, computed, plain_seconds)
            return
        baseline = self.costs.baseline.get(sequences)
        if baseline is not None and self.costs.first_step_seen:
            self._loss_limit.record_drafts(self._step_seconds / baseline, 1 + num_accepted / sequences)
        self.costs.record(sequences, computed, self._step_seconds)

    def _idle(self, sequences: int) -> bool:
        """Whether this step, like the one before, had no use of the draft method, and is no news for the costs."""
        costs = self.costs
        return not (self._propose_seconds or self._num_drafted or costs.steps_since_baseline) and (
            sequences in costs.baseline
        )
