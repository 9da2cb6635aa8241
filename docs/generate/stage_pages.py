"""Generates a page per stage from its file: meaning, formula, source, parameters, effect, cost, names elsewhere."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import nucleate as nc
from generate import ROOT
from generate.stage_definitions import differences, semantics
from generate.stage_facts import FACTS, Facts
from generate.stage_plots import effect, svg
from generate.stage_table import shown
from nucleate.sampling.stage import Stage, Tap, shape_of
from nucleate.sampling.stages import STAGES

RULES = ("apply", "floor", "weight", "target", "order", "ceiling", "score", "request", "values", "listing", "noise_key")
"""The methods of stages that are formulas."""
SOURCE = re.compile(r"arXiv (\d{4}\.\d{4,5})")
RESULTS = ROOT / "benchmarks" / "results" / "stages.json"


def stage_page(kind: type[Stage]) -> str:
    """Return the page of a stage."""
    facts = FACTS[kind.name]
    parts = [
        f"# {kind.name}",
        _linked((inspect.getdoc(kind) or "").replace("``", "`")),
        _facts(kind),
        "## Meaning",
        *_meaning(kind),
        *_effect(kind, facts),
        *_parameters(kind),
        *_cost(kind.name),
        *_elsewhere(kind, facts),
        "## Python",
        f"```{{eval-rst}}\n.. autoclass:: nucleate.stages.{kind.__name__}\n   :no-index-entry:\n```",
    ]
    return "\n\n".join(parts) + "\n"


INDEX = """\
# Stages

A stage is one step between the logits and the token. By default, the stages of a request run by rank.
[The meaning of every stage](../../semantics.md) is normative; the pages here are generated from the stages.

| rank | stage | shape | description |
|---|---|---|---|
"""


def stage_index() -> str:
    """Return the page that lists all stages."""
    rows = [
        f"| {kind.rank} | [{name}]({name}.md) | {shape_of(kind)} | {_first_line(kind)} |"
        for name, kind in STAGES.items()
    ]
    return INDEX + "\n".join(rows) + "\n"


def _first_line(kind: type[Stage]) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]


def _facts(kind: type[Stage]) -> str:
    presets = [f"`{name}`" for name, entries in nc.PRESETS.items() if kind.name in _names(entries)]
    module = (sys.modules[kind.__module__].__doc__ or "").strip()
    path = kind.__module__.replace(".", "/")
    rows = [
        f"**Source**: {_linked(' '.join(module.split()))}",
        f"**Shape**: [{shape_of(kind)}](../api/stage.md), **rank** {kind.rank:g} in the default order",
        f"**Orders** (presets) with this stage: {', '.join(presets)}" if presets else "",
        f"**File**: `src/{path}.py`",
    ]
    return "\n".join(f"- {row}" for row in rows if row)


def _names(entries: Any) -> list[str]:
    return [entry if isinstance(entry, str) else entry[0] for entry in entries]


def _linked(text: str) -> str:
    """Return prose with links to papers and addresses."""
    text = SOURCE.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"(?<![(<])(https://[^\s)]+[^\s).,])", r"<\1>", text)


def _meaning(kind: type[Stage]) -> Iterator[str]:
    yield from semantics(kind.name)
    rules = [
        textwrap.dedent(inspect.getsource(vars(kind)[name])).rstrip()
        for name in RULES
        if inspect.isfunction(vars(kind).get(name)) and vars(kind)[name].__qualname__.startswith(kind.__name__)
    ]
    if rules:
        yield "Its rule, where `x` is the score of a token ([the other arguments](../api/stage.md)):"
        yield "\n\n".join(["```python", *rules]).replace("```python\n\n", "```python\n") + "\n```"


def _effect(kind: type[Stage], facts: Facts) -> Iterator[str]:
    if issubclass(kind, Tap):
        return
    shown_effect = effect(facts)
    yield "## Effect"
    example = f"`{facts.example!r}`".replace(", key=WatermarkKey(...)", "")
    yield f"{example} on a distribution of twelve tokens, by token id. {facts.note}".rstrip()
    yield svg(kind.name, shown_effect)
    if shown_effect.why:
        yield f"The trace says: `{shown_effect.why}`."


def _parameters(kind: type[Stage]) -> Iterator[str]:
    if not kind.parameters:
        return
    yield "## Parameters"
    for attribute, p in kind.parameters.items():
        names = f"field and JSON name `{p.name}`, flag `--{p.name.replace('_', '-')}`"
        where = names if p.public else "of the stage only"
        neutral = f"; the stage has no effect with {shown(p.neutral)}" if _is_shown(p.neutral) else ""
        lines = [
            f"`{attribute}`",
            f": {p.help}.",
            "",
            f"  Values: {p.allowed}; default {shown(p.default)}{neutral}; {where}",
        ]
        yield "\n".join(lines)


def _is_shown(neutral: Any) -> bool:
    return isinstance(neutral, int | float) and not isinstance(neutral, bool)


@cache
def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8"))
    return found


def _cost(name: str) -> Iterator[str]:
    results = _results()
    measured = results["stages"].get(name)
    if measured is None:
        return
    times = measured["microseconds"]
    with_stage = times["with"]
    if "without" in times:
        compared = f"{times['without']:.0f} µs without it ({with_stage / times['without']:.2f} times)"
    else:
        compared = f"{times['numpy max']:.1f} µs for NumPy's max of the same logits"
    yield "## Cost"
    yield (
        f"`{measured['stage']}`: {with_stage:.0f} µs per token, {compared}. Medians of one run of "
        f"`benchmarks/stages.py` on one thread ({results['machine']}): one row of {results['vocabulary']:,} "
        f"peaked logits, {results['history']} tokens in prompt and output each. Times depend on the machine; "
        f"compare the ratio. In reads of the row, which are the time of NumPy's max of it: {_reads(measured['reads'])}."
    )


def _reads(found: dict[str, float]) -> str:
    return ", ".join(f"{one:.0f} on {kind} logits" for kind, one in found.items())


def _elsewhere(kind: type[Stage], facts: Facts) -> Iterator[str]:
    found = [*differences(kind, facts)]
    if not facts.others and not found:
        return
    yield "## Other projects"
    if facts.others:
        yield "\n".join(f"- {project}: {names}" for project, names in facts.others.items())
    if found:
        yield "Differences, from [the list of all differences](../../differences.md):"
        yield "\n".join(found)
