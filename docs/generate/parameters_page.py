"""Generates the page of all sampling parameters: the fields of SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping

from generate.stage_table import shown
from nucleate.parameters.keywords import PEER_NAMES
from nucleate.parameters.parameter import Parameter
from nucleate.sampling.presets import ORDER_PARAMETERS
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS

ABOUT = """\
# Parameters

Every field of `SamplingParams`. The same names are fields of a request over HTTP; as flags of the command line they
have hyphens (`--top-p`). An unset field takes its value from the [defaults](../semantics.md#default-values) of the
server and the model. A value that is not allowed is an error that names the field.
"""


def parameters_page() -> str:
    """Return the page."""
    by_stage: dict[str, list[str]] = {}
    for name, kind in STAGES.items():
        for p in kind.parameters.values():
            if p.public:
                by_stage.setdefault(p.name, []).append(name)
    groups: Mapping[str, list[Parameter]] = {
        "Sampling": [p for name, p in FIELDS.items() if name in by_stage],
        "Order and draw": [FIELDS[name] for name in ORDER_PARAMETERS],
        "Output": [p for name, p in FIELDS.items() if name not in by_stage and name not in ORDER_PARAMETERS],
    }
    parts = [ABOUT.rstrip()]
    for heading, parameters in groups.items():
        parts.append(f"## {heading}")
        for p in parameters:
            parts += [f"### {p.name}", f"{p.help}.", _values(p, by_stage.get(p.name, []))]
    return "\n\n".join(parts) + "\n"


def _values(p: Parameter, stages: list[str]) -> str:
    rows = [f"Values: {p.allowed}; default: {shown(p.default)}"]
    if stages:
        rows.append(f"Stage: {', '.join(f'[{name}](stages/{name}.md)' for name in stages)}")
    others = [other for other, own in PEER_NAMES["SamplingParams"].items() if own == p.name]
    if others:
        rows.append(f"Related names elsewhere: {', '.join(f'`{other}`' for other in others)}")
    return "\n".join(f"- {row}" for row in rows)
