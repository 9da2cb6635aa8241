"""A pipeline is a tuple of stages: this simplifies it, runs it over a batch, and explains what will run it.

Without state: each call is a function of its arguments (and of a fresh seed, where none is given).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.readiness import compiled
from nucleate.outputs import StepLogprobs
from nucleate.sampling import noise
from nucleate.sampling.backends import reference
from nucleate.sampling.backends.numba.fused.edit_program import EditProgram
from nucleate.sampling.backends.numba.fused.row_table import RowTable
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline, chain_of
from nucleate.sampling.dispatch.route import HOT, check_device, dispatch
from nucleate.sampling.history import History
from nucleate.sampling.inputs import LogitsInput, check_count, check_ids, histories, masks, per_row, where
from nucleate.sampling.presets import with_mask
from nucleate.sampling.stage import Ceiling, Draw, Pipeline, Prefix, Scale, Shift, Stage, Tap, TextEncoder, shape_of
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel


class RequestParams(ABC):
    """What a request says of its sampling: the base of ``SamplingParams``."""

    __slots__ = ()
    seed: int | None

    @abstractmethod
    def pipeline(self, end_ids: tuple[int, ...] = (), speller: TextEncoder | None = None) -> Pipeline:
        """The stages that the parameters mean."""

    @abstractmethod
    def check_for_sampler(self, end_ids: tuple[int, ...] = ()) -> None:
        """Raise ParameterError for parameters that a sampler alone cannot honour."""


Params = RequestParams | Pipeline
"""What one row may be given: parameters, or the stages themselves (a draw is added if the last is none)."""


class LogitsError(ValueError):
    """Some rows have no token to draw. ``errors``: {row: why}; ``token_ids`` [B]: the draws, -1 in those rows."""

    def __init__(self, errors: Mapping[int, str], token_ids: NDArray[np.int64] | None = None) -> None:
        super().__init__(dict(errors), token_ids)  # both, so that it can be pickled
        self.errors, self.token_ids = dict(errors), token_ids

    def __str__(self) -> str:
        return "; ".join(f"row {row}: {why}" for row, why in self.errors.items())


def as_pipeline(params: Params) -> Pipeline:
    """The stages of parameters or of a tuple, checked: all of them stages, one draw, at the end, one Tap at most."""
    if isinstance(params, RequestParams):
        return params.pipeline()
    if not isinstance(params, tuple) or not all(isinstance(stage, Stage) for stage in params):
        raise TypeError(f"params must be a SamplingParams or a tuple of stages, got {params!r:.60}")
    for stage in params:
        shape_of(stage)
    stages = params if params and isinstance(params[-1], Draw) else (*params, Gumbel())
    if any(isinstance(stage, Draw) for stage in stages[:-1]):
        raise ValueError(f"a pipeline has one draw, its last stage, got {stages}")
    if sum(isinstance(stage, Tap) for stage in stages) > 1:
        raise ValueError(f"a pipeline reports logprobs at one place, got {stages}")
    return stages


def simplify(stages: Pipeline) -> Pipeline:
    """A shorter pipeline with the same draws and the same report: no neutral stages, and greedy told as such.

    Temperature 0, top_k 1 and a greedy draw take the first token of the order as of their place. What cannot change
    which that is goes, as far back as a stage that can: a shift, a typical cut, a ceiling, a scale that is not
    monotone. Of what comes after, only a shift can matter, by banning that token. What a Tap looks at stays as it is.
    """
    stages = tuple(stage for stage in stages if not stage.neutral)
    tap = next((i + 1 for i, stage in enumerate(stages) if isinstance(stage, Tap)), 0)
    told, stages = stages[:tap], stages[tap:]
    place = next((i for i, stage in enumerate(stages) if stage.greedy), None)
    if place is None:
        return told + stages
    start = max((i + 1 for i, stage in enumerate(stages[:place]) if _may_move_the_first(stage)), default=0)
    later = [stage for stage in stages[place + 1 :] if isinstance(stage, Shift)]
    return (*told, *stages[:start], *([stages[place], *later] if later else []), Greedy())


class PreparedPipeline(NamedTuple):
    """A pipeline, ready to be dispatched."""

    asked: Pipeline  #: as asked for, checked
    stages: Pipeline  #: simplified
    chain: FusedPipeline | str  #: what the hot chain does for it, or why it cannot


def prepared(params: Params, end_ids: tuple[int, ...] = ()) -> PreparedPipeline:
    """The pipeline of some parameters, ready to be dispatched. end_ids: see ``SamplingParams.pipeline``."""
    if isinstance(params, RequestParams):
        return _prepared(params, end_ids)
    asked = as_pipeline(params)
    return PreparedPipeline(asked, (stages := simplify(asked)), chain_of(stages))


@lru_cache(maxsize=1024)
def _prepared(params: RequestParams, end_ids: tuple[int, ...]) -> PreparedPipeline:
    """Cached, because a server gets the same parameters again and again, and these are values."""
    return prepared(params.pipeline(end_ids))


def _may_move_the_first(stage: Stage) -> bool:
    """Whether another token may be the first of the order after this stage."""
    match stage:
        case Scale():
            return not stage.monotone
        case Prefix():
            return type(stage).order is not Prefix.order
        case _:
            return isinstance(stage, Shift | Ceiling)


@dataclass(frozen=True)
class ExecutionPlan:
    """What will run: the pipeline as asked for, as simplified, and the path that runs it, with the reason."""

    asked: Pipeline
    stages: Pipeline
    backend: str  #: "reference", "cpu", "torch" or "triton"
    path: str  #: "hot chain", "generic path" or "reference"
    why: str  #: why not on a faster path; "" where there is none

    def __str__(self) -> str:
        where = self.backend if self.backend == self.path else f"{self.backend} backend, {self.path}"
        lines, left = [f"{where}: {self.why}" if self.why else where], list(self.stages)
        for stage in self.asked:
            stays = left[:1] == [stage]
            note = "" if stays else "  (left out: it cannot change the draw)"
            lines.append(f"  {shape_of(stage).lower():7} {stage!r}{note}")
            left = left[stays:]
        return "\n".join([*lines, *(f"  {shape_of(stage).lower():7} {stage!r}" for stage in left)])


def explain(
    params: Params, device: str = "cpu", *, vocab_size: int | None = None, rows: int = 1, backend: str = "auto"
) -> ExecutionPlan:
    """What a ``Sampler`` would run for these parameters now, as ``dispatch`` selects it. Print it, or read its fields.

    device: "cpu", "cuda", "cuda:1", "mps", "xpu"; it need not be there. vocab_size, rows: of the call; without
    vocab_size they are taken to be large. backend: as in ``sample`` and ``Sampler``. The answer for backend "auto" can
    change when kernels have been loaded, see ``warm``. Raises ParameterError for arguments that are wrong.
    """
    check_device(device)
    for name, count in (("vocab_size", vocab_size), ("rows", rows)):
        if count is not None:
            check_count(count, name)
    one = prepared(params)
    if vocab_size is not None:
        check_ids(one.stages, vocab_size)
    route = dispatch(one.stages, one.chain, vocab_size, rows, device=device, backend=backend)
    return ExecutionPlan(one.asked, one.stages, route.backend, route.path, route.why)


@cache
def _hot() -> Callable[[int], Any]:
    from nucleate.sampling.backends.numba.fused import fused_sampler  # it loads the compiler

    return fused_sampler.chains


@cache
def _generic() -> Any:
    from nucleate.sampling.backends.numba.composed import evaluation  # it loads the compiler

    return evaluation


def chains(size: int) -> Any:
    """The hot chain on the CPU, for rows of a size. Each thread has its own."""
    return _hot()(size)


def runner(fast: bool) -> Callable[..., reference.RowResult]:
    """Draws a row that the hot chain does not: the generic path on the CPU (fast), or the reference."""
    return _generic().run if fast else reference.run


def report(logits_V: NDArray[Any], token: int, wanted: tuple[int, tuple[int, ...]]) -> StepLogprobs:
    """The logprobs of a row of logits, from which a token was drawn on the CPU."""
    told: StepLogprobs = _generic().report(logits_V, token, wanted)
    return told


def chances(fast: bool) -> Callable[..., NDArray[np.float64]]:
    """Computes the distribution that a row is drawn from: on the CPU (fast), or by the reference."""
    return _generic().probabilities if fast else reference.probabilities


def survivors(fast: bool) -> Callable[..., reference.Survivors]:
    """Computes the tokens that a pipeline leaves: on the CPU (fast), or by the reference."""
    return _generic().survivors if fast else reference.survivors


def sample(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    backend: str = "auto",
) -> Any:
    """Draw one token per row. Stateless: int64 [B], a NumPy array or, for a torch tensor of logits, a tensor.

    logits_BV: float [B, V], NumPy or torch. params: one for all rows, or a list of one per row. step: the position of
    the token in the output (the noise depends on it), one for all or one per row. prompt_ids, output_ids: a list of
    token ids per row, for penalties. mask: int32 [B, V / 32], what a grammar allows, packed, lowest bit first. Stages
    with a state (mirostat, adaptive-p) are at its start; ``Sampler`` moves them on. Rows with the same parameters and
    logits draw the same token, unless the seed is None. Raises LogitsError, with the other rows' tokens, if a row holds
    NaN, +inf or no finite score.
    """
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, mask, backend)
    steps = per_row(step, len(batch), "step")
    tokens_B, errors = np.full(len(batch), -1, dtype=np.int64), {}
    seeds = [noise.fresh_seed() if seed is None else seed for seed in batch.seeds]
    _draw_chains(batch, seeds, steps, tokens_B)
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        if tokens_B[row] >= 0:
            continue
        try:
            tokens_B[row] = runner(fast)(logits_V, stages, seeds[row], steps[row], history).token
        except reference.RowError as error:
            errors[row] = str(error)
    tokens = batch.logits.like(tokens_B)
    if errors:
        raise LogitsError(errors, tokens)
    return tokens


def _draw_chains(batch: _Batch, seeds: list[int], steps: list[int], tokens_B: NDArray[np.int64]) -> None:
    """Draw the rows that the hot chain runs. One that it cannot draw from is left to others, which say why."""
    if not batch.chains:
        return
    size, table, programs = batch.logits.shape[1], RowTable(len(batch.chains)), []
    for row, chain in batch.chains.items():
        programs.append(EditProgram(chain.edits, batch.histories[row], size))
        table.add(row, chain.numbers, programs[-1].at, seeds[row], steps[row])
    part = table.part(table.rows, table.rows)
    masks_B = where([past.mask for past in batch.histories])
    chains(size).draw(batch.logits.lying(), len(table.rows), part.at, masks_B)
    tokens_B[table.rows] = part.tokens


def probabilities(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    backend: str = "auto",
) -> Any:
    """The distribution that ``sample`` draws from, after the whole pipeline: float64 [B, V]. Arguments as there.

    It is that of all seeds: with XTC, the average over what its coin may say.
    """
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, mask, backend)
    p_BV, errors = np.zeros(batch.logits.shape), {}
    for row, (logits_V, stages, history, fast) in enumerate(batch):
        try:
            p_BV[row] = chances(fast)(logits_V, stages, history)
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors)
    return batch.logits.like(p_BV)


class _Batch:
    """The checked arguments of one call, row by row."""

    def __init__(self, logits_BV: Any, params: Any, prompt_ids: Any, output_ids: Any, mask: Any, backend: str) -> None:
        self.logits = LogitsInput(logits_BV)
        rows, size = self.logits.shape
        compiled(backend, rows * size)  # it refuses a backend that does not exist
        given = params if isinstance(params, list) else [params]
        ready = [prepared(one) for one in given]
        for one in ready:
            check_ids(one.stages, size)
        many = 1 if given is params else rows
        if len(given) * many != rows:
            raise ValueError(f"params has {len(given)} entries, but the logits have {rows} rows")
        self.seeds = [getattr(one.asked[-1], "seed", None) for one in ready] * many  # coins need them, even if greedy
        self._pipelines = [one.stages if mask is None else with_mask(one.stages) for one in ready] * many
        routes = [dispatch(one.stages, one.chain, size, rows, backend=backend) for one in ready] * many
        self._fast = [route.backend == "cpu" for route in routes]
        hot = [one.chain if route.path == HOT else None for one, route in zip(ready * many, routes, strict=True)]
        self.chains = {row: chain for row, chain in enumerate(hot) if isinstance(chain, FusedPipeline)}
        prompts = histories(prompt_ids, rows, size, "prompt_ids")
        outputs = histories(output_ids, rows, size, "output_ids")
        self.histories = [History(*three) for three in zip(prompts, outputs, masks(mask, rows, size), strict=True)]

    def __len__(self) -> int:
        return len(self.logits)

    def __iter__(self) -> Any:
        """Per row: logits, pipeline, history, and whether the CPU backend runs it."""
        return zip(self.logits, self._pipelines, self.histories, self._fast, strict=True)
