"""Sampler: the state of a batch of rows. One call per step samples a token for each; rows can be added and removed."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import BACKENDS
from nucleate.outputs import StepLogprobs
from nucleate.parameters.converters import install_extra
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import noise
from nucleate.sampling.companion import combined_rows, split_combine
from nucleate.sampling.distributions import TargetDistributions, accept_sampled, is_stateful
from nucleate.sampling.history import History, HistoryView
from nucleate.sampling.host_batch import KEPT_STATES, HostBatch, SamplerRow, known, row_path
from nucleate.sampling.incremental_history import HistoryMaker
from nucleate.sampling.inputs import (
    LogitsInput,
    RowId,
    as_row_id,
    check_count,
    check_ids,
    check_shape,
    check_token,
    history,
    masks,
    per_row,
)
from nucleate.sampling.pipeline import (
    Params,
    PreparedPipeline,
    RequestParams,
    as_pipeline,
    prepared,
    seed_of,
    to_fused_pipeline,
)
from nucleate.sampling.pipeline_format import read_row, write_row
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.route import TENSOR_BACKENDS
from nucleate.sampling.stage import Combine, Pipeline, Tap, TextEncoder

if TYPE_CHECKING:
    from nucleate.sampling.gpu.batch_state import DecodeLoop, Forward
    from nucleate.sampling.gpu.device_batch import DeviceBatch


class SamplerOutput(NamedTuple):
    """The result of one step, for R rows in the order of their logits.

    token_ids is a torch tensor if the logits are one or the rows are on a device, otherwise a NumPy array. On a device,
    reading logprobs or errors synchronises with it.
    """

    token_ids: Any  #: int64 [R], NumPy or torch; -1 for a row with an error
    logprobs: Sequence[StepLogprobs | None] | None  #: of the rows that report them; None if no row does
    errors: Mapping[int, str]  #: {position in this call: message}; a row with an error does not advance
    seeds: NDArray[np.uint64]  #: [R], read-only; the seed reproduces the row


_sampled = functools.partial(tuple.__new__, SamplerOutput)
"""Takes half the time of ``SamplerOutput(...)``."""


@with_suggestions
class Sampler:
    """Samples a batch of rows, each with its own pipeline, seed, step and history.

    vocab_size: V, the length of a row of logits. backend: "auto", "reference", "cpu", "torch" or "triton". device:
    "cpu", or a torch device such as "cuda:0". The backends "torch" and "triton" run on the device; with device "cpu",
    "torch" uses tensors on the CPU. defaults: a SamplingParams, for fields that a row's SamplingParams do not set.
    eos_token_ids: of the model, for ``min_tokens``. tokenizer: for text in parameters, such as bad words.
    ``load_sampler`` takes the last three from a model's folder.

    On a GPU, all row state and the sampled tokens stay on the device. A step does not synchronise unless some row runs
    on the CPU (see ``explain``); reading ``token_ids`` with ``tolist`` does. Other synchronising methods say so.
    """

    def __init__(
        self,
        vocab_size: int,
        backend: str = "auto",
        device: str = "cpu",
        *,
        defaults: RequestParams | None = None,
        eos_token_ids: Sequence[int] = (),
        tokenizer: TextEncoder | None = None,
    ) -> None:
        check_count(vocab_size, "vocab_size")
        if defaults is not None and not isinstance(defaults, RequestParams):
            raise ParameterError("defaults", f"defaults must be a SamplingParams, got {defaults!r:.60}")
        if backend not in (names := (*BACKENDS, *TENSOR_BACKENDS)):
            raise ParameterError("backend", f"backend must be one of {', '.join(names)}, got {backend!r:.60}")
        self.backend = backend
        self.vocab_size = int(vocab_size)
        self.defaults, self._tokenizer = defaults, tokenizer
        self._ends = tuple(history(eos_token_ids, self.vocab_size, "eos_token_ids").tolist())
        self._rows: dict[RowId, SamplerRow] = {}
        self._combines: dict[RowId, Combine] = {}
        self._next = 0
        self._histories = HistoryMaker(self.vocab_size)
        self._host = HostBatch(self.vocab_size, "auto" if backend in TENSOR_BACKENDS else backend, self._rows)
        self._device: DeviceBatch | None = None
        self._batch: HostBatch | DeviceBatch = self._host
        if device != "cpu" or backend in TENSOR_BACKENDS:
            if importlib.util.find_spec("torch") is None:
                raise ParameterError("device", f"device {device!r:.60} needs torch: {install_extra('cuda')}")
            from nucleate.sampling.gpu.device_batch import DeviceBatch  # imports torch

            self._batch = self._device = DeviceBatch(self.vocab_size, device, backend, self._rows, self._host)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The EOS ids of the model, as given."""
        return self._ends

    @property
    def rows(self) -> tuple[Any, ...]:
        """The ids of the rows, in the order in which they were added."""
        return tuple(self._rows)

    def add(
        self,
        params: Params | PreparedPipeline | None = None,
        prompt_ids: Sequence[int] = (),
        *,
        output_ids: Sequence[int] = (),
        seed: int | None = None,
        index: int = 0,
        eos_token_ids: Sequence[int] = (),
        row_id: RowId | None = None,
    ) -> Any:
        """Add a row and return its id: ``row_id``, or a number that is not used again.

        params: a SamplingParams or a tuple of stages; None: the sampler's defaults. prompt_ids: the tokens of the
        prompt, for penalties. output_ids: tokens that the row has already generated. seed: overrides the seed in
        params. index: of the output among n; the row's seed is seed + index. eos_token_ids: of the model, for
        ``min_tokens``; by default those of the sampler. row_id: a string or an integer, such as the engine's request
        id. Raises ParameterError for a row_id in use, for token ids outside the vocabulary, for text in parameters
        without a tokenizer, and for fields that need an engine, such as ``stop``.
        """
        pipeline = params if isinstance(params, PreparedPipeline) else self._prepared(params, eos_token_ids)
        given, stages, fused, combine = pipeline
        if params is not pipeline:
            check_ids(stages, self.vocab_size)
        memory = self._histories.new(stages, prompt_ids, output_ids)
        [offset] = per_row(index, 1, "index")
        base_seed = seed_of(params, given) if seed is None else seed
        row_seed = noise.fresh_seed() if base_seed is None else (per_row(base_seed, 1, "seed")[0] + offset) % 2**64
        number = self._new_id(row_id)
        row = SamplerRow(
            stages, memory, row_seed, past=deque(maxlen=KEPT_STATES) if any(map(is_stateful, stages)) else None
        )
        self._batch.add(number, row, fused)
        self._rows[number] = row
        if combine is not None:
            self._combines[number] = combine
        return number

    def _prepared(self, params: Params | None, eos_token_ids: Sequence[int]) -> PreparedPipeline:
        """The pipeline of parameters, with the defaults, EOS ids and tokenizer of this sampler."""
        ends = tuple(history(eos_token_ids, self.vocab_size, "eos_token_ids").tolist())
        given = self.defaults if params is None else params
        if given is None:
            raise ParameterError(
                "params", "params must be a SamplingParams or a tuple of stages: there are no defaults"
            )
        if isinstance(given, RequestParams):
            ends = ends or self._ends
            if self.defaults is not None and params is not None:
                given = given.with_defaults(self.defaults)
            given.check_for_sampler(ends)
            return prepared(given if self._tokenizer is None else given.build_pipeline(ends, self._tokenizer), ends)
        if ends:
            raise ParameterError(
                "eos_token_ids", "eos_token_ids needs SamplingParams; in a pipeline, use MinTokens(n, ids)"
            )
        return prepared(given)

    def _new_id(self, given: RowId | None) -> RowId:
        if given is None:
            number, self._next = self._next, self._next + 1
            return number
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ParameterError("row_id", f"row_id must be a string or an integer, got {given!r:.60}")
        if given in self._rows:
            raise ParameterError("row_id", f"row_id {given!r:.60} is in use: remove that row first")
        if isinstance(given, int):
            self._next = max(self._next, given + 1)
        return given

    def distributions(
        self,
        row: RowId,
        logits_NV: Any,
        tokens: Sequence[int] = (),
        masks: Any = None,
        *,
        parents: Sequence[int] | None = None,
        companion: Any = None,
    ) -> TargetDistributions:
        """The distributions from which a row's next tokens are sampled: now, and after each of N - 1 draft tokens.

        The result has the shape [N, V], float64. The row does not change. logits_NV: float [N, V], NumPy or torch.
        tokens: the draft tokens. masks: a bitmask int32 [W] or None per position. parents: the index of the token that
        each token follows, -1 for the row itself; by default the previous token. companion: [N, V], as in a call. XTC
        is averaged over its random decision. Computed on the CPU. Raises ValueError for logits of another shape.
        """
        own, logits = self._up_to_date(row), LogitsInput(logits_NV)
        if row in self._combines:
            logits = LogitsInput(combined_rows([self._combines[row]] * len(logits), logits_NV, companion))
        if logits.shape != (len(tokens) + 1, self.vocab_size):
            raise ValueError(
                f"logits must have the shape {[len(tokens) + 1, self.vocab_size]}, got {list(logits.shape)}"
            )
        fast = self._host.fast(self.vocab_size)
        return TargetDistributions(
            own.stages, own.memory.prompt, own.memory.output, logits, tokens, masks, parents=parents, fast=fast
        )

    def accept(
        self,
        row: RowId,
        token: int,
        logits_V: Any = None,
        mask_W: Any = None,
        *,
        distribution: NDArray[np.float64] | None = None,
    ) -> StepLogprobs | None:
        """Append a token that this sampler did not sample, and update stateful stages.

        Without logits the token is forced: no other was allowed. With logits_V, float [V], it was sampled elsewhere
        from this row's distribution, under the bitmask mask_W if there is one; the token's logprobs are returned if
        the row reports them. distribution: float64 [V], as ``distributions`` returns it, if it is known; otherwise it
        is computed. On a device, a call with logits synchronises, unless the distribution is given and no stage has a
        state or reports logprobs. Logits of a row with guidance are combined ones. Raises ParameterError for a
        token outside the vocabulary, and ValueError for a token whose probability is 0.
        """
        own = known(self._rows, row)
        check_token(token, self.vocab_size)
        token = int(token)
        if logits_V is None:
            self._batch.push(row, token)
            return None
        is_updated = any(isinstance(stage, Tap) or is_stateful(stage) for stage in own.stages)
        if is_updated or distribution is None:
            own = self._up_to_date(row)
            logits = LogitsInput(logits_V[None] if hasattr(logits_V, "detach") else np.asarray(logits_V)[None])
            if logits.shape[1] != self.vocab_size:
                raise ValueError(f"logits must have the shape {[self.vocab_size]}, got {[logits.shape[1]]}")
            stages = own.stages if mask_W is None else with_mask(own.stages)
            past = History(own.memory.prompt, own.memory.output, mask_W)
            if distribution is None:
                distribution = row_path(self._host.fast(self.vocab_size)).probabilities(logits[0], stages, past)
        if not distribution[token] > 0:
            raise ValueError(f"token {token} cannot be sampled from row {row}: its probability is 0")
        if not is_updated:
            self._batch.push(row, token)
            return None
        result = accept_sampled(logits[0], stages, token, past)
        self._batch.push(row, token, result.stages if stages is own.stages else without_mask(result.stages))
        return result.logprobs

    def remove(self, row: RowId) -> None:
        """Remove a row. The other rows do not change."""
        known(self._rows, row)
        del self._rows[row]
        self._combines.pop(row, None)
        self._batch.remove(row)

    def seed(self, row: RowId) -> int:
        """The seed of a row: the given one, or the one generated when the row was added."""
        return known(self._rows, row).seed

    def stages(self, row: RowId) -> Pipeline:
        """The simplified pipeline of a row for its next step. Synchronises with the device if a stage has a state."""
        own = known(self._rows, row)
        return self._up_to_date(row).stages if any(map(is_stateful, own.stages)) else own.stages

    def output_ids(self, row: RowId) -> tuple[int, ...]:
        """The output tokens of a row so far. Synchronises with the device."""
        return tuple(self._up_to_date(row).memory.output)

    def history(self, row: RowId) -> HistoryView:
        """The tokens of a row so far, as its stages read them. Synchronises with the device."""
        return self._up_to_date(row).memory

    def __call__(
        self, logits_RV: Any, rows: Iterable[RowId] | None = None, *, mask: Any = None, companion: Any = None
    ) -> SamplerOutput:
        """Sample the next token of each row, append it, and update stateful stages.

        logits_RV: float [R, V], NumPy or torch. rows: the ids of the rows, in the order of the logits; by default
        all rows. mask: int32 [R, V / 32], bitmask of the allowed tokens, lowest bit first.
        companion: float [R, V], the logits of the companion sequences; other rows than those with guidance or
        contrastive decoding ignore theirs. Append each sampled token to its companion too. Invalid arguments raise
        ValueError, TypeError or ParameterError, and change no row. Tensors on the sampler's device are not copied: do
        not overwrite the logits before reading ``errors``, whose messages are computed from them.
        """
        requested = None if rows is None else [as_row_id(row) for row in rows]
        if self._combines:
            numbers = self._host.batch(requested).numbers
            logits_RV = combined_rows([self._combines.get(number) for number in numbers], logits_RV, companion)
        return _sampled(self._batch.step(requested, logits_RV, mask))

    def peek(
        self,
        logits_RV: Any,
        rows: Iterable[RowId] | None = None,
        *,
        drafts: Mapping[RowId, Sequence[int]] | None = None,
        mask: Any = None,
        companion: Any = None,
    ) -> SamplerOutput:
        """Sample as in a call, but append nothing: no row changes, and a second call returns the same tokens.

        drafts: draft tokens by row id. A row with N draft tokens has N + 1 rows of logits, one after another: now, and
        after each draft token, as speculative decoding computes them. The token after a draft is sampled as if the
        draft had been appended; a draft of probability 0 does not update stateful stages. Without drafts, the arguments
        logits_RV, rows, mask and companion are those of a call; with them, R counts all rows of logits, and so do
        the positions in ``errors``. Appending the accepted tokens is up to the caller, see ``accept``. Synchronises
        with a device. Raises as a call, and ParameterError for a draft token outside the vocabulary.
        """
        requested = None if rows is None else [as_row_id(row) for row in rows]
        numbers = self._host.batch(requested).numbers
        if not drafts:
            if self._combines:
                logits_RV = combined_rows([self._combines.get(row) for row in numbers], logits_RV, companion)
            return _sampled(self._batch.step(requested, logits_RV, mask, append=False))
        if others := drafts.keys() - {*numbers}:
            raise ParameterError("drafts", f"drafts has row {others.pop()!r:.60}, which is not in this call")
        tokens = {row: history(drafts.get(row, ()), self.vocab_size, "drafts").tolist() for row in numbers}
        repeated = [row for row in numbers for _ in range(len(tokens[row]) + 1)]
        if self._combines:
            logits_RV = combined_rows([self._combines.get(row) for row in repeated], logits_RV, companion)
        return self._peek_drafts(logits_RV, tokens, masks(mask, len(repeated), self.vocab_size))

    def _peek_drafts(self, logits_RV: Any, drafts: Mapping[RowId, list[int]], masks_RW: Sequence[Any]) -> SamplerOutput:
        """``peek`` with drafts, depth by depth: those of a depth are appended for the next one, and taken back."""
        logits, count = LogitsInput(logits_RV), sum(map(len, drafts.values())) + len(drafts)
        check_shape(logits.shape, count, self.vocab_size)
        ids_R, seeds_R = np.full(count, -1, np.int64), np.zeros(count, np.uint64)
        errors: dict[int, str] = {}
        reported: list[StepLogprobs | None] = [None] * count
        starts = dict(zip(drafts, accumulate((len(ids) + 1 for ids in drafts.values()), initial=0), strict=False))
        appended, before = dict.fromkeys(drafts, 0), {row: self._up_to_date(row).stages for row in drafts}
        try:
            for depth in range(max(map(len, drafts.values())) + 1):
                rows = [row for row, ids in drafts.items() if len(ids) >= depth]
                places = [starts[row] + depth for row in rows]
                part_RV = np.stack([logits[place] for place in places])
                mask_RW = None if masks_RW[0] is None else np.stack([masks_RW[place] for place in places])
                out = _sampled(self._batch.step(rows, part_RV, mask_RW, append=False))
                ids_R[places], seeds_R[places] = out.token_ids.tolist(), out.seeds
                errors |= {places[position]: message for position, message in out.errors.items()}
                for place, one in zip(places, out.logprobs or (), strict=False):
                    reported[place] = one
                for row, place in zip(rows, places, strict=True):
                    if depth < len(drafts[row]):
                        self._push_draft(row, drafts[row][depth], logits[place], masks_RW[place])
                        appended[row] += 1
        finally:
            for row, depth in appended.items():
                if depth:
                    self._batch.rollback(row, depth, before[row])
        seeds_R.flags.writeable = False
        logprobs = tuple(reported) if any(one is not None for one in reported) else None
        return SamplerOutput(logits.like(ids_R), logprobs, errors, seeds_R)

    def _push_draft(self, row: RowId, token: int, logits_V: NDArray[np.float32], mask_W: Any) -> None:
        """Append a token as if it had been sampled; one that could not be updates no stage."""
        own = self._rows[row]
        stages = own.stages
        if any(map(is_stateful, stages)):
            own = self._up_to_date(row)
            past, masked = History(own.memory.prompt, own.memory.output, mask_W), mask_W is not None
            with contextlib.suppress(ValueError):  # its probability is 0, or the row is invalid
                stages = accept_sampled(logits_V, with_mask(own.stages) if masked else own.stages, token, past).stages
                stages = without_mask(stages) if masked else stages
        self._batch.push(row, token, stages)

    def rollback(self, row: RowId, count: int) -> None:
        """Take back the last ``count`` output tokens of a row, such as rejected drafts, as if they had not been there.

        The next call samples at that position again, with the same noise. Stateful stages (mirostat, adaptive-p) return
        to their state before these tokens. Synchronises with a device. Raises ParameterError if the row has fewer
        output tokens; for a row with stateful stages, also if it runs on a device, was added with these tokens, or for
        more than 1,024 tokens.
        """
        own = self._up_to_date(row)
        stateful = any(map(is_stateful, own.stages))
        most = len(own.memory.output) if not stateful else len(own.past or ())
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= most:
            which = "the tokens whose state is kept, since the row was added" if stateful else "its output tokens"
            message = f"count must be an integer from 0 to {most} for row {row!r:.60}: {which}; got {count!r:.60}"
            raise ParameterError("count", message)
        if count:
            self._batch.rollback(row, int(count), own.past[-count] if own.past is not None else own.stages)

    def save(self, row: RowId) -> bytes:
        """The state of a row as bytes, for ``restore`` in this or another process: stages, seed and tokens.

        The bytes are JSON, without the row's id. Synchronises with a device. Raises ParameterError for stages that are
        not registered, and for watermark keys, which are secret.
        """
        own, combine = self._up_to_date(row), self._combines.get(row)
        stages = own.stages if combine is None else (combine, *own.stages)
        return write_row(self.vocab_size, stages, own.seed, own.memory.prompt, own.memory.output)

    def restore(self, data: bytes, row_id: RowId | None = None) -> Any:
        """Add a row from the bytes of ``save`` and return its id, see ``add``. It continues with the same tokens.

        data: from ``save``. row_id: of the new row. Raises ParameterError for other bytes, for another vocabulary size,
        and for a row_id in use. Tokens from before are kept, but ``rollback`` cannot take them back from a row with
        stateful stages.
        """
        stages, seed, prompt, output = read_row(data, self.vocab_size)
        combine, others = split_combine(as_pipeline(stages))
        pipeline = PreparedPipeline(stages, others, to_fused_pipeline(others), combine)
        check_ids(others, self.vocab_size)
        return self.add(pipeline, prompt, output_ids=output, seed=seed, row_id=row_id)

    def loop(
        self,
        forward: Forward,
        first_ids: Sequence[int],
        rows: Iterable[RowId] | None = None,
        *,
        steps: int,
        stop_ids: Sequence[int] = (),
    ) -> DecodeLoop:
        """Generate up to ``steps`` tokens per row in a loop on the device, without synchronising; see ``DecodeLoop``.

        forward(token_ids [R], active [R]) returns logits [R, V]. first_ids: the token ids of its first call, the last
        token of each prompt. stop_ids: token ids that end a row. On CUDA the loop is captured as one graph. Raises
        ParameterError for rows that run on the CPU or report logprobs.
        """
        numbers = list(self._rows) if rows is None else [as_row_id(row) for row in rows]
        for number in numbers:
            known(self._rows, number)
        if self._device is None:
            raise ParameterError("device", "a loop runs on a device: Sampler(vocab_size, device=...)")
        return self._device.loop(numbers, forward, first_ids, steps, stop_ids)

    def _up_to_date(self, row: RowId) -> SamplerRow:
        """A row whose history and state on the host are complete. Synchronises with the device."""
        own = known(self._rows, row)
        self._batch.synchronise()
        return own
