"""The rows of a batch on a device: they come, are drawn, go on, and go, and tokens stay where they are drawn.

The host is told of them when it asks. Carries no meaning of its own: what a row means is a ``Resident``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from nucleate.backends.cuda import plain
from nucleate.backends.cuda.device import floats_of, guard, sent
from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.entries import Entries
from nucleate.backends.cuda.report import Report, Wanted, report
from nucleate.backends.cuda.resident import Resident
from nucleate.backends.cuda.slots import Slots

RING = 1 << 13
"""So many tokens of a row are kept, until the host asks for them; no window of penalties is longer."""


@dataclass(slots=True)
class _Held:
    slot: int
    row: Resident
    known: int  # how many tokens of its output the host knows
    allowed_W: NDArray[np.int32] | None  # packed


class Part(NamedTuple):
    """Some rows, in the order of a call. It is of no use once one of them is gone."""

    rows: list[int]
    slots: list[int]
    slots_R: torch.Tensor
    numbers_RC: torch.Tensor
    seeds_R: torch.Tensor
    allowed_RW: torch.Tensor | None  #: int32, packed
    edits: bool  #: whether any row has entries,
    fixed: bool  #: which do the same in each step;
    kept: list[Any]  #: then what they do, from the first one on
    counting: list[int]  #: slots of rows whose entries change
    counted_N: torch.Tensor  #: places of these
    told: list[int]  #: places of rows with logprobs,
    told_N: torch.Tensor  #: the same,
    wanted: list[Wanted]  #: what these want,
    asked_NA: torch.Tensor  #: and the ids among it, -1 for none


class Rows:
    """Rows by their numbers.

    size: V. kernels: "triton" or "torch". learn(row, tokens) is told what was drawn, in order, when ``catch_up`` is
    called, and before more is drawn than is kept.
    """

    def __init__(self, size: int, device: torch.device, kernels: str, learn: Callable[[int, list[int]], None]) -> None:
        self.size, self.device, self.kernels = size, device, kernels
        self.floats = floats_of(device)
        self._learn = learn
        self._slots = Slots(device, self.floats, RING)
        self._entries = Entries(size, device, self.floats)
        self._held: dict[int, _Held] = {}
        self._unseen = 0  # the most tokens of a row that the host does not know
        self._work: object = None
        self._moved = 0

    def __contains__(self, row: int) -> bool:
        return row in self._held

    @property
    def moved(self) -> int:
        """It changes when arrays come to lie elsewhere, so that what was captured must be captured again."""
        return self._slots.moved + self._entries.moved + self._moved

    def add(self, number: int, row: Resident, seed: int, prompt: list[int], output: list[int]) -> None:
        """A new row."""
        slot = self._slots.take(row, seed, prompt, output)
        if row.edits:
            self._entries.put(slot, len(self._slots), row, prompt, output)
        else:
            self._entries.clear(slot, len(self._slots))
        self._held[number] = _Held(slot, row, len(output), _packed(row.allowed, self.size))

    def remove(self, number: int) -> None:
        """A row goes; no other one moves."""
        self._slots.give_back(self._held.pop(number).slot)

    def reports(self, number: int) -> bool:
        """Whether a row wants logprobs."""
        return self._held[number].row.wanted is not None

    def part(self, numbers: Sequence[int]) -> Part:
        """Rows of a call, in its order."""
        held = [self._held[number] for number in numbers]
        rows, slots = [one.row for one in held], [one.slot for one in held]
        slots_R = sent(slots, self.device)
        counted = [place for place, row in enumerate(rows) if row.penalties.counts]
        told = [place for place, row in enumerate(rows) if row.wanted is not None]
        wanted = [row.wanted for row in rows if row.wanted is not None]
        most = max((len(asked) for _, asked in wanted), default=0)
        asked_NA = sent([[*asked, *[-1] * (most - len(asked))] for _, asked in wanted], self.device)
        return Part(
            list(numbers),
            slots,
            slots_R,
            self._slots.numbers(slots_R),
            self._slots.seeds(slots_R),
            self._allowed(held),
            any(row.edits for row in rows),
            not any(row.penalties.counts or row.until for row in rows),
            [],
            [slots[place] for place in counted],
            sent(counted, self.device),
            told,
            sent(told, self.device),
            wanted,
            asked_NA.reshape(len(told), most),
        )

    def _allowed(self, held: list[_Held]) -> torch.Tensor | None:
        if all(one.allowed_W is None for one in held):
            return None
        words_RW = np.full((len(held), -(-self.size // 32)), -1, np.int32)
        for one, words_W in zip(held, words_RW, strict=True):
            if one.allowed_W is not None:
                words_W[:] = one.allowed_W
        return sent(words_RW, self.device)

    def reserve(self, part: Part, count: int) -> None:
        """Make room for so many more tokens of some rows; it may wait for the device, and ``draw`` does not."""
        if self._unseen + count >= self._slots.ring:
            self.catch_up()
        self._unseen += count
        if part.counting:
            self._entries.reserve(part.counting, count)

    def draw(
        self,
        part: Part,
        logits_RV: torch.Tensor,
        mask_RW: torch.Tensor | None = None,
        active_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The next tokens of rows, int64 [R], -1 where none can be drawn; the others go on with theirs.

        Room must have been made. logits_RV: any float. mask_RW: int32. active_R: bool; the rest stay, and have -1.
        """
        with guard(self.device):
            mask_RW = _both(mask_RW, part.allowed_RW)
            if self.kernels == "triton":
                tokens_R = self._kernels(part, logits_RV, mask_RW)
            else:
                steps_R, edits = self._slots.steps(part.slots_R), self._edits(part, _unpadded)
                tokens_R = plain.sample(logits_RV, part.numbers_RC, part.seeds_R, steps_R, edits, mask_RW)
            if active_R is not None:
                tokens_R = torch.where(active_R, tokens_R, plain.NOT_DRAWN)
            self._push(part, tokens_R)
        return tokens_R

    def _edits(self, part: Part, form: Callable[[Edits, int], Any]) -> Any:
        """What the entries of rows do in this step, in some form; None where there are none."""
        if part.kept or not part.edits:
            return part.kept[0] if part.kept else None
        slots_R = part.slots_R
        edits = form(self._entries.edits(slots_R, self._slots.steps(slots_R), self._slots.rules(slots_R)), self.size)
        if part.fixed:
            part.kept.append(edits)
        return edits

    def _kernels(self, part: Part, logits_RV: torch.Tensor, mask_RW: torch.Tensor | None) -> torch.Tensor:
        from nucleate.backends.cuda.special import launch  # it loads Triton
        from nucleate.backends.cuda.special.index import index_of

        if not isinstance(self._work, launch.Workspace) or self._work.rows < len(part.rows):
            self._work = launch.Workspace(1 << (len(part.rows) - 1).bit_length(), self.size, self.device)
            self._moved += 1
        if logits_RV.dtype not in launch.FLOATS:
            logits_RV = logits_RV.to(torch.float32)
        steps_R = self._slots.steps(part.slots_R)  # a copy, which the kernel moves on
        index = self._edits(part, index_of)
        drawn_R = launch.sample(logits_RV, part.numbers_RC, part.seeds_R, steps_R, self._work, index, mask_RW)
        return drawn_R.clone()  # the next call writes to it

    def _push(self, part: Part, tokens_R: torch.Tensor) -> None:
        """Rows go on with tokens that lie on the device."""
        self._slots.push(part.slots_R, tokens_R)
        if part.counting:
            slots_N, tokens_N = (column_R.index_select(0, part.counted_N) for column_R in (part.slots_R, tokens_R))
            self._entries.push(slots_N, tokens_N, self._slots.leaving(slots_N, tokens_N))

    def push(self, number: int, token: int) -> None:
        """A row goes on with a token that was not drawn here."""
        part = self.part([number])
        self.reserve(part, 1)
        with guard(self.device):
            self._push(part, sent([token], self.device))

    def report(self, part: Part, logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> Report | None:
        """What is to be told of the logits as given, of those who want it; None if none does."""
        if not part.told:
            return None
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


def _packed(allowed: frozenset[int] | None, size: int) -> NDArray[np.int32] | None:
    """Token ids as a bitmask."""
    if allowed is None:
        return None
    bits = np.zeros(-(-size // 32) * 32, bool)
    bits[list(allowed)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _both(mask_RW: torch.Tensor | None, allowed_RW: torch.Tensor | None) -> torch.Tensor | None:
    """What two bitmasks allow; one may have more words than it needs."""
    if mask_RW is None or allowed_RW is None:
        return allowed_RW if mask_RW is None else mask_RW
    return mask_RW[:, : allowed_RW.shape[1]] & allowed_RW


def _unpadded(edits: Edits, size: int) -> Edits:
    """What has no token has -1, as ``Edits`` says."""
    return edits._replace(ids_RK=torch.where(edits.ids_RK < size, edits.ids_RK, -1))
