"""The rows of a sampler on a device: add, sample, append a token, remove; several steps without the host.

Sampled tokens and the state of stages stay on the device until ``BatchState.synchronise`` copies them to the host. A
``DecodeLoop`` runs steps of forward pass and sampling; on CUDA as one captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.gpu.batch_sampling import StepInput, TensorBatch, run, to_scores, updated_params
from nucleate.sampling.gpu.batch_view import (
    BatchView,
    DeviceRow,
    LogprobsRequest,
    RowGroup,
    TensorLogprobs,
    compute_logprobs,
    make_view,
)
from nucleate.sampling.gpu.ranked_tokens import bind_stages
from nucleate.sampling.gpu.tensor_shifts import apply_shifts, tokens_since_breaker, update_repeats
from nucleate.sampling.gpu.torch_device import (
    STEP,
    Slots,
    capture_graph,
    device_guard,
    float_dtype,
    pack_row_state,
    to_device,
)
from nucleate.sampling.inputs import RowId, packed_ids
from nucleate.sampling.signature import DeviceRowSpec, PipelineSignature

NO_TOKEN = -1
"""The token id of a row that cannot be sampled."""

MIN_RING_SIZE = 1 << 13
"""The minimum number of last tokens per row on the device. They are copied to the host before they are overwritten."""

SampleInput = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""(logits_RV, mask_RW, active_R), see ``BatchState.sample``."""


class LogprobsReport(NamedTuple):
    """Logprobs of some rows of a call: raw ones, or those of Taps after the Shifts."""

    positions: Sequence[int]  #: of the rows in the call
    logprobs: TensorLogprobs
    requests: list[LogprobsRequest]


