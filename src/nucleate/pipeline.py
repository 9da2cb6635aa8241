"""A pipeline is a tuple of stages: this simplifies it, plans it, runs it over a batch, and says what it did.

Refuses to hold state: each call is a function of its arguments (and of a fresh seed, where none is given).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends import reference
from nucleate.backends.cpu.special.program import Program
from nucleate.backends.cpu.special.table import Table
from nucleate.core import noise
from nucleate.core.history import History
from nucleate.core.stage import Ceiling, Draw, Pipeline, Prefix, Scale, Shift, Stage, Tap, shape_of
from nucleate.kernels import compiled
from nucleate.params import SamplingParams
from nucleate.placing import placed
from nucleate.plan import Chain, Numbers, chain_of, on_device
from nucleate.presets import with_mask
from nucleate.rows import Logits, check_ids, histories, masks, per_row, where
from nucleate.stages.greedy import Greedy
from nucleate.stages.gumbel import Gumbel

Params = SamplingParams | Pipeline
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
    if isinstance(params, SamplingParams):
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


def prepared(params: Params) -> tuple[Pipeline, Pipeline, Chain | str]:
    """The stages of parameters as asked for, as simplified, and ``plan.chain_of`` these."""
    if isinstance(params, SamplingParams):
        return _prepared(params)
    asked = as_pipeline(params)
    return asked, (stages := simplify(asked)), chain_of(stages)


@lru_cache(maxsize=1024)
def _prepared(params: SamplingParams) -> tuple[Pipeline, Pipeline, Chain | str]:
    """Kept, as a server is asked for the same again and again, and these are values."""
    return prepared(params.pipeline())


def _may_move_the_first(stage: Stage) -> bool:
    """Whether another token may be the first of the order after this stage."""
    match stage:
        case Scale():
            return not stage.monotone
        case Prefix():
            return type(stage).order is not Prefix.order
        case _:
            return isinstance(stage, Shift | Ceiling)


STAGED = {
    "triton": "one kernel for rows of this structure, made of the rules of its stages",
    "torch": "plain tensors, sorted, stage by stage from their rules",
}
"""How a device runs what is not the chain."""


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
    """How these parameters would run on a device: "cpu", "cuda", "cuda:1", "mps", "xpu". Print it, or read its fields.

    It need not be there. Raises ParameterError for a name that is none.
    """
    backend = None if device == "cpu" else on_device(device)
    asked, stages, chain = prepared(params)
    if backend is None:
        way = f"compiled stage by stage from their rules, because {chain}" if isinstance(chain, str) else None
        return Plan(asked, stages, "cpu", way or "the compiled chain")
    row = placed(stages, chain)
    if isinstance(row, str):
        return Plan(asked, stages, "cpu", f"on the host, logits and all, because {row}")
    if row.staged is not None:
        slow = row.staged.no_kernel if backend == "triton" else ""
        return Plan(asked, stages, backend, f"{STAGED['torch' if slow else backend]}, because {slow or chain}")
    on = {"triton": "two kernels for all rows", "torch": "plain tensors, sorted"}
    return Plan(asked, stages, backend, on[backend])


@cache
def _kernels() -> Callable[[int], Any]:
    from nucleate.backends.cpu.special import rows  # it loads the compiler

    return rows.chains


def chains(size: int) -> Any:
    """What runs the compiled chain, for rows of a size. Each thread has its own."""
    return _kernels()(size)


def runner(fast: bool) -> Callable[..., reference.Result]:
    """What draws a row that the compiled chain does not: compiled stage by stage, or the reference."""
    return _staged() if fast else reference.run


def chances(fast: bool) -> Callable[..., NDArray[np.float64]]:
    """What tells the distribution that a row is drawn from: compiled stage by stage, or the reference."""
    return _staged_chances() if fast else reference.probabilities


@cache
def _staged_chances() -> Callable[..., NDArray[np.float64]]:
    from nucleate.backends.cpu.staged import fuse  # it loads the compiler

    return fuse.probabilities


@cache
def _staged() -> Callable[..., reference.Result]:
    from nucleate.backends.cpu.staged import fuse  # it loads the compiler

    return fuse.run


def sample(
    logits_BV: Any,
    params: Params | Sequence[Params],
    *,
    step: int | Sequence[int] = 0,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    output_ids: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    backend: str = "auto",
) -> NDArray[np.int64]:
    """Draw one token per row. Stateless: int64 [B].

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
    fast = bool(len(batch)) and compiled(backend, len(batch) * batch.logits.shape[1])
    if fast:
        _draw_chains(batch, seeds, steps, tokens_B)
    run = runner(fast)
    for row, (logits_V, stages, history) in enumerate(batch):
        if tokens_B[row] >= 0:
            continue
        try:
            tokens_B[row] = run(logits_V, stages, seeds[row], steps[row], history).token
        except reference.RowError as error:
            errors[row] = str(error)
    if errors:
        raise LogitsError(errors, tokens_B)
    return tokens_B


def _draw_chains(batch: _Batch, seeds: list[int], steps: list[int], tokens_B: NDArray[np.int64]) -> None:
    """Draw the rows that fit the compiled chain; one it cannot draw from is left to others, to say why."""
    found = {row: one for row, stages in enumerate(batch.pipelines) if not isinstance(one := chain_of(stages), str)}
    if not found:
        return
    size, table, programs = batch.logits.shape[1], Table(len(Numbers._fields), len(found)), []
    for row, chain in found.items():
        programs.append(Program(chain.edits, batch.histories[row], size))
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
) -> NDArray[np.float64]:
    """The distribution that ``sample`` draws from, after the whole pipeline: float64 [B, V]. Arguments as there.

    It is that of all seeds: with XTC, the average over what its coin may say.
    """
    batch = _Batch(logits_BV, params, prompt_ids, output_ids, mask, backend)
    p_BV, errors = np.zeros(batch.logits.shape), {}
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

    def __init__(self, logits_BV: Any, params: Any, prompt_ids: Any, output_ids: Any, mask: Any, backend: str) -> None:
        compiled(backend, 0)  # it refuses one that does not exist
        self.backend = backend
        self.logits = Logits(logits_BV)
        rows, size = self.logits.shape
        given = params if isinstance(params, list) else [params]
        asked = [as_pipeline(one) for one in given]
        pipelines = [simplify(stages) for stages in asked]
        for stages in pipelines:
            check_ids(stages, size)
        self.pipelines = [stages if mask is None else with_mask(stages) for stages in pipelines]
        self.pipelines *= 1 if given is params else rows
        self.seeds = [getattr(stages[-1], "seed", None) for stages in asked]  # coins need them, also before Greedy
        self.seeds *= 1 if given is params else rows
        if len(self.pipelines) != rows:
            raise ValueError(f"params has {len(given)} entries, but the logits have {rows} rows")
        prompts = histories(prompt_ids, rows, size, "prompt_ids")
        outputs = histories(output_ids, rows, size, "output_ids")
        self.histories = [History(*three) for three in zip(prompts, outputs, masks(mask, rows, size), strict=True)]

    def __len__(self) -> int:
        return len(self.logits)

    def __iter__(self) -> Any:
        return zip(self.logits, self.pipelines, self.histories, strict=True)
