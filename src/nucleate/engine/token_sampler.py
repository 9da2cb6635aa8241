"""Samples the next token of every ready sequence in one call, applies grammars, and turns tokens into outputs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.request import RecordedStep, SamplingInputs, StepRecorder, copied_row
from nucleate.engine.running_request import RunningSequence
from nucleate.engine.scheduler import ScheduledSequence
from nucleate.outputs import EngineOutput, Finish, StepLogprobs
from nucleate.sampling.sampler import Sampler
from nucleate.structured_output import error_message
from nucleate.structured_output.compiler import GrammarManager


class TokenSampler:
    """Samples tokens for an engine, and collects the outputs of a step.

    deferred: text is made only by ``flush``, so that it can overlap with the next forward pass; otherwise as soon as
    tokens are sampled. release: frees what a finished sequence holds.
    """

    def __init__(
        self, sampler: Sampler, grammars: GrammarManager, release: Callable[[RunningSequence], None], *, deferred: bool
    ) -> None:
        self._sampler, self._grammars, self._release, self._deferred = sampler, grammars, release, deferred
        self._pending: list[_Pending] = []  # tokens whose text is not made yet
        self.outputs: list[EngineOutput] = []  #: since ``take_outputs``
        self.sampled_tokens = self.jump_forward_tokens = 0
        self.seconds = 0.0

    def start(self, sequence: RunningSequence) -> None:
        """Give a sequence its row of the sampler, before its first token."""
        running, processor = sequence.running, sequence.processor
        prompt_ids, output_ids = running.request.prompt_ids, running.request.output_ids
        sequence.row = self._sampler.add(running.pipeline, prompt_ids, output_ids=output_ids, seed=processor.seed)
        for position, token in enumerate(output_ids):
            if sequence.recorder is not None:
                sequence.recorder.record(RecordedStep(processor.index, position, token, "given"))
            self._pending.append((sequence, token, None, False))

    def sample(self, sequences: list[RunningSequence], rows: list[int], logits_LV: Any) -> list[int]:
        """Sample a token for each sequence from its row of the logits; -1 for those that fail."""
        if not sequences:
            return []
        if len(rows) == len(logits_LV):
            logits_RV = logits_LV
        else:  # the rows of companions come last: a slice copies nothing
            logits_RV = logits_LV[: len(rows)] if rows == [*range(len(rows))] else logits_LV[rows]
        constrained = [sequence for sequence in sequences if sequence.processor.constrained]
        mask = self._mask(sequences, logits_RV.shape[1]) if constrained else None
        recorded = [sequence for sequence in sequences if sequence.recorder is not None]
        steps = self._steps(sequences, logits_RV, mask) if recorded else []
        begin = perf_counter()
        out = self._sampler(logits_RV, [sequence.row for sequence in sequences], mask=mask)
        self.seconds += perf_counter() - begin
        logprobs = out.logprobs or (None,) * len(sequences)
        tokens: list[int] = out.token_ids.tolist()
        for place, recorder, step in steps:
            recorder.record(step._replace(token_id=tokens[place]))
        for place, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if token < 0:
                self.fail(sequence, error_message(out.errors[place], sequence.processor.guide))
            elif sequence.processor.constrained:
                self._append_constrained(sequence, token, logprobs[place])
            else:
                sequence.append(token)
                self._pending.append((sequence, token, logprobs[place], False))
        self.sampled_tokens += sum([token >= 0 for token in tokens])  # reading out.errors would wait for the device
        if not self._deferred:
            self.flush()
        return tokens

    def accept(
        self, sequence: RunningSequence, token: int, logprobs: StepLogprobs | None, logits_V: Any, mask_W: Any
    ) -> None:
        """Append a token that draft verification chose. logits_V, mask_W: from which, for a recorder."""
        if sequence.recorder is not None:
            step = self._step(sequence, copied_row(logits_V[None], 0), mask_W)
            sequence.recorder.record(step._replace(token_id=token))
        self._append_constrained(sequence, token, logprobs)
        self.sampled_tokens += 1
        if not self._deferred:
            self.flush()

    def fail(self, sequence: RunningSequence, message: str) -> None:
        """End a sequence that cannot continue, after the text of its tokens. message: the stop reason."""
        self.flush(sequence)
        if not sequence.finished:
            self.outputs.append(self.end(sequence, Finish("error", message)))

    def end(self, sequence: RunningSequence, finish: Finish) -> EngineOutput:
        """End a sequence without a further token."""
        self._release(sequence)
        return sequence.running.output(sequence.processor.end(finish))

    def flush(self, only: RunningSequence | None = None) -> None:
        """Make the text of all new tokens, or of those of one sequence."""
        pending, self._pending = self._pending, []
        for item in pending:
            sequence, token, logprobs, complete = item
            if sequence.finished:
                continue
            if only is not None and sequence is not only:
                self._pending.append(item)
                continue
            chunk = sequence.processor.push(token, logprobs, complete=complete)
            self.outputs.append(sequence.running.output(chunk))
            if chunk.finish_reason is not None:
                self._release(sequence)

    def take_outputs(self) -> list[EngineOutput]:
        """The outputs since the last call."""
        outputs, self.outputs = self.outputs, []
        return outputs

    def prefetch_masks(self, scheduled: list[ScheduledSequence]) -> None:
        """Fill slow masks on another thread, during the forward pass."""
        if self._grammars.is_slow:
            ends = [one.sequence for one in scheduled if one.last and isinstance(one.sequence, RunningSequence)]
            self._grammars.prefetch([sequence.processor.guide for sequence in ends])

    def _mask(self, sequences: list[RunningSequence], vocab_size: int) -> NDArray[np.int32] | None:
        """The tokens that the grammars and the limits of reasoning sections allow: a bitmask per row."""
        mask_RW = self._grammars.mask([sequence.processor.guide for sequence in sequences])
        for row, sequence in enumerate(sequences):
            token = sequence.forced_token
            if token is not None:
                if mask_RW is None:
                    mask_RW = np.full((len(sequences), (vocab_size + 31) // 32), -1, np.int32)
                only_W = np.zeros(mask_RW.shape[1], np.uint32)
                only_W[token // 32] = 1 << token % 32
                mask_RW[row] &= only_W.view(np.int32)
        return mask_RW

    def _steps(
        self, sequences: list[RunningSequence], logits_RV: Any, mask_RW: Any
    ) -> list[tuple[int, StepRecorder, RecordedStep]]:
        """The rows of sequences with a recorder, and what these sample from."""
        return [
            (row, one.recorder, self._step(one, copied_row(logits_RV, row), None if mask_RW is None else mask_RW[row]))
            for row, one in enumerate(sequences)
            if one.recorder is not None
        ]

    def _step(self, sequence: RunningSequence, logits_V: Any, mask_W: Any) -> RecordedStep:
        mask_W = None if sequence.processor.guide is None or mask_W is None else np.array(mask_W)
        inputs = SamplingInputs(logits_V, self._sampler.stages(sequence.row), mask_W)
        return RecordedStep(sequence.processor.index, sequence.num_output, -1, "sampled", inputs)

    def _append_constrained(self, sequence: RunningSequence, token: int, logprobs: StepLogprobs | None) -> None:
        """Append a token, and the tokens that the grammar forces after it (jump-forward)."""
        self._append(sequence, token, logprobs)
        guide = sequence.processor.guide
        if guide is None or sequence.grammar_complete or not sequence.running.jump_forward:
            return
        for forced in guide.jump_forward_tokens():
            if sequence.idle or sequence.forced_token is not None:
                break
            if sequence.recorder is not None:
                step = RecordedStep(sequence.processor.index, sequence.num_output, forced, "forced")
                sequence.recorder.record(step)
            self._sampler.accept(sequence.row, forced)
            self._append(sequence, forced, None)
            self.jump_forward_tokens += 1

    def _append(self, sequence: RunningSequence, token: int, logprobs: StepLogprobs | None) -> None:
        guide, reasoning = sequence.processor.guide, sequence.processor.reasoning
        sequence.append(token)
        if reasoning is not None:
            reasoning.push(token)
        if guide is not None:
            sequence.grammar_complete = guide.accept_token(token)
        self._pending.append((sequence, token, logprobs, sequence.grammar_complete))


_Pending = tuple[RunningSequence, int, StepLogprobs | None, bool]  # whether the grammar is complete
