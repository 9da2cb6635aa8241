"""Pipelines: tuples of stages, checked and simplified, and those that the fused kernel runs, as its parameters.

The fused kernel runs the pipelines of most requests: bias, penalties and bans, temperature, top-n-sigma, top-k, min-p,
top-p and a Gumbel draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple, Self

from nucleate.sampling.companion import split_combine
from nucleate.sampling.rules import adds_listed_value, adds_value, bans_tokens
from nucleate.sampling.stage import (
    Ceiling,
    Combine,
    Draw,
    Pipeline,
    Prefix,
    Scale,
    Shift,
    Stage,
    Tap,
    TextEncoder,
    Transform,
    shape_of,
)
from nucleate.sampling.stages.penalties.repetition import Frequency, Presence, Repetition
from nucleate.sampling.stages.selection import Greedy, Gumbel
from nucleate.sampling.stages.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP


class RequestParams(ABC):
    """The sampling parameters of a request: the base of ``SamplingParams``."""

    __slots__ = ()
    seed: int | None

    @abstractmethod
    def build_pipeline(self, end_ids: tuple[int, ...] = (), tokenizer: TextEncoder | None = None) -> Pipeline:
        """The stages that the parameters describe. end_ids: the token ids that end the output."""

    @abstractmethod
    def with_defaults(self, defaults: Self) -> Self:
        """These parameters, with the values of ``defaults`` for fields that were not given."""

    @property
    @abstractmethod
    def cacheable(self) -> bool:
        """Whether caches may keep the parameters and their pipeline: they are small."""

    @abstractmethod
    def check_for_sampler(self, end_ids: tuple[int, ...] = ()) -> None:
        """Raise ParameterError for parameters that a ``Sampler`` alone cannot apply."""


Params = RequestParams | Pipeline
"""The parameters of one row: a SamplingParams, or a tuple of stages (a Gumbel draw is added if there is no draw)."""


def as_pipeline(params: Params) -> Pipeline:
    """The stages of parameters, or a checked tuple: at most one Combine, first; at most one Tap; one Draw, last."""
    if isinstance(params, RequestParams):
        return params.build_pipeline()
    if not isinstance(params, tuple) or not all(isinstance(stage, Stage) for stage in params):
        hint = "; a pipeline is a tuple: (stage,)" if isinstance(params, Stage) else ""
        hint = "; pass SamplingParams(**fields)" if isinstance(params, Mapping) else hint
        raise TypeError(f"params must be a SamplingParams or a tuple of stages, got {params!r:.60}{hint}")
    for stage in params:
        shape_of(stage)
    if any(isinstance(stage, Draw) for stage in params[:-1]):
        raise ValueError(f"a pipeline has one draw, its last stage, got {params}")
    if any(isinstance(stage, Combine) for stage in params[1:]):
        raise ValueError(f"a pipeline has at most one Combine, its first stage, got {params}")
    if sum(isinstance(stage, Tap) for stage in params) > 1:
        raise ValueError(f"a pipeline has at most one Tap, got {params}")
    return params if params and isinstance(params[-1], Draw) else (*params, Gumbel())


def seed_of(params: object, stages: Pipeline) -> int | None:
    """The seed of request parameters, or of the draw at the end of stages. XTC needs one even if the draw is greedy."""
    return params.seed if isinstance(params, RequestParams) else getattr(stages[-1], "seed", None)


def simplify(stages: Pipeline) -> Pipeline:
    """An equivalent shorter pipeline: without neutral stages, and with an explicit greedy draw where it is greedy.

    Temperature 0, top_k 1, top_p 0 and a greedy draw select the most likely token at their position. Stages before
    that which cannot change that token are removed: those after the last Shift, typical-p, Ceiling or
    non-monotone Scale. Of the later stages only Shifts matter, as they may ban that token. Stages before a Tap stay.
    """
    stages = tuple(stage for stage in stages if not stage.neutral)
    tap = next((i + 1 for i, stage in enumerate(stages) if isinstance(stage, Tap)), 0)
    head, stages = stages[:tap], stages[tap:]
    place = next((i for i, stage in enumerate(stages) if stage.greedy), None)
    if place is None:
        return head + stages
    start = max((i + 1 for i, stage in enumerate(stages[:place]) if _may_change_top_token(stage)), default=0)
    later = [stage for stage in stages[place + 1 :] if isinstance(stage, Shift)]
    return (*head, *stages[:start], *([stages[place], *later] if later else []), Greedy())


class PreparedPipeline(NamedTuple):
    """A checked and simplified pipeline, ready for dispatch."""

    given: Pipeline  #: checked
    stages: Pipeline  #: simplified, without ``combine``
    fused: FusedPipeline | str  #: for the fused kernel, or the reason why it cannot run the pipeline
    combine: Combine | None = None  #: the first stage, if it is one; ``stages`` are the others


def prepared(params: Params | PreparedPipeline, end_ids: tuple[int, ...] = ()) -> PreparedPipeline:
    """Check and simplify the pipeline of parameters. end_ids: see ``SamplingParams.build_pipeline``."""
    if isinstance(params, PreparedPipeline):
        return params
    if isinstance(params, RequestParams):
        return (_prepared if params.cacheable else _prepared.__wrapped__)(params, end_ids)
    given = as_pipeline(params)
    combine, others = split_combine(given)
    return PreparedPipeline(given, (stages := simplify(others)), to_fused_pipeline(stages), combine)


@lru_cache(maxsize=1024)
def _prepared(params: RequestParams, end_ids: tuple[int, ...]) -> PreparedPipeline:
    """Cached: servers receive the same parameters many times."""
    return prepared(params.build_pipeline(end_ids))


def _may_change_top_token(stage: Stage) -> bool:
    """Whether a stage may change which token is the most likely."""
    match stage:
        case Scale():
            return not stage.monotone
        case Prefix():
            return type(stage).order is not Prefix.order
        case _:
            return isinstance(stage, Shift | Ceiling | Transform)


REPETITION, FREQUENCY, PRESENCE = range(3)
"""Penalties: divide or multiply by the parameter; subtract it per occurrence in the output; subtract it once."""

PenaltyRules = tuple[tuple[int, float], ...]


class CountPenalties(NamedTuple):
    """Consecutive penalties with the same window: their kinds and parameters."""

    window: int | None
    rules: PenaltyRules


LogitEdit = CountPenalties | Shift
"""A logit edit before truncation: penalties, or a Shift that adds its list or bans unlisted tokens."""


class FusedParams(NamedTuple):
    """The parameters of the fused kernel, in the order in which it applies them. The defaults have no effect."""

    t: float = 1.0  #: temperature
    sigmas: float = 0.0  #: top-n-sigma
    k: int = 0  #: top-k
    m: float = 0.0  #: min-p
    p: float = 1.0  #: top-p
    late_m: float = 0.0  #: min-p after top-p
    late_t: float = 1.0  #: temperature after truncation


class FusedPipeline(NamedTuple):
    """A pipeline of the fused kernel. The bitmask of a step is passed with the logits, not as an edit."""

    tap: Tap | None  #: the raw logprobs to report
    edits: tuple[LogitEdit, ...]
    params: FusedParams
    values: Shift | None = None  #: adds its values to the logits before the kernel runs


TEMPERATURES = 1e-4, 1e4
"""The range of temperatures for which float32 suffices in the fused kernel."""


def to_fused_pipeline(stages: Pipeline) -> FusedPipeline | str:
    """Convert a simplified pipeline for the fused kernel; or return why that is not possible."""
    tap = stages[0] if isinstance(stages[0], Tap) else None
    stages_after_tap = stages[tap is not None :]
    first, values = stages_after_tap[0], None
    if isinstance(first, Shift) and first.touches == "all":
        if not adds_value(first):
            return f"{first!r} has a rule that the fused kernel does not support"
        values, stages_after_tap = first, stages_after_tap[1:]
    end = next(i for i, stage in enumerate(stages_after_tap) if not isinstance(stage, Shift))
    edits = to_logit_edits([stage for stage in stages_after_tap[:end] if isinstance(stage, Shift)])
    if isinstance(edits, str):
        return edits
    params = to_fused_params(stages_after_tap[end:])
    return params if isinstance(params, str) else FusedPipeline(tap, edits, params, values)


def to_logit_edits(shifts: list[Shift]) -> tuple[LogitEdit, ...] | str:
    """Convert Shifts to logit edits, joining penalties that count the same tokens; or return why not."""
    edits: list[LogitEdit] = []
    for counted, run in groupby(shifts, lambda shift: (shift.window,) if _penalty(shift) else None):
        if counted:
            edits.append(CountPenalties(counted[0], tuple(rule for shift in run if (rule := _penalty(shift)))))
            continue
        for shift in run:
            if not (adds_listed_value if shift.touches == "listed" else bans_tokens)(shift):
                return f"{shift!r} has a rule that the fused kernel does not support"
            if shift.touches in ("seen", "output", "all"):
                return f"{shift!r} is not supported by the fused kernel"
            if shift.touches != "masked":
                edits.append(shift)
    return tuple(edits)


def _penalty(shift: Shift) -> tuple[int, float] | None:
    """The kind and the parameter of a penalty; None for other Shifts."""
    match shift:
        case Repetition(r):
            return REPETITION, r
        case Frequency(f):
            return FREQUENCY, f
        case Presence(a):
            return PRESENCE, a
    return None


def to_fused_params(stages: tuple[Stage, ...]) -> FusedParams | str:
    """Convert temperatures, truncation and the draw to parameters of the fused kernel; or return why not."""
    result = FusedParams(), 0
    for stage in stages[:-1]:
        added = _add_stage(*result, stage)
        if added is None:
            return f"{stage!r} is not supported by the fused kernel at this position"
        result = added
    params = result[0]
    if isinstance(stages[-1], Greedy):
        return FusedParams(t=0.0)
    for t in (params.t, params.late_t, params.t * params.late_t):
        if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
            return f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}"
    is_gumbel = isinstance(stages[-1], Draw) and type(stages[-1]).score is Gumbel.score
    return params if is_gumbel else f"{stages[-1]!r} is not supported by the fused kernel"


def _add_stage(params: FusedParams, position: int, stage: Stage) -> tuple[FusedParams, int] | None:
    """The parameters with those of one more stage, and the position reached in the kernel's order."""
    result = None
    match stage:
        case Temperature(t) if position < 3 and params.t == 1.0 and not params.sigmas:  # as before a top-k
            result = params._replace(t=t), max(position, 1)
        case TopNSigma(n, 0 | 1) if position < 2:
            result = params._replace(sigmas=n), 2
        case TopK(k, False) if position < 4 and not params.k:
            result = params._replace(k=k), max(position, 2)
        case MinP(m, 0 | 1) if position < 4 and not params.m:
            result = params._replace(m=m), 3
        case TopP(p, False, 0 | 1) if position < 4:
            result = params._replace(p=p), 4
        case MinP(m, 0 | 1) if position < 5:
            result = params._replace(late_m=m), 5
        case Temperature(t) if position < 6:
            result = params._replace(late_t=t), 6
    return result


class _Unreadable:
    """A history that raises when it is read."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def has_constant_listing(stage: Shift) -> bool:
    """Whether the list of a stage is the same in every step."""
    if type(stage).incremental_listing is not Shift.incremental_listing:
        return False
    try:
        stage.listing(_Unreadable())  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  # a user-defined stage may raise anything
        return False
    return True
