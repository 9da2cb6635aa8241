"""The rows of a batch on a device: add, sample, append, remove. Tokens stay on the device until the host reads them.

The host is told of them when it asks. Carries no meaning of its own: what a row means is a ``DeviceRowSpec``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nucleate.sampling.backends.torch.batch_sampling import StepInput, TensorBatch, next_numbers, run, scores
from nucleate.sampling.backends.torch.batch_view import BatchView, DeviceRow, RowGroup, allowed_words, part_of
from nucleate.sampling.backends.torch.bound_stage import mines
from nucleate.sampling.backends.torch.slots import STEP, Slots, line_of
from nucleate.sampling.backends.torch.tensor_logprobs import TensorLogprobs, Wanted, report
from nucleate.sampling.backends.torch.tensor_shifts import follow, shifted, unbroken
from nucleate.sampling.backends.torch.torch_device import floats_of, guard, sent
from nucleate.sampling.dispatch.device_row import DeviceRowSpec
from nucleate.sampling.dispatch.signature import PipelineSignature

NOT_DRAWN = -1
"""The token of a row from which none can be drawn."""

RING = 1 << 13
"""So many tokens of a row are kept, until the host asks for them; no window of penalties is longer."""

Input = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Logits, what is allowed, and which rows are active, see ``BatchState.draw``."""


class TapReport(NamedTuple):
    """What the Taps of some rows of a call were told."""

    places: Sequence[int]  #: of the rows
    report: TensorLogprobs
    wanted: list[Wanted]