class BatchState:
    """The rows on a device, by the row numbers of ``Sampler``.

    size: V. kernels: "triton" or "torch". on_tokens(number, tokens): called by ``synchronise`` for each row with new
    tokens, in order. on_state(number, params): called after that for each row with stateful stages, with the current
    numeric parameters of its stages.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        kernels: str,
        on_tokens: Callable[[RowId, list[int]], None],
        on_state: Callable[[RowId, list[float]], None] | None = None,
    ) -> None:
        self.size, self.device, self.kernels = size, device, kernels
        self.floats = float_dtype(device)
        self._on_tokens, self._on_state = on_tokens, on_state
        self._zero_1 = torch.zeros(1, dtype=self.floats, device=device)
        self._slots = Slots(device, self.floats, MIN_RING_SIZE)
        self._rows: dict[RowId, DeviceRow] = {}
        self._unsynced = 0  # upper bound on the tokens of a row that the host does not have yet
        self._workspace: Any = None  # a TritonWorkspace
        self._reallocations = 0

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    @property
    def reallocations(self) -> int:
        """The number of buffer reallocations. When it changes, CUDA graphs must be captured again."""
        return self._slots.reallocations + self._reallocations

    def add(self, number: RowId, row: DeviceRowSpec, seed: int, prompt: list[int], output: list[int]) -> None:
        """Add a row. seed: 0..2**64 - 1."""
        tokens = prompt + output
        self._slots.ensure_ring_size(int(min(len(tokens), row.history_length)) + 1)
        since_breaker = tokens_since_breaker(row.shifts, tokens)
        state = pack_row_state(row.params, self.floats, seed, len(prompt), len(output), since_breaker)
        needed, tracks_repeats = tokens if row.history_length else [], any(one.tracks_repeats for one in row.shifts)
        slot = self._slots.add(state, needed, len(tokens), tracks_repeats=tracks_repeats)
        if row.signature is not None and row.signature.stateful:
            self._slots.set_stage_params(slot, row.signature.params)
        allowed_mask_W = None if row.allowed_ids is None else packed_ids([*row.allowed_ids], self.size)
        self._rows[number] = DeviceRow(slot, row, len(prompt), len(output), allowed_mask_W)

    def remove(self, number: RowId) -> None:
        """Remove a row. The other rows keep their slots."""
        self._slots.release(self._rows.pop(number).slot)

    def reports(self, number: RowId) -> bool:
        """Whether a row reports logprobs."""
        row = self._rows[number].spec
        return row.request is not None or (row.signature is not None and row.signature.request is not None)

    def signature(self, number: RowId) -> PipelineSignature | None:
        """The signature of a row that is not a fused pipeline, otherwise None."""
        return self._rows[number].spec.signature

    def view(self, numbers: Sequence[RowId]) -> BatchView:
        """Prepare calls with these rows, in this order."""
        rows = [self._rows[number] for number in numbers]
        return make_view(numbers, rows, self._slots, self.size, use_triton=self.kernels == "triton")

    def reserve(self, view: BatchView, count: int) -> None:
        """Reserve space for ``count`` more tokens per row. It may synchronise, so that ``sample`` never does."""
        if max(count + self._unsynced, self._history_length(view, count)) >= self._slots.ring_size:
            self.synchronise()
        self._unsynced += count
        self._slots.ensure_ring_size(self._history_length(view, 0) + 1)

    def _history_length(self, view: BatchView, count: int) -> int:
        """The most last tokens that a row of the view reads after ``count`` more tokens."""
        more = self._unsynced + count
        lengths = (min(row.prompt_length + row.host_output_length + more, row.spec.history_length) for row in view.rows)
        return int(max(lengths, default=0))

    def sample(
        self,
        view: BatchView,
        logits_RV: torch.Tensor,
        mask_RW: torch.Tensor | None = None,
        active_R: torch.Tensor | None = None,
        reports: list[LogprobsReport] | None = None,
    ) -> torch.Tensor:
        """Sample a token per row and append it: int64 [R], -1 for rows that cannot be sampled. Call ``reserve`` before.

        logits_RV: any float type. mask_RW: int32, bitmask of allowed tokens. active_R: bool; the other rows do not
        advance and get -1. reports: a list to which the logprobs of the rows that report them are appended.
        """
        inputs = logits_RV, mask_RW, active_R
        with device_guard(self.device):
            if len(view.groups) == 1:
                tokens_R = self._sample_group(view.groups[0], inputs, reports)
            else:
                tokens_R = torch.full_like(view.slots_R, NO_TOKEN)
                for group in view.groups:
                    some = (None if one is None else one.index_select(0, group.positions_N) for one in inputs)
                    tokens_R.index_copy_(0, group.positions_N, self._sample_group(group, tuple(some), reports))
            if reports is not None and view.reporting:
                logprobs = self._raw_logprobs(view, logits_RV, tokens_R)
                reports.append(LogprobsReport(view.reporting, logprobs, view.requests))
        return tokens_R

    def _sample_group(self, group: RowGroup, inputs: Any, reports: list[LogprobsReport] | None) -> torch.Tensor:
        """Sample a group and append the tokens."""
        if group.batch is None:
            tokens_R = self._sample_triton(group, *inputs)
        else:
            tokens_R = self._sample_tensors(group, group.batch, inputs, reports)
        self._update_repeats(group, tokens_R)
        return tokens_R

    def _update_repeats(self, group: RowGroup, tokens_R: torch.Tensor) -> None:
        for shifts in group.shift_groups:
            if shifts.tracks_repeats:
                tokens_N = tokens_R if shifts.positions_N is None else tokens_R.index_select(0, shifts.positions_N)
                update_repeats(shifts, self._slots, tokens_N, self.size)

    def _sample_tensors(
        self, group: RowGroup, batch: TensorBatch, inputs: SampleInput, reports: list[LogprobsReport] | None
    ) -> torch.Tensor:
        """Sample a group with tensor code."""
        (logits_RV, mask_RW, active_R), steps_R = inputs, self._slots.gather_column(group.slots_R, STEP)
        masks = _combine_masks(mask_RW, group.allowed_RW), None
        if batch.signatures[0].shape == "Tap" and not batch.mask_before_tap:  # the Tap reports unmasked scores
            masks = group.allowed_RW, mask_RW
        params_RP = self._slots.stage_params_SP.index_select(0, group.slots_R) if batch.stateful else None
        x_RV = self._apply_shifts(group, to_scores(logits_RV, self._zero_1))
        tokens_R, updated_RP, tapped_RV = run(batch, StepInput(x_RV, steps_R, *masks, params_RP))
        if active_R is not None:
            tokens_R = torch.where(active_R, tokens_R, NO_TOKEN)
            if updated_RP is not None:
                updated_RP = torch.where(active_R[:, None], updated_RP, params_RP)
        if updated_RP is not None:
            self._slots.stage_params_SP.index_copy_(0, group.slots_R, updated_RP)
        if reports is not None and tapped_RV is not None:
            most = max(top for top, _ in group.requests)
            logprobs = compute_logprobs(tapped_RV, tokens_R, group.requested_NA, most, tapped_RV.dtype)
            reports.append(LogprobsReport(group.positions, logprobs, group.requests))
        self._slots.push(group.slots_R, tokens_R, steps_R)
        return tokens_R

    def _apply_shifts(self, group: RowGroup, x_RV: torch.Tensor) -> torch.Tensor:
        for shifts in group.shift_groups:
            x_RV = apply_shifts(shifts, self._slots, x_RV)
        return x_RV

    def _sample_triton(
        self, group: RowGroup, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, active_R: torch.Tensor | None
    ) -> torch.Tensor:
        from nucleate.sampling.gpu.triton import launch  # imports Triton
        from nucleate.sampling.gpu.triton.device_memory import RowState

        if self._workspace is None or self._workspace.rows < len(group.positions):
            rows = 1 << (len(group.positions) - 1).bit_length()
            self._workspace = launch.TritonWorkspace(rows, self.size, self.device)
            self._reallocations += 1
        if logits_RV.dtype not in launch.FLOATS or group.shift_groups:
            logits_RV = self._apply_shifts(group, logits_RV.to(torch.float32))
        workspace, tokens_R, slots = self._workspace, self._empty(torch.int64), self._slots
        if group.kernel_logprobs:  # new buffers: results of earlier calls may not have been read
            workspace.logprobs_R, workspace.ranks_R = self._empty(torch.float64), self._empty(torch.int32)
        state = RowState(group.slots_R, slots.state_SC, slots.tokens_SL, slots.ring_size, active_R)
        mask_RW, out_R = _combine_masks(mask_RW, group.allowed_RW), tokens_R[: len(group.positions)]
        return launch.sample(
            logits_RV, state, workspace, mask_RW, out_R=out_R, truncates=group.truncates, report=group.kernel_logprobs
        )

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        """A new result buffer with one element per row."""
        return torch.empty(self._workspace.rows, dtype=dtype, device=self.device)

    def push(self, number: RowId, token: int, params: Sequence[float] | None = None) -> None:
        """Append a token that was not sampled here. params: of the stages after it; by default computed as if p = 1."""
        view, row = self.view([number]), self._rows[number]
        self.reserve(view, 1)
        with device_guard(self.device):
            tokens_R = to_device([token], self.device)
            if params is not None:
                self._slots.set_stage_params(row.slot, params)
            elif row.spec.signature is not None and row.spec.signature.stateful:
                self._update_forced(row.spec.signature, view.slots_R, tokens_R)
            self._slots.push(view.slots_R, tokens_R)
            self._update_repeats(view.groups[0], tokens_R)

    def _update_forced(self, signature: PipelineSignature, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """Update stateful stages with a token whose probability was 1."""
        params_RP = self._slots.stage_params_SP.index_select(0, slots_R)
        zero_R1 = torch.zeros_like(params_RP[:, :1])
        stages = bind_stages(signature.signatures, params_RP)
        logprobs = {i: [zero_R1, zero_R1] for i, stage in enumerate(stages) if stage.signature.state_names}
        updated_RP = updated_params(params_RP, tokens_R[:, None], stages, logprobs)
        self._slots.stage_params_SP.index_copy_(0, slots_R, updated_RP)

    def _raw_logprobs(self, view: BatchView, logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> TensorLogprobs:
        """The raw logprobs of the rows that report them."""
        if view.groups[0].kernel_logprobs:
            workspace, count = self._workspace, len(tokens_R)
            columns = tokens_R, workspace.logprobs_R[:count], workspace.ranks_R[:count].to(torch.int64)
            return TensorLogprobs(*(column_R.index_select(0, view.reporting_N)[:, None] for column_R in columns))
        logits_NV, tokens_N = logits_RV, tokens_R
        if len(view.reporting) < len(view.rows):
            logits_NV, tokens_N = (rows.index_select(0, view.reporting_N) for rows in (logits_RV, tokens_R))
        most = max(top for top, _ in view.requests)
        return compute_logprobs(logits_NV.to(torch.float32), tokens_N, view.requested_NA, most, self.floats)

    def synchronise(self) -> None:
        """Copy new tokens and the state of stages to the host. Synchronises if there are new tokens."""
        rows, count = list(self._rows.items()), self._unsynced
        if not count or not rows:
            self._unsynced = 0
            return
        slots, steps = [one.slot for _, one in rows], [one.host_output_length for _, one in rows]
        with device_guard(self.device):
            new_tokens = self._slots.sampled_since(slots, steps, count)
        self._unsynced = 0
        for (number, one), tokens in zip(rows, new_tokens, strict=True):
            one.host_output_length += len(tokens)
            if tokens:
                self._on_tokens(number, tokens)
        stateful = [(number, one.slot) for number, one in rows if one.spec.signature and one.spec.signature.stateful]
        if stateful and self._on_state is not None:
            slots_R = to_device([slot for _, slot in stateful], self.device)
            params_of_rows = self._slots.stage_params_SP.index_select(0, slots_R).tolist()
            for (number, _), params in zip(stateful, params_of_rows, strict=True):
                self._on_state(number, params)


def _combine_masks(mask_RW: torch.Tensor | None, allowed_RW: torch.Tensor | None) -> torch.Tensor | None:
    """The intersection of two bitmasks. mask_RW may have more words than needed."""
    if mask_RW is None or allowed_RW is None:
        return allowed_RW if mask_RW is None else mask_RW
    return mask_RW[:, : allowed_RW.shape[1]] & allowed_RW


Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""forward(token_ids [R] int64, active [R] bool) -> logits [R, V]: one decoding step of the model.

token_ids are the last tokens of the rows. It must not change the state (KV cache) of inactive rows; their logits are
ignored. On CUDA it is captured in a graph: it must not synchronise, and its tensors must keep their addresses."""


