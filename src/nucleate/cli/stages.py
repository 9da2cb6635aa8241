"""List every stage of the pipeline, in canonical order, with its parameters, their ranges and defaults."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from nucleate.core.stage import shape_of
from nucleate.stages import STAGES

USAGE = "[--json]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of text")


def run(arguments: argparse.Namespace) -> int:
    rows = [
        {
            "name": stage.name,
            "shape": shape_of(stage).lower(),
            "rank": stage.rank,
            "help": (stage.__doc__ or "").strip().splitlines()[0],
            "parameters": [
                {"name": p.name, "help": p.help, "allowed": p.allowed, "default": _plain(p.default)}
                for p in stage.parameters.values()
                if p.public
            ],
        }
        for stage in STAGES.values()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(stage.name) for stage in STAGES.values()) + 1
    for row in rows:
        print(f"{row['name']:{width}}{row['shape']:8}{row['help']}")
        for parameter in row["parameters"]:  # type: ignore[attr-defined]
            print(f"{'':{width + 8}}{parameter['name']}: {parameter['help']} [{parameter['allowed']}]")
    return 0


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
