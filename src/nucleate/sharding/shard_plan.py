"""Decides from a row's pipeline what its shards exchange. Knows no tensor and no process.

Every cut keeps a prefix of one ranking. If the first truncation of a pipeline can be bounded from the summaries of the
groups, only the tokens above the bound are exchanged: a sampler over them returns what it returns over the whole row.
"""

from __future__ import annotations

from typing import NamedTuple

from nucleate.sampling.dispatch.fused_pipeline import TEMPERATURES
from nucleate.sampling.dispatch.rules import rules_of_stage
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.min_keep import min_keep_of
from nucleate.sampling.stage import Combine, Draw, Pipeline, Shift, Stage, Tap
from nucleate.sampling.stages.selection.gumbel import Gumbel
from nucleate.sampling.stages.temperature.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_p import TopP

CANDIDATES, TOP_P, GROUPS, WHOLE = "candidates", "top-p", "groups", "whole row"
"""What is exchanged: the tokens that a top-k, a min-p or a greedy draw may keep; those that a top-p keeps; the winner
of a draw without truncation; all logits of the row."""

MAX_CANDIDATES = 2048
"""The most tokens of a row that one rank sends; if there are more, the whole row is exchanged."""

MAX_LOGPROBS = 64
"""The most logprobs of a row that are computed without the whole row."""


class RowPlan(NamedTuple):
    """What the shards of a row exchange."""

    path: str  #: CANDIDATES, TOP_P, GROUPS or WHOLE
    why: str = ""  #: why the whole row is needed
    shifts: tuple[Shift, ...] = ()  #: at the beginning of the pipeline
    t: float = 1.0  #: the temperature before the first truncation
    k: int = 0  #: of CANDIDATES: the number of highest-ranked tokens that are needed; 0: no limit
    m: float = 0.0  #: of CANDIDATES: the minimum probability relative to the top; 0: none
    top_p: TopP | None = None
    tap: Tap | None = None  #: reports raw logprobs
    kept: Pipeline | None = None  #: samples from the exchanged tokens; None: the row's own pipeline does

    @property
    def needs_mass(self) -> bool:
        """Whether the masses of all groups are needed, and not only their maxima."""
        return self.path in (TOP_P, GROUPS)


def plan_of(stages: Pipeline, combine: Combine | None = None) -> RowPlan:
    """The plan of a simplified pipeline. combine: the stage that combines its logits with those of a companion."""
    if combine is not None:
        return RowPlan(WHOLE, f"{combine!r} reads two whole rows")
    tap = stages[0] if isinstance(stages[0], Tap) else None
    body = stages[tap is not None :]
    if tap is not None and max(tap.request[0], len(tap.request[1])) > MAX_LOGPROBS:
        return RowPlan(WHOLE, f"it reports more than {MAX_LOGPROBS} logprobs")
    end = next(i for i, stage in enumerate(body) if not isinstance(stage, Shift))
    shifts = tuple(stage for stage in body[:end] if isinstance(stage, Shift))
    scale = body[end] if type(body[end]) is Temperature and not body[end].greedy else None
    rest, t = body[end + (scale is not None) :], getattr(scale, "t", 1.0)
    if not TEMPERATURES[0] <= t <= TEMPERATURES[1]:
        return RowPlan(WHOLE, f"its temperature is not from {TEMPERATURES[0]:g} to {TEMPERATURES[1]:g}")
    plan = _cut(rest)
    if plan.path == WHOLE:
        return plan
    kept = None
    if plan.path == TOP_P:
        kept = (*body[: len(body) - len(rest)], *rest[1:])
    elif tap is not None:
        kept = body
    before = stages if kept is not None else shifts
    stateful = next((stage for stage in before if is_stateful(stage)), None)
    if stateful is not None:
        return RowPlan(WHOLE, f"{stateful!r} observes the whole row")
    return plan._replace(shifts=shifts, t=t, tap=tap, kept=kept)


def _cut(rest: Pipeline) -> RowPlan:
    """The plan for the stages after the Shifts and the temperature."""
    first, used = rest[0], 1
    if first.greedy:
        plan = RowPlan(CANDIDATES, k=1)
    elif type(first) is TopP and min_keep_of(first) == 1:
        plan = RowPlan(TOP_P, top_p=first)
    elif isinstance(first, Draw):
        plan, used = RowPlan(GROUPS), 0
        if type(first).score is not Gumbel.score or first.uniforms != "each":
            return RowPlan(WHOLE, f"{first!r} without truncation reads the whole row")
    else:
        k, m, used = _bounds(rest)
        if not used:
            return RowPlan(WHOLE, f"{first!r} reads the whole row")
        if k > MAX_CANDIDATES and not m:
            return RowPlan(WHOLE, f"{first!r} may keep more than {MAX_CANDIDATES} tokens")
        plan = RowPlan(CANDIDATES, k=0 if k > MAX_CANDIDATES else k, m=m)
    total = next((stage for stage in rest[used:] if _reads_total(stage)), None)
    return plan if total is None else RowPlan(WHOLE, f"{total!r} refers to the whole row")


def _bounds(rest: Pipeline) -> tuple[int, float, int]:
    """k and m of consecutive top-k and min-p stages, and their number. Their common survivors reach both bounds."""
    k, m = 0, 0.0
    for used, stage in enumerate(rest):
        if type(stage) is TopK and not k:
            k = stage.k
        elif type(stage) is MinP and not m and min_keep_of(stage) == 1:
            m = stage.m
        else:
            return k, m, used
    return k, m, len(rest)


def _reads_total(stage: Stage) -> bool:
    """Whether a stage reads the mass before the first truncation."""
    return any("full_mass" in rule.row for rule in rules_of_stage(stage).values())
