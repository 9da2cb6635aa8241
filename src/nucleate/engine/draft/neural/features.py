"""What the target made of the tokens of a sequence, as far as a head has not taken it in yet. Knows no head."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nucleate.engine.draft.draft import Read
from nucleate.models.llama import Floats

PENDING = 512
"""Hidden states that are kept for a head which is not asked for drafts: then it begins anew with what came last."""


@dataclass
class Features:
    """Of one sequence. A head has taken in ``taken`` tokens from the place ``base`` on; those that ``wait`` follow."""

    base: int = 0
    taken: int = 0
    waiting: int = 0
    _arrays: list[Floats] = field(default_factory=list)
    _last_1F: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def stop(self) -> int:
        """The place after the last token of which something is known."""
        return self.base + self.taken + self.waiting

    def add(self, read: Read) -> None:
        """The target has read some tokens. Where some are missing, it is as if the sequence began after them."""
        known = self.stop - read.start if self.taken or self.waiting else -1
        new_TF = read.features_TF[max(0, known) :]
        if not len(new_TF):
            return
        if known < 0:
            self._restart(read.start)
        self._arrays.append(new_TF.copy())
        self.waiting += len(new_TF)
        if self.waiting > PENDING:
            kept_TF = self.wait()[-(PENDING // 2) :].copy()
            self._restart(self.stop - len(kept_TF))
            self._arrays, self.waiting = [kept_TF], len(kept_TF)

    def wait(self) -> Floats:
        """Those that wait, [waiting, F]."""
        return self._arrays[0] if len(self._arrays) == 1 else np.concatenate(self._arrays)

    def take(self) -> None:
        """A head has taken in all that waited."""
        self._last_1F = self._arrays[-1][-1:]
        self.taken, self.waiting, self._arrays = self.taken + self.waiting, 0, []

    def again(self) -> None:
        """Have the last one wait once more, if none waits."""
        if not self.waiting:
            self.taken, self.waiting, self._arrays = self.taken - 1, 1, [self._last_1F]

    def _restart(self, base: int) -> None:
        self.base, self.taken, self.waiting, self._arrays = base, 0, 0, []
