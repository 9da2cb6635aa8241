"""A pipeline is a tuple of stages: this simplifies it, plans it, runs it over a batch, and says what it did.

Refuses to hold state: each call is a function of its arguments (and of a fresh seed, where none is given).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.core import noise
from nucleate.core.parameter import ParameterError, read_json, unknown
from nucleate.core.stage import Draw, History, Pipeline, Shift, Stage, shape_of
from nucleate.params import SamplingParams
from nucleate.stages import STAGES
from nucleate.stages.greedy import Greedy
from nucleate.stages.gumbel import Gumbel

Params = SamplingParams | Pipeline
"""What one row may be given: parameters, or the stages themselves (a draw is added if the last is none)."""

BACKENDS = ("auto", "reference")


class LogitsError(ValueError):
    """Some rows have no token to draw. ``errors``: {row: why}; ``token_ids`` [B]: the draws, -1 in those rows."""

    def __init__(self, errors: Mapping[int, str], token_ids: NDArray[np.int64] | None = None) -> None:
        super().__init__(dict(errors), token_ids)  # both, so that it can be pickled
        self.errors, self.token_ids = dict(errors), token_ids

    def __str__(self) -> str:
        return "; ".join(f"row {row}: {why}" for row, why in self.errors.items())


def as_pipeline(params: Params) -> Pipeline:
    """The stages of parameters or of a tuple, checked: all of them stages, one draw, at the end."""
    if isinstance(params, SamplingParams):
        return params.pipeline()
    if not isinstance(params, tuple) or not all(isinstance(stage, Stage) for stage in params):
        raise TypeError(f"params must be a SamplingParams or a tuple of stages, got {params!r:.60}")
    for stage in params:
        shape_of(stage)
    stages = params if params and isinstance(params[-1], Draw) else (*params, Gumbel())
    if any(isinstance(stage, Draw) for stage in stages[:-1]):
        raise ValueError(f"a pipeline has one draw, its last stage, got {stages}")
    return stages


def simplify(stages: Pipeline) -> Pipeline:
    """A shorter pipeline with the same draws: no neutral stages, and greedy told as such.

    Temperature 0, top_k 1 and a greedy draw take the first token of the order as of their place. Scales and cuts since
    the last shift cannot change which that is; of what comes after only a shift can matter, by banning that token.
    """
    stages = tuple(stage for stage in stages if not stage.neutral)
    place = next((i for i, stage in enumerate(stages) if stage.greedy), None)
    if place is None:
        return stages
    shifts = [i for i, stage in enumerate(stages) if isinstance(stage, Shift)]
    start = max((i + 1 for i in shifts if i < place), default=0)
    later = [stages[i] for i in shifts if i > place]
    return (*stages[:start], *([stages[place], *later] if later else []), Greedy())


@dataclass(frozen=True)
class Plan:
    """What will run: the pipeline as asked for, as simplified, and the kernel that runs it, with the reason."""

    asked: Pipeline
    stages: Pipeline
    backend: str
    why: str

    def __str__(self) -> str:
        lines, left = [f"{self.backend} backend: {self.why}"], list(self.stages)
        for stage in self.asked:
            stays = left[:1] == [stage]
            note = "" if stays else "  (left out: it cannot change the draw)"
            lines.append(f"  {shape_of(stage).lower():7} {stage!r}{note}")
            left = left[stays:]
        return "\n".join([*lines, *(f"  {shape_of(stage).lower():7} {stage!r}" for stage in left)])


def explain(params: Params, device: str = "cpu") -> Plan:
    """How these parameters would run on a device ("cpu" only, so far). Print it, or read its fields."""
    if device != "cpu":
        raise ParameterError("device", f"device must be 'cpu' (there is no CUDA backend yet), got {device!r}")
    asked = as_pipeline(params)
    return Plan(asked, simplify(asked), "reference", "float64, sort and walk; no compiled backend exists yet")


def sample(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    backend: str = "auto",
) -> NDArray[np.int64]:
    """Draw one token per row. Stateless: int64 [B].

    logits_BV: float [B, V], NumPy or torch. params: one for all rows, or a list of one per row. step: the position of
    the token in the output (the noise depends on it), one for all or one per row. prompt_ids, output_ids: a list of
    token ids per row, for penalties. Rows with the same parameters and logits draw the same token, unless the seed is
    None. Raises LogitsError, with the other rows' tokens, if a row holds NaN, +inf or no finite score.
    """
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, backend)
    steps = _per_row(step, len(batch), "step")
    tokens_B, errors = np.full(len(batch), -1, dtype=np.int64), {}
    for row, (logits_V, stages, history) in enumerate(batch):
        seed = getattr(stages[-1], "seed", None)
        seed = noise.fresh_seed() if seed is None else seed
        try:
            tokens_B[row] = reference.draw(logits_V, stages, seed, steps[row], history)
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors, tokens_B)
    return tokens_B


def probabilities(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    backend: str = "auto",
) -> NDArray[np.float64]:
    """The distribution that ``sample`` draws from, after the whole pipeline: float64 [B, V]. Arguments as there."""
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, backend)
    p_BV, errors = np.zeros(batch.logits_BV.shape), {}
    for row, (logits_V, stages, history) in enumerate(batch):
        try:
            p_BV[row] = reference.probabilities(logits_V, stages, history)
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors)
    return p_BV


class _Batch:
    """The checked arguments of one call, row by row."""

    def __init__(self, logits_BV: Any, params: Any, prompt_ids: Any, output_ids: Any, backend: str) -> None:
        if backend not in BACKENDS:
            raise ParameterError("backend", f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.logits_BV = as_logits(logits_BV)
        rows, size = self.logits_BV.shape
        given = params if isinstance(params, list) else [params]
        self.pipelines = [simplify(as_pipeline(one)) for one in given] * (1 if given is params else rows)
        if len(self.pipelines) != rows:
            raise ValueError(f"params has {len(given)} entries, but the logits have {rows} rows")
        prompts = _histories(prompt_ids, rows, size, "prompt_ids")
        outputs = _histories(output_ids, rows, size, "output_ids")
        self.histories = [History(*pair) for pair in zip(prompts, outputs, strict=True)]

    def __len__(self) -> int:
        return len(self.logits_BV)

    def __iter__(self) -> Any:
        return zip(self.logits_BV, self.pipelines, self.histories, strict=True)


def as_logits(logits: Any) -> NDArray[np.float32]:
    """A NumPy array or torch tensor of floats [B, V] as float32; no copy where none is needed."""
    if hasattr(logits, "detach"):  # a torch tensor; NumPy has no bfloat16
        logits = logits.detach()
        logits = (logits.float() if logits.is_floating_point() else logits).cpu().numpy()
    array = np.asarray(logits)
    if array.ndim != 2 or array.shape[1] == 0:
        raise ValueError(f"logits must have the shape [rows, vocabulary], got {list(array.shape)}")
    if array.dtype.kind != "f":
        raise TypeError(f"logits must be floating-point numbers, got {array.dtype}")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which is reported for its row
        return array.astype(np.float32, copy=False)


def _per_row(value: Any, rows: int, name: str) -> list[int]:
    values = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries, but the logits have {rows} rows")
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | np.integer) or not 0 <= one < 2**64:
            raise ParameterError(name, f"{name} must be an integer >= 0 and < 2**64, got {one!r}")
    return [int(one) for one in values]


def _histories(lists: Any, rows: int, size: int, name: str) -> list[NDArray[np.int64]]:
    if lists is None:
        return [np.zeros(0, np.int64)] * rows
    if len(lists) != rows:
        raise ValueError(f"{name} must hold one list of token ids per row: {rows} rows, got {len(lists)}")
    made = [np.asarray(ids) for ids in lists]
    for ids in made:
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise TypeError(f"{name} must hold one list of token ids per row, got {ids!r:.60}")
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise ValueError(f"{name} holds token ids outside the vocabulary (0..{size - 1})")
    return [ids.astype(np.int64) for ids in made]


def to_json(stages: Pipeline) -> str:
    """A pipeline as JSON: a list of [stage name, {parameter: value}]."""
    return json.dumps([[stage.name, _values(stage)] for stage in stages])


def _values(stage: Stage) -> dict[str, Any]:
    values = {attribute: getattr(stage, attribute) for attribute in stage.parameters}
    return {a: {str(k): x for k, x in v.items()} if isinstance(v, Mapping) else v for a, v in values.items()}


def from_json(text: str) -> Pipeline:
    """The inverse of to_json. Raises ParameterError for unknown stages or parameters, or values out of range."""
    stages = []
    pairs = read_json(text, "pipeline")
    for pair in pairs if isinstance(pairs, list) else [pairs]:
        match pair:
            case [str(name), dict(values)]:
                stages.append(_stage(name, values))
            case _:
                raise ParameterError("pipeline", "a pipeline in JSON is a list of [stage name, {parameter: value}]")
    return tuple(stages)


def _stage(name: str, values: Mapping[str, Any]) -> Stage:
    if name not in STAGES:
        raise unknown(name, STAGES, "stage")
    for attribute in values:
        if attribute not in STAGES[name].parameters:
            raise unknown(attribute, STAGES[name].parameters, f"parameter of {name}")
    return STAGES[name](**values)