class DecodeLoop:
    """Call it to sample the next ``steps`` tokens of some rows: int64 [R, steps], -1 after the last token of a row.

    ended_R: bool [R], on the device. A row has ended when it sampled a stop id, which is its last token, or when its
    logits were invalid. Ended rows do not advance; set ``ended_R`` to False to continue them. Other rows of the sampler
    may be added and removed between calls.
    """

    def __init__(
        self,
        rows: BatchState,
        view: BatchView,
        forward: Forward,
        first_ids: Sequence[int],
        steps: int,
        stop_ids: Sequence[int],
    ) -> None:
        self.steps = steps
        self._rows, self._view, self._forward = rows, view, forward
        self._stop_ids = to_device(list(stop_ids), rows.device)
        self._last_R = to_device(list(first_ids), rows.device)
        self.ended_R = torch.zeros(len(view.row_numbers), dtype=torch.bool, device=rows.device)
        self._tokens_RN = torch.full((len(view.row_numbers), steps), -1, dtype=torch.int64, device=rows.device)
        self._replay: Callable[[], None] | None = None  # the captured graph, on CUDA
        self._captured_reallocations = -1

    def __call__(self) -> torch.Tensor:
        """Sample the next tokens. Synchronises once in several thousand steps, to copy tokens to the host."""
        removed = [number for number in self._view.row_numbers if number not in self._rows]
        if removed:
            raise ParameterError("rows", f"row {removed[0]} has been removed, but this loop samples it")
        self._rows.reserve(self._view, self.steps)
        with device_guard(self._rows.device):
            if self._rows.device.type != "cuda":
                self._run()
            else:
                if self._replay is None or self._captured_reallocations != self._rows.reallocations:
                    self._replay = self._capture()
                self._replay()
        return self._tokens_RN.clone()

    def _run(self) -> None:
        for step in range(self.steps):
            active_R = ~self.ended_R
            logits_RV = self._forward(self._last_R, active_R)
            tokens_R = self._rows.sample(self._view, logits_RV, None, active_R)
            self._tokens_RN[:, step] = tokens_R
            has_token_R = tokens_R >= 0
            self._last_R.copy_(torch.where(has_token_R, tokens_R, self._last_R))
            stopped_R = (tokens_R[:, None] == self._stop_ids).any(1)
            self.ended_R.logical_or_(stopped_R | (active_R & ~has_token_R))

    def _capture(self) -> Callable[[], None]:
        """Capture the steps. All rows are inactive meanwhile, so that warm-up and capture change no state."""
        ended_R = self.ended_R.clone()
        self.ended_R.fill_(True)
        replay = capture_graph(self._run)
        self.ended_R.copy_(ended_R)
        self._captured_reallocations = self._rows.reallocations
        return replay
