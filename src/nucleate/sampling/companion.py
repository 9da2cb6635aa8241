"""Combines rows of logits with those of companion sequences by a Combine stage, before a pipeline samples them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.inputs import LogitsInput, checked_logits
from nucleate.sampling.maths import INFINITY, log_softmax, where
from nucleate.sampling.stage import Combine, Pipeline


def split_combine(stages: Pipeline) -> tuple[Combine | None, Pipeline]:
    """Split a pipeline into its Combine stage, None if it has none or a neutral one, and the other stages."""
    first = stages[0]
    if not isinstance(first, Combine):
        return None, stages
    return (None if first.neutral else first), stages[1:]


def combine(stage: Combine, x_V: Any, other_V: Any) -> Any:
    """Combine a row of logits [V] with that of the companion: float32 [V], NumPy or torch.

    A token that is at -inf in one of the rows stays there. A row that is invalid in one of them (NaN, +inf, nothing but
    -inf) becomes NaN.
    """
    x_V, other_V = log_softmax(_float32(x_V)), log_softmax(_float32(other_V))
    with np.errstate(all="ignore"):
        combined_V = stage.apply(x_V, other_V)
        if not hasattr(x_V, "detach") and np.isfinite(x_V.min() + other_V.min()):
            return combined_V
        return where((sum_V := x_V + other_V) > -INFINITY, combined_V, sum_V)


def _float32(row_V: Any) -> Any:
    return row_V.float() if hasattr(row_V, "detach") else np.asarray(row_V, np.float32)


def combined_rows(stages: Sequence[Combine | None], logits: Any, companion: Any) -> Any:
    """The logits [R, V] that a pipeline samples from: rows with a Combine stage are combined with ``companion`` [R, V].

    Raises ParameterError if ``companion`` is missing, ValueError for another shape.
    """
    needed = next((stage for stage in stages if stage is not None), None)
    if needed is None:
        return logits
    if companion is None:
        message = f"{field_of(needed)} needs the logits of a companion sequence: pass companion, with the same shape"
        raise ParameterError("companion", message)
    rows, others = LogitsInput(logits), LogitsInput(companion)
    if rows.shape != others.shape or len(stages) != len(rows):
        expected = [len(stages), rows.shape[1]]
        raise ValueError(f"companion must have the shape {expected}, like the logits, got {list(others.shape)}")
    if not getattr(logits, "is_cpu", True) and not getattr(companion, "is_cpu", True):  # on a device
        result = checked_logits(logits).float().clone()
        combine_in_place(stages, result, checked_logits(companion))
        return result
    array = np.stack([*rows]) if len(rows) else np.empty(rows.shape, np.float32)
    combine_in_place(stages, array, others)
    return rows.like(array)


def combine_in_place(stages: Sequence[Combine | None], logits: Any, companion: Any) -> None:
    """Replace each row of ``logits`` that has a Combine stage."""
    for row, stage in enumerate(stages):
        if stage is not None:
            logits[row] = combine(stage, logits[row], companion[row])


def field_of(stage: Combine) -> str:
    """The field that enables a stage, for error messages."""
    return next((parameter.name for parameter in stage.parameters.values() if parameter.public), stage.name)
