"""Draws the effect of a stage on a fixed distribution, as an SVG inside the page, with the colours of its theme."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import nucleate as nc
from generate.stage_facts import OUTPUT, PROMPT, Facts
from nucleate.sampling.stage import Combine, Draw
from nucleate.sampling.stages import Gumbel

PROBABILITIES = (0.30, 0.22, 0.14, 0.10, 0.07, 0.05, 0.04, 0.03, 0.02, 0.015, 0.01, 0.005)
"""The distribution of the plots, by token id."""
COMPANION = (0.40, 0.10, 0.20, 0.05, 0.10, 0.02, 0.05, 0.02, 0.02, 0.02, 0.01, 0.01)
DRAWS = 2000
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 500, 220, 44, 26, 30


@dataclass(frozen=True)
class Effect:
    """The probability of each token after a stage, and the trace's reason."""

    after: Sequence[float]
    why: str
    label: str = "after"


def effect(facts: Facts) -> Effect:
    """Return what the example of a stage does to the distribution of the plots."""
    logits_V, stage = np.log(np.array(PROBABILITIES, np.float32)), facts.example
    if isinstance(stage, Draw):
        return Effect(_drawn(logits_V, stage), "", f"share of {DRAWS:,} draws")
    more: dict[str, Any] = {"prompt_ids": PROMPT, "output_ids": OUTPUT}
    if facts.companion:
        more["companion"] = np.log(np.array(COMPANION, np.float32))
    if facts.masked:
        more["mask"] = np.array([0b010101010101], np.int32)
    steps = nc.trace(logits_V, (stage, Gumbel(seed=1)), seed=1, **more).steps
    step = steps[0] if isinstance(stage, Combine) else steps[1]
    return Effect(step.probabilities.tolist(), step.why)


def _drawn(logits_V: Any, draw: Draw) -> list[float]:
    """The share of each token among draws: with one seed each, and for a keyed draw one context each."""
    logits_BV, numbers = np.tile(logits_V, (DRAWS, 1)), np.random.default_rng(0)
    if draw.keyed:
        outputs = numbers.integers(0, len(logits_V), (DRAWS, 4)).tolist()
        tokens = nc.sample(logits_BV, (draw,), output_ids=outputs)
    else:
        seeds = [{"seed": seed} if "seed" in draw.parameters else {} for seed in range(DRAWS)]
        tokens = nc.sample(logits_BV, [(type(draw)(**seed),) for seed in seeds])
    return (np.bincount(tokens, minlength=len(logits_V)) / DRAWS).tolist()


def svg(name: str, shown: Effect) -> str:
    """Return the plot: bars of the distribution before and after the stage."""
    before, after = PROBABILITIES, shown.after
    highest = max(0.1, np.ceil(max(*before, *after) * 10) / 10)
    slot = (WIDTH - LEFT) / len(before)

    def bar(token: int, p: float, share: float, kind: str) -> str:
        tall, wide = (HEIGHT - TOP - BOTTOM) * p / highest, slot * share
        x, y = LEFT + slot * (token + 0.5) - wide / 2, HEIGHT - BOTTOM - tall
        title = f"<title>token {token}: {p:.3f}</title>"
        return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}">{title}</rect>'

    grid = []
    for p in np.linspace(0, highest, 3):
        y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * p / highest
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{p:.2f}</text>')
    ids = [
        f'<text x="{LEFT + slot * (token + 0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{token}</text>'
        for token in range(len(before))
    ]
    bars = [bar(token, p, 0.8, "before") for token, p in enumerate(before)]
    bars += [bar(token, p, 0.44, "after") for token, p in enumerate(after)]
    legend = []
    for x, kind, text in ((LEFT, "before", "before"), (LEFT + 90, "after", shown.label)):
        legend += [
            f'<rect class="{kind}" x="{x}" y="4" width="12" height="12"/>',
            f'<text x="{x + 18}" y="14">{text}</text>',
        ]
    about = f"Probabilities of twelve tokens before and after the stage {name}"
    head = f'<svg class="stage-plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{about}">'
    return "\n".join([head, *grid, *bars, *ids, *legend, "</svg>"])
