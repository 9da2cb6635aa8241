"""Checks the arguments of functions that look at one row of logits: ``trace``, and many draws of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.sampling.companion import combined_rows, split_combine
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_ids, history, masks, per_row
from nucleate.sampling.pipeline import Params, as_pipeline
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Combine, Pipeline


class SingleRow(NamedTuple):
    """One row, ready for the reference backend."""

    logits_V: NDArray[np.float32]  #: combined with those of the companion
    stages: Pipeline  #: without the Combine stage, with a Mask stage if there is a mask
    past: History
    step: int
    combine: Combine | None

    @property
    def origin(self) -> str:
        """Where the logits come from."""
        return "as given" if self.combine is None else f"combined by {self.combine!r}"


def single_row(
    logits_V: Any,
    params: Params,
    prompt_ids: Sequence[int] | None = None,
    output_ids: Sequence[int] | None = None,
    step: int = 0,
    mask: Any = None,
    companion: Any = None,
) -> SingleRow:
    """Check the arguments of ``trace``. Raises as ``sample``."""
    logits = LogitsInput(_as_batch(logits_V, "logits"))
    size, (combine, stages) = logits.shape[1], split_combine(as_pipeline(params))
    check_ids(stages, size)
    if combine is not None:
        others = None if companion is None else _as_batch(companion, "companion")
        logits = LogitsInput(combined_rows([combine], _as_batch(logits_V, "logits"), others))
    [at], [mask_W] = per_row(step, 1, "step"), masks(None if mask is None else _as_batch(mask, "mask"), 1, size)
    stages = stages if mask_W is None else with_mask(stages)
    prompt = history(() if prompt_ids is None else prompt_ids, size, "prompt_ids")
    output = history(() if output_ids is None else output_ids, size, "output_ids")
    return SingleRow(logits[0], stages, History(prompt, output, mask_W), at, combine)


def _as_batch(row: Any, name: str) -> Any:
    """One row, NumPy or torch, as a batch."""
    array = row if hasattr(row, "detach") else np.asarray(row)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one row, a list of numbers, got the shape {list(array.shape)}")
    return array[None]