class BatchState:
    """Rows by their numbers.

    size: V. kernels: "triton" or "torch". learn(row, tokens) is told what was drawn, in order, when ``catch_up`` is
    called, and before more is drawn than is kept; then settle(row, numbers) what the stages of a row have learned.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        kernels: str,
        learn: Callable[[int, list[int]], None],
        settle: Callable[[int, list[float]], None] | None = None,
    ) -> None:
        self.size, self.device, self.kernels = size, device, kernels
        self.floats = floats_of(device)
        self._learn, self._settle = learn, settle
        self._zero_1 = torch.zeros(1, dtype=self.floats, device=device)
        self._slots = Slots(device, self.floats, RING)
        self._held: dict[int, DeviceRow] = {}
        self._unseen = 0  # the most tokens of a row that the host does not know
        self._work: Any = None  # of the kernels
        self._moved = 0

    def __contains__(self, row: int) -> bool:
        return row in self._held

    @property
    def moved(self) -> int:
        """It changes when arrays come to lie elsewhere, so that what was captured must be captured again."""
        return self._slots.moved + self._moved

    def add(self, number: int, row: DeviceRowSpec, seed: int, prompt: list[int], output: list[int]) -> None:
        """A new row."""
        said = prompt + output
        self._slots.widen(int(min(len(said), row.span)) + 1)
        line = line_of(row.numbers, self.floats, seed, len(prompt), len(output), unbroken(row.shifts, said))
        slot = self._slots.put(line, said if row.span else [], len(said), follows=row.follows)
        if row.staged is not None and row.staged.learns:
            self._slots.learn(slot, row.staged.numbers)
        self._held[number] = DeviceRow(slot, row, len(prompt), len(output), allowed_words(row.allowed, self.size))

    def remove(self, number: int) -> None:
        """A row goes; no other one moves."""
        self._slots.give_back(self._held.pop(number).slot)

    def reports(self, number: int) -> bool:
        """Whether a row wants logprobs."""
        row = self._held[number].row
        return row.wanted is not None or (row.staged is not None and row.staged.wanted is not None)

    def staged(self, number: int) -> PipelineSignature | None:
        """The stages of a row, where the numbers of the chain do not say them."""
        return self._held[number].row.staged

    def part(self, numbers: Sequence[int]) -> BatchView:
        """Rows of a call, in its order."""
        held = [self._held[number] for number in numbers]
        return part_of(numbers, held, self._slots, self.size, kernels=self.kernels == "triton")

    def reserve(self, part: BatchView, count: int) -> None:
        """Make room for so many more tokens of some rows; it may wait for the device, and ``draw`` does not."""
        if max(count + self._unseen, self._reach(part, count)) >= self._slots.ring:
            self.catch_up()
        self._unseen += count
        self._slots.widen(self._reach(part, 0) + 1)

    def _reach(self, part: BatchView, count: int) -> int:
        """How far back a row may look after so many more tokens."""
        more = self._unseen + count
        return int(max(min(one.prompt + one.known + more, one.row.span) for one in part.held) if part.held else 0)

    def draw(
        self,
        part: BatchView,
        logits_RV: torch.Tensor,
        mask_RW: torch.Tensor | None = None,
        active_R: torch.Tensor | None = None,
        tap_reports: list[TapReport] | None = None,
    ) -> torch.Tensor:
        """The next tokens of rows, int64 [R], -1 where none can be drawn; the others go on with theirs.

        Room must have been made. logits_RV: any float. mask_RW: int32. active_R: bool; the rest stay, and have -1.
        heard: takes what is told of scores that are not the logits as given.
        """
        given = logits_RV, mask_RW, active_R
        with guard(self.device):
            if len(part.kinds) == 1:
                return self._drawn(part.kinds[0], given, tap_reports)
            tokens_R = torch.full_like(part.slots_R, NOT_DRAWN)
            for kind in part.kinds:
                some = (None if one is None else one.index_select(0, kind.places_N) for one in given)
                tokens_R.index_copy_(0, kind.places_N, self._drawn(kind, tuple(some), tap_reports))
        return tokens_R

    def _drawn(self, kind: RowGroup, given: Any, tap_reports: list[TapReport] | None) -> torch.Tensor:
        """The next tokens of rows that are drawn together; they go on with these."""
        if kind.batch is None:
            tokens_R = self._kernels(kind, *given)
        else:
            steps_R = self._slots.column(kind.slots_R, STEP)
            tokens_R = self._tensors(kind, kind.batch, steps_R, given, tap_reports)
            self._slots.push(kind.slots_R, tokens_R, steps_R)
        self._follow(kind, tokens_R)
        return tokens_R

    def _follow(self, kind: RowGroup, tokens_R: torch.Tensor) -> None:
        for group in kind.groups:
            if group.follows:
                tokens_N = tokens_R if group.places_N is None else tokens_R.index_select(0, group.places_N)
                follow(group, self._slots, tokens_N, self.size)

    def _tensors(
        self,
        kind: RowGroup,
        batch: TensorBatch,
        steps_R: torch.Tensor,
        given: Input,
        tap_reports: list[TapReport] | None,
    ) -> torch.Tensor:
        """Rows of a structure through their stages."""
        logits_RV, mask_RW, active_R = given
        masks = _both(mask_RW, kind.allowed_RW), None
        if batch.steps[0].shape == "Tap" and not batch.masked:  # the mask of the call comes after it
            masks = kind.allowed_RW, mask_RW
        numbers_RP = self._slots.learned_SP.index_select(0, kind.slots_R) if batch.learns else None
        x_RV = self._shifted(kind, scores(logits_RV, self._zero_1))
        tokens_R, learned_RP, tapped_RV = run(batch, StepInput(x_RV, steps_R, *masks, numbers_RP))
        if active_R is not None:
            tokens_R = torch.where(active_R, tokens_R, NOT_DRAWN)
            if learned_RP is not None:
                learned_RP = torch.where(active_R[:, None], learned_RP, numbers_RP)
        if learned_RP is not None:
            self._slots.learned_SP.index_copy_(0, kind.slots_R, learned_RP)
        if tap_reports is not None and tapped_RV is not None:
            most = max(top for top, _ in kind.wanted)
            tap_reports.append(
                TapReport(
                    kind.places, report(tapped_RV, tokens_R, kind.requested_NA, most, tapped_RV.dtype), kind.wanted
                )
            )
        return tokens_R

    def _shifted(self, kind: RowGroup, x_RV: torch.Tensor) -> torch.Tensor:
        for group in kind.groups:
            x_RV = shifted(group, self._slots, x_RV)
        return x_RV

    def _kernels(
        self, kind: RowGroup, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, active_R: torch.Tensor | None
    ) -> torch.Tensor:
        from nucleate.sampling.backends.triton import launch  # it loads Triton, as does the next
        from nucleate.sampling.backends.triton.device_memory import RowState

        if self._work is None or self._work.rows < len(kind.places):
            self._work = launch.TritonWorkspace(1 << (len(kind.places) - 1).bit_length(), self.size, self.device)
            self._moved += 1
        if logits_RV.dtype not in launch.FLOATS or kind.groups:
            logits_RV = self._shifted(kind, logits_RV.to(torch.float32))
        work, tokens_R, slots = self._work, self._empty(torch.int64), self._slots
        if kind.brief:  # what was told of earlier calls stays as it is
            work.logprobs_R, work.ranks_R = self._empty(torch.float64), self._empty(torch.int32)
        state = RowState(kind.slots_R, slots.lines_SC, slots.ring_SL, slots.ring, active_R)
        launch.sample(
            logits_RV, state, work, _both(mask_RW, kind.allowed_RW), out_R=tokens_R[: len(kind.places)], cuts=kind.cuts,
            report=kind.brief,
        )  # fmt: skip
        return tokens_R[: len(kind.places)]

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        """What kernels write their results to, and no later call does."""
        return torch.empty(self._work.rows, dtype=dtype, device=self.device)

    def push(self, number: int, token: int, numbers: Sequence[float] | None = None) -> None:
        """A row goes on with a token that was not drawn here. numbers: what its stages make of it."""
        part, held = self.part([number]), self._held[number]
        self.reserve(part, 1)
        with guard(self.device):
            tokens_R = sent([token], self.device)
            if numbers is not None:
                self._slots.learn(held.slot, numbers)
            elif held.row.staged is not None and held.row.staged.learns:
                self._learned(held.row.staged, part.slots_R, tokens_R)
            self._slots.push(part.slots_R, tokens_R)
            self._follow(part.kinds[0], tokens_R)

    def _learned(self, staged: PipelineSignature, slots_R: torch.Tensor, tokens_R: torch.Tensor) -> None:
        """A row goes on with a token that could be no other: its chance was 1."""
        numbers_RP = self._slots.learned_SP.index_select(0, slots_R)
        sure_R1 = torch.zeros_like(numbers_RP[:, :1])
        chances = {place: [sure_R1, sure_R1] for place, step in enumerate(staged.steps) if step.learns}
        learned_RP = next_numbers(numbers_RP, tokens_R[:, None], mines(staged.steps, numbers_RP), chances)
        self._slots.learned_SP.index_copy_(0, slots_R, learned_RP)

    def report(self, part: BatchView, logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> TensorLogprobs | None:
        """What is to be told of the logits as given, of those who want it; None if none does."""
        if not part.reporting:
            return None
        if part.kinds[0].brief:
            reporting = (
                tokens_R,
                self._work.logprobs_R[: len(tokens_R)],
                self._work.ranks_R[: len(tokens_R)].to(torch.int64),
            )
            return TensorLogprobs(*(column_R.index_select(0, part.reporting_N)[:, None] for column_R in reporting))
        logits_NV, tokens_N = logits_RV, tokens_R
        if len(part.reporting) < len(part.rows):
            logits_NV, tokens_N = (whole.index_select(0, part.reporting_N) for whole in (logits_RV, tokens_R))
        with guard(self.device):
            most = max(top for top, _ in part.wanted)
            return report(logits_NV.to(torch.float32), tokens_N, part.requested_NA, most, self.floats)

    def catch_up(self) -> None:
        """Tell what was drawn since the last time. Waits for the device, if anything was."""
        held, count = list(self._held.items()), self._unseen
        if not count or not held:
            self._unseen = 0
            return
        with guard(self.device):
            news = self._slots.since([one.slot for _, one in held], [one.known for _, one in held], count)
        self._unseen = 0
        for (number, one), tokens in zip(held, news, strict=True):
            one.known += len(tokens)
            if tokens:
                self._learn(number, tokens)
        learning = [(number, one.slot) for number, one in held if one.row.staged is not None and one.row.staged.learns]
        if learning and self._settle is not None:
            slots_R = sent([slot for _, slot in learning], self.device)
            learned = self._slots.learned_SP.index_select(0, slots_R).tolist()
            for (number, _), numbers in zip(learning, learned, strict=True):
                self._settle(number, numbers)


def _both(mask_RW: torch.Tensor | None, allowed_RW: torch.Tensor | None) -> torch.Tensor | None:
    """What two bitmasks allow; one may have more words than it needs."""
    if mask_RW is None or allowed_RW is None:
        return allowed_RW if mask_RW is None else mask_RW
    return mask_RW[:, : allowed_RW.shape[1]] & allowed_RW
