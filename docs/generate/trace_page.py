"""Generates the page of the trace's JSON from a trace. Fails if a member is not described."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

import nucleate as nc
from nucleate.sampling.stages import Gumbel, TopP

ABOUT = """\
# Trace schema

[`nc.trace`](api/trace.md) shows what each stage does to a row of logits; `Trace.to_json(top=20)` returns it as
JSON. [The inspector](../inspector.md) shows such traces.
"""
TRACE: Mapping[str, tuple[str, str]] = {
    "token_id": ("integer or null", "the sampled token; null if no token survived"),
    "error": ("string or null", "the reason, if there is no token"),
    "seed": ("integer", "the seed of the draw"),
    "step": ("integer", "the position of the token in the output"),
    "steps": ("array", "the logits, then one object per stage, in order"),
}
STEP: Mapping[str, tuple[str, str]] = {
    "stage": ("string", "the name of the stage; `logits` for the first object"),
    "shape": ("string", "the shape of the stage in lower case; empty for the logits"),
    "repr": ("string", "the stage with its parameters; empty for the logits"),
    "why": ("string", "the reason for what it did, with the deciding numbers"),
    "left": ("integer", "number of surviving tokens after it"),
    "entropy": ("number", "entropy of the distribution after it, in nats"),
    "touched": ("array of integers", "the first `top` ids, ascending, of surviving tokens whose score it changed"),
    "touched_count": ("integer", "number of all of them"),
    "removed": ("array of integers", "the first `top` ids, ascending, of tokens that it removed"),
    "removed_count": ("integer", "number of all of them"),
    "top": ("array of arrays", "the `top` most likely tokens after it as `[id, score, probability]`"),
}


def trace_page() -> str:
    """Return the page."""
    logits_V = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)).round(2)
    trace = nc.trace(logits_V, (TopP(0.75), Gumbel(seed=1)))
    example = json.loads(trace.to_json(top=2))
    _check(example, TRACE)
    for step in example["steps"]:
        _check(step, STEP)
    text = json.dumps(example, indent=1)
    return "\n".join(
        [
            ABOUT,
            "## Trace\n",
            *_table(TRACE),
            "\n## Step\n",
            *_table(STEP),
            "\n## Example\n\nA trace of four tokens with `top=2`:\n",
            f"```json\n{text}\n```\n",
        ]
    )


def _check(found: Iterable[str], described: Iterable[str]) -> None:
    odd = {*found} ^ {*described}
    if odd:
        raise ValueError(f"docs/generate/trace_page.py and the JSON of a trace differ: {', '.join(sorted(odd))}")


def _table(members: Mapping[str, tuple[str, str]]) -> list[str]:
    rows = [f"| `{name}` | {kind} | {about} |" for name, (kind, about) in members.items()]
    return ["| member | type | meaning |", "|---|---|---|", *rows]
