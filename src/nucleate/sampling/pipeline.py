"""Pipelines: tuples of stages, checked and simplified."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from nucleate.sampling.companion import split_combine
from nucleate.sampling.dispatch.fused_pipeline import FusedPipeline, to_fused_pipeline
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
from nucleate.sampling.stages.selection.greedy import Greedy
from nucleate.sampling.stages.selection.gumbel import Gumbel


class RequestParams(ABC):
    """The sampling parameters of a request: the base of ``SamplingParams``."""

    __slots__ = ()
    seed: int | None

    @abstractmethod
    def build_pipeline(self, end_ids: tuple[int, ...] = (), tokenizer: TextEncoder | None = None) -> Pipeline:
        """The stages that the parameters describe. end_ids: the token ids that end the output."""

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
