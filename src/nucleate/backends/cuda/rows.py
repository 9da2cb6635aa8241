"""The rows of a batch on a device: they come, are drawn, go on, and go, and tokens stay where they are drawn.

The host is told of them when it asks. Carries no meaning of its own: what a row means is a ``Resident``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from nucleate.backends.cuda.device import floats_of, guard, sent
from nucleate.backends.cuda.part import Held, Part, allowed_words, part_of
from nucleate.backends.cuda.report import Report, Wanted, report, reported
from nucleate.backends.cuda.run import Given, run, scores
from nucleate.backends.cuda.shifts import follow, shifted, unbroken
from nucleate.backends.cuda.slots import STEP, Slots, line_of
from nucleate.backends.cuda.states import States
from nucleate.backends.resident import Resident
from nucleate.backends.structure import Staged

NOT_DRAWN = -1
"""The token of a row from which none can be drawn."""

RING = 1 << 13
"""So many tokens of a row are kept, until the host asks for them; no window of penalties is longer."""

Input = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Logits, what is allowed, and which rows are active, see ``Rows.draw``."""


class Heard(NamedTuple):
    """What the Taps of some rows of a call were told."""

    places: Sequence[int]  #: of the rows
    report: Report
    wanted: list[Wanted]


class Rows:
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
        self._states = States(device, self.floats)
        self._held: dict[int, Held] = {}
        self._unseen = 0  # the most tokens of a row that the host does not know
        self._work: Any = None  # of the kernels
        self._moved = 0

    def __contains__(self, row: int) -> bool:
        return row in self._held

    @property
    def moved(self) -> int:
        """It changes when arrays come to lie elsewhere, so that what was captured must be captured again."""
        return self._slots.moved + self._states.moved + self._moved

    def add(self, number: int, row: Resident, seed: int, prompt: list[int], output: list[int]) -> None:
        """A new row."""
        said = prompt + output
        self._slots.widen(int(min(len(said), row.span)) + 1)
        line = line_of(row.numbers, self.floats, seed, len(prompt), len(output), unbroken(row.shifts, said))
        slot = self._slots.put(line, said if row.span else [], len(said), follows=row.follows)
        if row.staged is not None and row.staged.learns:
            self._states.put(slot, row.staged.numbers)
        self._held[number] = Held(slot, row, len(prompt), len(output), allowed_words(row.allowed, self.size))

    def remove(self, number: int) -> None:
        """A row goes; no other one moves."""
        self._slots.give_back(self._held.pop(number).slot)

    def reports(self, number: int) -> bool:
        """Whether a row wants logprobs."""
        row = self._held[number].row
        return row.wanted is not None or (row.staged is not None and row.staged.wanted is not None)

    def staged(self, number: int) -> Staged | None:
        """The stages of a row, where the numbers of the chain do not say them."""
        return self._held[number].row.staged

    def part(self, numbers: Sequence[int]) -> Part:
        """Rows of a call, in its order."""
        held = [self._held[number] for number in numbers]
        return part_of(numbers, held, self._slots, self.size, kernels=self.kernels == "triton")

    def reserve(self, part: Part, count: int) -> None:
        """Make room for so many more tokens of some rows; it may wait for the device, and ``draw`` does not."""
        if max(count + self._unseen, self._reach(part, count)) >= self._slots.ring:
            self.catch_up()
        self._unseen += count
        self._slots.widen(self._reach(part, 0) + 1)

    def _reach(self, part: Part, count: int) -> int:
        """How far back a row may look after so many more tokens."""
        more = self._unseen + count
        return int(max(min(one.prompt + one.known + more, one.row.span) for one in part.held) if part.held else 0)

    def draw(
        self,
        part: Part,
        logits_RV: torch.Tensor,
        mask_RW: torch.Tensor | None = None,
        active_R: torch.Tensor | None = None,
        heard: list[Heard] | None = None,
    ) -> torch.Tensor:
        """The next tokens of rows, int64 [R], -1 where none can be drawn; the others go on with theirs.

        Room must have been made. logits_RV: any float. mask_RW: int32. active_R: bool; the rest stay, and have -1.
        heard: takes what is told of scores that are not the logits as given.
        """
        with guard(self.device):
            if not part.kinds:
                tokens_R = self._drawn(part, range(len(part.rows)), (logits_RV, mask_RW, active_R), heard)
            else:
                tokens_R = torch.full_like(part.slots_R, NOT_DRAWN)
                for places, places_N, own in part.kinds:
                    some = (_some(whole, places_N) for whole in (mask_RW, active_R))
                    given = logits_RV.index_select(0, places_N), *some
                    tokens_R.index_copy_(0, places_N, self._drawn(own, places, given, heard))
            self._follow(part, tokens_R)
        return tokens_R

    def _follow(self, part: Part, tokens_R: torch.Tensor) -> None:
        for group in part.groups:
            if group.follows:
                tokens_N = tokens_R if group.places_N is None else tokens_R.index_select(0, group.places_N)
                follow(group, self._slots, tokens_N, self.size)

    def _drawn(self, part: Part, places: Sequence[int], given: Input, heard: list[Heard] | None) -> torch.Tensor:
        """The next tokens of rows that are all of one kind; they go on with these."""
        if part.batch is None:
            return self._kernels(part, *given)
        steps_R = self._slots.column(part.slots_R, STEP)
        tokens_R = self._tensors(part, steps_R, places, given, heard)
        self._slots.push(part.slots_R, tokens_R, steps_R)
        return tokens_R

    def _tensors(
        self, part: Part, steps_R: torch.Tensor, places: Sequence[int], given: Input, heard: list[Heard] | None
    ) -> torch.Tensor:
        """Rows of a structure through their stages."""
        assert part.batch is not None  # noqa: S101  # so it is for rows of a structure
        (logits_RV, mask_RW, active_R), batch = given, part.batch
        masks = _both(mask_RW, part.allowed_RW), None
        if batch.steps[0].shape == "Tap" and not batch.masked:  # the mask of the call comes after it
            masks = part.allowed_RW, mask_RW
        numbers_RP = self._states.numbers(part.slots_R) if batch.learns else None
        x_RV = self._shifted(part, scores(logits_RV, self._zero_1))
        tokens_R, learned_RP, told_RV = run(batch, Given(x_RV, steps_R, *masks, numbers_RP))
        if active_R is not None:
            tokens_R = torch.where(active_R, tokens_R, NOT_DRAWN)
            if learned_RP is not None:
                learned_RP = torch.where(active_R[:, None], learned_RP, numbers_RP)
        if learned_RP is not None:
            self._states.learn(part.slots_R, learned_RP)
        if heard is not None and told_RV is not None:
            most = max(top for top, _ in part.wanted)
            heard.append(Heard(places, reported(told_RV, tokens_R, part.asked_NA, most), part.wanted))
        return tokens_R

    def _shifted(self, part: Part, x_RV: torch.Tensor) -> torch.Tensor:
        for group in part.groups:
            x_RV = shifted(group, self._slots, x_RV)
        return x_RV

    def _kernels(
        self, part: Part, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None, active_R: torch.Tensor | None
    ) -> torch.Tensor:
        from nucleate.backends.cuda.special import launch  # it loads Triton, as does the next
        from nucleate.backends.cuda.special.memory import State

        if self._work is None or self._work.rows < len(part.rows):
            self._work = launch.Workspace(1 << (len(part.rows) - 1).bit_length(), self.size, self.device)
            self._moved += 1
        if logits_RV.dtype not in launch.FLOATS or part.groups:
            logits_RV = self._shifted(part, logits_RV.to(torch.float32))
        work, tokens_R, slots = self._work, self._empty(torch.int64), self._slots
        if part.brief:  # what was told of earlier calls stays as it is
            work.logprobs_R, work.ranks_R = self._empty(torch.float64), self._empty(torch.int32)
        state = State(part.slots_R, slots.lines_SC, slots.ring_SL, slots.ring, active_R)
        launch.sample(
            logits_RV, state, work, _both(mask_RW, part.allowed_RW), out_R=tokens_R[: len(part.rows)], cuts=part.cuts,
            report=part.brief,
        )  # fmt: skip
        return tokens_R[: len(part.rows)]

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
                self._states.put(held.slot, numbers)
            elif held.row.staged is not None and held.row.staged.learns:
                self._states.push(held.row.staged, part.slots_R, tokens_R)
            self._slots.push(part.slots_R, tokens_R)
            self._follow(part, tokens_R)

    def report(self, part: Part, logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> Report | None:
        """What is to be told of the logits as given, of those who want it; None if none does."""
        if not part.told:
            return None
        if part.brief:
            told = tokens_R, self._work.logprobs_R[: len(tokens_R)], self._work.ranks_R[: len(tokens_R)].to(torch.int64)
            return Report(*(column_R.index_select(0, part.told_N)[:, None] for column_R in told))
        logits_NV, tokens_N = logits_RV, tokens_R
        if len(part.told) < len(part.rows):
            logits_NV, tokens_N = (whole.index_select(0, part.told_N) for whole in (logits_RV, tokens_R))
        with guard(self.device):
            return report(logits_NV, tokens_N, part.asked_NA, max(top for top, _ in part.wanted), self.floats)

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
            for (number, _), numbers in zip(learning, self._states.told([slot for _, slot in learning]), strict=True):
                self._settle(number, numbers)


def _some(whole_R: torch.Tensor | None, places_N: torch.Tensor) -> torch.Tensor | None:
    return None if whole_R is None else whole_R.index_select(0, places_N)


def _both(mask_RW: torch.Tensor | None, allowed_RW: torch.Tensor | None) -> torch.Tensor | None:
    """What two bitmasks allow; one may have more words than it needs."""
    if mask_RW is None or allowed_RW is None:
        return allowed_RW if mask_RW is None else mask_RW
    return mask_RW[:, : allowed_RW.shape[1]] & allowed_RW
