"""Samples the next token of every ready sequence in one call, applies grammars, and turns tokens into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.chat.reasoning import ReasoningTracker
from nucleate.engine.request import RecordedStep, SamplingInputs, copied_row
from nucleate.engine.running_request import RunningSequence, SequenceLifecycle
from nucleate.engine.scheduler import NO_ROW
from nucleate.outputs import EngineOutput, StepLogprobs
from nucleate.sampling.sampler import Sampler
from nucleate.structured_output import Guide, error_message
from nucleate.structured_output.compiler import GrammarManager


class TokenSampler:
    """Samples tokens for an engine.

    deferred: text is made only by ``flush``, so that it can overlap with the next forward pass; otherwise also as soon
    as a draft is verified. lifecycle: starts, finishes and fails sequences.
    """

    def __init__(
        self, sampler: Sampler, grammars: GrammarManager, lifecycle: SequenceLifecycle, *, deferred: bool
    ) -> None:
        self._sampler, self._grammars, self._lifecycle, self.deferred = sampler, grammars, lifecycle, deferred
        self._pending: list[_Pending] = []  # tokens whose text is not made yet
        self.sampled_tokens = 0
        self.jump_forward_tokens = 0
        self.seconds = 0.0

    @property
    def idle(self) -> bool:
        """Whether all text has been made."""
        return not self._pending

    def sample(
        self, sequences: list[RunningSequence], rows: list[int], logits_LV: Any, outputs: list[EngineOutput]
    ) -> list[int]:
        """Sample a token for each sequence from its row of the logits; -1 for those that fail."""
        if not sequences:
            return []
        if len(rows) == len(logits_LV):
            logits_RV = logits_LV
        else:  # the rows of companions come last: a slice copies nothing
            logits_RV = logits_LV[: len(rows)] if rows == [*range(len(rows))] else logits_LV[rows]
        guides = [sequence.processor.guide for sequence in sequences]
        mask = self._grammars.mask(guides) if any(guides) else None
        trackers = [sequence.processor.reasoning for sequence in sequences]
        if any(trackers):
            mask = _force_tokens(mask, trackers, logits_RV.shape[1])
        slots = [each.row if each.row != NO_ROW else self._new_row(each) for each in sequences]
        recorded = self._recorded(sequences, logits_RV, mask) if any(one.recorder for one in sequences) else {}
        begin = perf_counter()
        out = self._sampler(logits_RV, slots, mask=mask)
        self.seconds += perf_counter() - begin
        logprobs = out.logprobs or (None,) * len(sequences)
        tokens: list[int] = out.token_ids.tolist()
        for place, (sequence, guide, token) in enumerate(zip(sequences, guides, tokens, strict=True)):
            if place in recorded:
                _record(sequence, recorded[place], token)
            if token < 0:
                outputs += self.fail(sequence, out.errors[place])
            elif guide is None:
                sequence.append(token)
                if trackers[place] is not None:
                    _track(sequence, token)
                self._pending.append((sequence, token, logprobs[place], False))
            else:
                self._append_guided(sequence, guide, token, logprobs[place])
        self.sampled_tokens += sum(token >= 0 for token in tokens)  # reading out.errors would wait for the device again
        return tokens

    def _recorded(self, sequences: list[RunningSequence], logits_RV: Any, mask: Any) -> dict[int, RecordedStep]:
        """What the sequences with a recorder sample from, by place."""
        return {
            place: self._step(sequence, copied_row(logits_RV, place), None if mask is None else mask[place])
            for place, sequence in enumerate(sequences)
            if sequence.recorder is not None
        }

    def _step(self, sequence: RunningSequence, logits_V: Any, mask_W: Any) -> RecordedStep:
        mask_W = None if sequence.processor.guide is None or mask_W is None else np.array(mask_W)
        inputs = SamplingInputs(logits_V, self._sampler.stages(sequence.row), mask_W)
        return RecordedStep(sequence.processor.index, sequence.num_output, -1, "sampled", inputs)

    def accept(
        self, sequence: RunningSequence, token: int, logprobs: StepLogprobs | None, logits_V: Any, mask_W: Any
    ) -> None:
        """Append a token that draft verification chose. logits_V, mask_W: from which, for a recorder."""
        guide = sequence.processor.guide
        if sequence.recorder is not None:
            _record(sequence, self._step(sequence, copied_row(logits_V[None], 0), mask_W), token)
        if guide is None:
            sequence.append(token)
            _track(sequence, token)
            self._pending.append((sequence, token, logprobs, False))
        else:
            self._append_guided(sequence, guide, token, logprobs)
        self.sampled_tokens += 1

    def fail(self, sequence: RunningSequence, error: str) -> list[EngineOutput]:
        """End a sequence for which no token can be sampled: its last outputs."""
        return self._lifecycle.fail(sequence, error_message(error, sequence.processor.guide))

    def _append_guided(
        self, sequence: RunningSequence, guide: Guide, token: int, logprobs: StepLogprobs | None
    ) -> None:
        """Append a token, and the tokens that the grammar forces after it (jump-forward)."""
        sequence.append(token)
        _track(sequence, token)
        sequence.grammar_complete = guide.accept_token(token)
        self._pending.append((sequence, token, logprobs, sequence.grammar_complete))
        if sequence.grammar_complete or not sequence.running.jump_forward:
            return
        for forced in guide.jump_forward_tokens():
            if sequence.idle or _is_forced(sequence):
                break
            if sequence.recorder is not None:
                step = RecordedStep(sequence.processor.index, sequence.num_output, forced, "forced")
                sequence.recorder.record(step)
            sequence.append(forced)
            _track(sequence, forced)
            self._sampler.accept(sequence.row, forced)
            sequence.grammar_complete = guide.accept_token(forced)
            self._pending.append((sequence, forced, None, sequence.grammar_complete))
            self.jump_forward_tokens += 1

    def _new_row(self, sequence: RunningSequence) -> int:
        """Add a sequence to the sampler, with its first token."""
        running, processor = sequence.running, sequence.processor
        prompt_ids, output_ids = running.request.prompt_ids, running.request.output_ids
        sequence.row = self._sampler.add(running.pipeline, prompt_ids, output_ids=output_ids, seed=processor.seed)
        for position, token in enumerate(output_ids):
            if sequence.recorder is not None:
                sequence.recorder.record(RecordedStep(processor.index, position, token, "given"))
            self._pending.append((sequence, token, None, False))
        self._lifecycle.start_siblings(running)
        return sequence.row

    def flush(self, only: Any = None) -> list[EngineOutput]:
        """Make the outputs of all new tokens, or of those of one sequence."""
        pending, self._pending = self._pending, []
        outputs = []
        for item in pending:
            sequence, token, logprobs, complete = item
            if sequence.finished:
                continue
            if only is not None and sequence is not only:
                self._pending.append(item)
                continue
            chunk = sequence.processor.push(token, logprobs, complete=complete)
            outputs.append(sequence.running.output(chunk))
            if chunk.finish_reason is not None:
                self._lifecycle.finish(sequence)
        return outputs


def _force_tokens(
    mask_RW: Any, trackers: Sequence[ReasoningTracker | None], vocab_size: int
) -> NDArray[np.int32] | None:
    """Allow only the next token of an end marker in the rows whose reasoning section has reached its limit."""
    forced = {row: tracker.forced_token for row, tracker in enumerate(trackers) if tracker is not None}
    for row, token in forced.items():
        if token is not None:
            if mask_RW is None:
                mask_RW = np.full((len(trackers), (vocab_size + 31) // 32), -1, np.int32)
            only_W = np.zeros(mask_RW.shape[1], np.uint32)
            only_W[token // 32] = 1 << token % 32
            mask_RW[row] &= only_W.view(np.int32)
    return mask_RW  # type: ignore[no-any-return]


def _track(sequence: RunningSequence, token: int) -> None:
    """Count a new token of a sequence, if its reasoning section is limited."""
    if sequence.processor.reasoning is not None:
        sequence.processor.reasoning.push(token)


def _is_forced(sequence: RunningSequence) -> bool:
    """Whether the next token is part of an end marker."""
    return sequence.processor.reasoning is not None and sequence.processor.reasoning.forced_token is not None


def _record(sequence: RunningSequence, step: RecordedStep, token: int) -> None:
    if sequence.recorder is not None:
        sequence.recorder.record(step._replace(token_id=token))


_Pending = tuple[RunningSequence, int, StepLogprobs | None, bool]  # whether the grammar is complete


class StepSampler:
    """The token sampler with the logits and outputs of one step, for draft verification.

    Text is made after every token (unless deferred), so that a stop criterion within a draft is found at once.
    """

    def __init__(self, sampler: TokenSampler, logits_LV: Any, outputs: list[EngineOutput]) -> None:
        self._sampler, self.logits, self._outputs = sampler, logits_LV, outputs

    def sample(self, sequences: list[RunningSequence], rows: list[int]) -> Sequence[int]:
        """See ``TokenSampler.sample``."""
        tokens = self._sampler.sample(sequences, rows, self.logits, self._outputs)
        self._flush()
        return tokens

    def accept(
        self, sequence: RunningSequence, token: int, logprobs: StepLogprobs | None, logits_V: Any, mask_W: Any
    ) -> None:
        """See ``TokenSampler.accept``."""
        self._sampler.accept(sequence, token, logprobs, logits_V, mask_W)
        self._flush()

    def fail(self, sequence: RunningSequence, error: str) -> None:
        """End a sequence for which no token can be sampled."""
        self._outputs += self._sampler.fail(sequence, error)

    def _flush(self) -> None:
        if not self._sampler.deferred:
            self._outputs += self._sampler.flush()
