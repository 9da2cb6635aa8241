"""Companion sequences: the second row of logits of requests with guidance or contrastive decoding.

A companion has the same output as its sequence, after another prompt or on the companion model. Its tokens are
scheduled, cached and computed like those of any sequence. After the forward pass its logits are combined with those of
its sequence; sampling, grammars and draft verification see combined logits only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from nucleate.engine.kv_cache import COMPANION_START, START
from nucleate.engine.scheduler import ScheduledSequence, SchedulerEntry
from nucleate.models.protocol import ModelError, ModelLimits
from nucleate.models.runner import Runner
from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.companion import combine, field_of
from nucleate.sampling.stage import Combine
from nucleate.stopping.stop_matcher import StopRules


class Companion(NamedTuple):
    """What the sequences of a request need for their companions."""

    stage: Combine
    prompt_ids: Sequence[int]


def admit_companion(
    stage: Combine, prompt_ids: Sequence[int], rules: StopRules, model: ModelLimits, other: ModelLimits | None
) -> tuple[Companion, StopRules]:
    """Validate the companion of a request. other: the companion model. Raises ParameterError.

    Returns the stop rules with a ``max_tokens`` that fits the context of the companion.
    """
    limits = other if stage.companion_model else model
    if limits is None:
        field = field_of(stage)
        how = "LLM(companion_model=...) or --companion-model"
        raise ParameterError(field, f"{field} needs a companion model, given with {how}")
    ids, name = tuple(stage.companion_prompt(prompt_ids)), stage.prompt_field
    room = limits.context_length - len(ids)
    if not ids:
        raise ParameterError(name, f"{name} has no token; it must have at least one")
    if not all(0 <= token < limits.vocab_size for token in ids):
        raise ParameterError(name, f"{name} holds token ids outside the vocabulary (0..{limits.vocab_size - 1})")
    if room < max(1, rules.min_tokens):
        what = "companion model's context" if stage.companion_model else "context"
        message = f"{name} has {len(ids)} tokens, but the {what} holds {limits.context_length}, output included"
        raise ParameterError(name, message)
    return Companion(stage, ids), _with_room(rules, room)


def fit_blocks(companion: Companion, prompt_ids: Sequence[int], rules: StopRules, blocks: int, size: int) -> StopRules:
    """Limit ``max_tokens`` so that the KV cache holds a sequence with its companion. Raises ParameterError."""
    lengths = len(prompt_ids), len(companion.prompt_ids)
    room = (blocks * size - sum(lengths)) // 2
    while room > 0 and sum(-(-(length + room) // size) for length in lengths) > blocks:
        room -= 1
    if room < max(1, rules.min_tokens):
        name = companion.stage.prompt_field
        held = f"the KV cache holds {blocks * size} tokens, outputs included"
        raise ParameterError(name, f"the prompt and that of its companion have {sum(lengths)} tokens, but {held}")
    return _with_room(rules, room)


def _with_room(rules: StopRules, room: int) -> StopRules:
    max_tokens = room if rules.max_tokens is None else min(rules.max_tokens, room)
    return rules if max_tokens == rules.max_tokens else replace(rules, max_tokens=max_tokens)


def add_companion(owner: Any, companion: Companion, output_ids: Sequence[int], key: int) -> None:
    """Give a sequence that has not started its companion. key: unique, as that of the sequence."""
    ids = (*companion.prompt_ids, *output_ids)
    max_length = len(ids) + owner.max_length - len(owner.token_ids)
    priority, arrival, index = owner.order
    owner.companion = SchedulerEntry(
        (priority, arrival, index + 1),
        ids,
        max_length,
        key=key,
        paused=owner.paused,
        root=COMPANION_START if companion.stage.companion_model else START,
        owner=owner,
    )


class Companions:
    """The companions of one engine.

    other: the runner of the companion model, if there is one. ``num_blocks``: the blocks that both models have. A block
    is used by a sequence of either model. ``chunks_prompts``: whether both can compute a prompt in chunks.
    ``copies_blocks``: whether both can copy blocks.
    """

    def __init__(self, runner: Runner, other: Runner | None, max_num_seqs: int) -> None:
        self._runner, self._other, self._max_num_seqs = runner, other, max_num_seqs
        self.runners = [runner] if other is None else [runner, other]
        self.num_blocks = min([each.blocks for each in self.runners])
        self.copies_blocks = all(getattr(each, "copies_blocks", False) for each in self.runners)
        self.chunks_prompts = all(each.paged or getattr(each, "saves_states", False) for each in self.runners)
        if other is not None and other.vocab_size != runner.vocab_size:
            sizes = f"it has {other.vocab_size} tokens, the model {runner.vocab_size}"
            raise ModelError(f"the companion model needs the vocabulary of the model: {sizes}")
        if other is not None and other.block_size != runner.block_size:
            sizes = f"it has blocks of {other.block_size} tokens, the model {runner.block_size}"
            raise ModelError(f"the companion model needs the block size of the model: {sizes}")

    def admit(
        self, stage: Combine, prompt_ids: Sequence[int], rules: StopRules, model: ModelLimits
    ) -> tuple[Companion, StopRules]:
        """Validate the companion of a request, also against the size of the engine. Raises ParameterError."""
        if self._max_num_seqs < 2:
            field = field_of(stage)
            raise ParameterError(field, f"{field} runs two sequences at a time, but max_num_seqs is 1")
        companion, rules = admit_companion(stage, prompt_ids, rules, model, self._other)
        return companion, fit_blocks(companion, prompt_ids, rules, self.num_blocks, self._runner.block_size)

    def prepare(self, preempted: Sequence[SchedulerEntry], copies: Sequence[tuple[int, int]]) -> None:
        """Tell the runners what changed, see ``Scheduler.take_changes``, before a forward pass.

        Blocks are copied in both models: each is used by a sequence of one of them.
        """
        for entry in preempted:
            if (runner := self.runner_of(entry)).paged:  # another one keeps its state
                runner.forget(entry.key)
        if copies:
            for each in self.runners:
                each.copy_blocks(copies)

    def runner_of(self, sequence: SchedulerEntry) -> Runner:
        """The runner that computes a sequence."""
        return self.runners[sequence.root == COMPANION_START]

    def forward(
        self, scheduled: list[ScheduledSequence], compute: Callable[[Runner, list[ScheduledSequence]], Any]
    ) -> tuple[Any, list[tuple[Any, str]]]:
        """The logits of both models, where those of sequences with a companion are combined with its logits.

        compute: runs one model. Also returns the sequences whose stage failed, with the error.
        """
        on_other = [one for one in scheduled if one.sequence.root == COMPANION_START]
        other_LV: Any = compute(self.runners[1], on_other) if on_other else None
        own = [one for one in scheduled if one.sequence.root != COMPANION_START] if on_other else scheduled
        logits_LV = compute(self._runner, own)
        # a copy of a tensor; whole rows, where they are sharded
        logits_LV = logits_LV.clone() if hasattr(logits_LV, "detach") else np.require(logits_LV, requirements="W")
        if other_LV is not None and hasattr(logits_LV, "detach") != hasattr(other_LV, "detach"):
            other_LV = logits_LV.new_tensor(other_LV) if hasattr(logits_LV, "detach") else other_LV.cpu().numpy()
        failures = []
        for one in own:
            other = one.companion
            if other is None:
                continue
            others_LV = other_LV if other.sequence.root == COMPANION_START else logits_LV
            stage = one.sequence.running.companion.stage
            try:
                for step in range(1 + len(one.draft)):
                    row = one.logits_row + step
                    logits_LV[row] = combine(stage, logits_LV[row], others_LV[other.logits_row + step])
            except Exception as error:  # noqa: BLE001  # a user-defined stage may raise anything
                failures.append((one.sequence, f"{type(error).__name__}: {one_line(error)}"))
        return logits_LV, failures
