"""Which way rows of a structure go: a kernel where one can be made of their rules, tensors elsewhere. Knows no rule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.staged import run
from nucleate.backends.cuda.staged.groups import Group, States

logger = logging.getLogger("nucleate")

Masks = tuple[torch.Tensor | None, torch.Tensor | None]
"""What is allowed, see ``run.run``: for all stages; for those after a Tap that is the first step."""


class Tiers:
    """The numbers of rows, and room for their kernels. kernels: "triton" or "torch"."""

    def __init__(self, size: int, device: torch.device, floats: torch.dtype, kernels: str) -> None:
        self.states = States(device, floats)
        self._size, self._device, self._kernels = size, device, kernels
        self._work: Any = None
        self._made = 0
        self._refused: set[object] = set()  # structures that are no kernels
        self._said: set[object] = set()

    @property
    def moved(self) -> int:
        """It changes when arrays come to lie elsewhere."""
        return self.states.moved + self._made + (0 if self._work is None else self._work.moved)

    def drawn(
        self,
        group: Group,
        keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        logits_RV: torch.Tensor,
        masks: Masks,
        edits: Callable[[], Edits | None],
        index: Callable[[], Any],
    ) -> run.Outcome:
        """Draw a token per row. keys: slots, seeds, steps, [R] each. edits, index: what is done to single scores."""
        drawing, structure = self.states.drawing(group, *keys), (group.steps, group.masked)
        names = ", ".join(step.kind.__name__ for step in group.steps)
        if self._kernels == "triton" and not group.no_kernel and structure not in self._refused:
            try:
                outcome = self._launched(drawing, group, logits_RV, masks, index)
            except Exception as error:  # noqa: BLE001  # whatever the compiler says: rows are drawn anyway
                self._refused.add(structure)
                told = (str(error).strip().splitlines() or [""])[-1]
                logger.warning("%s: as tensors, as no kernel can be made (%s: %s)", names, type(error).__name__, told)
            else:
                self._say(structure, f"{names}: by a kernel")
                return outcome
        self._say(structure, f"{names}: as tensors{', as ' * bool(group.no_kernel)}{group.no_kernel}")
        return run.run(drawing, logits_RV, edits(), *masks)

    def _say(self, structure: object, what: str) -> None:
        """In the log, the first time that rows of a structure are drawn."""
        if structure not in self._said:
            self._said.add(structure)
            logger.info("rows of a structure are drawn on the device; %s", what)

    def _launched(
        self, drawing: run.Drawing, group: Group, logits_RV: torch.Tensor, masks: Masks, index: Callable[[], Any]
    ) -> run.Outcome:
        from nucleate.backends.cuda.staged import launch  # it loads Triton

        rows = min(1 << (len(logits_RV) - 1).bit_length(), max(1, launch.AT_ONCE // self._size))
        if self._work is None or self._work.rows < rows:
            self._made += 1 + (0 if self._work is None else self._work.moved)
            self._work = launch.Workspace(rows, self._size, self._device)
        if logits_RV.dtype not in launch.FLOATS:
            logits_RV = logits_RV.to(torch.float32)
        return launch.run(drawing, group.masked, logits_RV, self._work, index(), *masks)
