"""List all sampling stages in canonical order, with the ranges and defaults of their parameters."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

from nucleate.cli.argument_parser import Flag
from nucleate.cli.sampling_flags import format_default
from nucleate.parameters.parameter import unknown
from nucleate.sampling.stage import shape_of
from nucleate.sampling.stages import STAGES

WORDS = {True: "holds", False: "DOES NOT HOLD", None: "does not apply"}
USAGE = "[--check NAME] [--json]"
FLAGS = (
    Flag("--json", "Print a JSON list instead of text."),
    Flag("--check NAME", "Check the properties of a stage on random rows: neutral value, order, batches, backends."),
)


def run(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        return check(arguments.check, as_json=arguments.json)
    rows: list[dict[str, Any]] = [
        {
            "name": stage.name,
            "shape": shape_of(stage).lower(),
            "rank": stage.rank,
            "help": (stage.__doc__ or "").strip().splitlines()[0],
            "parameters": [
                {"name": p.name, "help": p.help, "allowed": p.allowed, "default": _json_value(p.default)}
                for p in stage.parameters.values()
                if p.public
            ],
        }
        for stage in STAGES.values()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    show(rows)
    return 0


def check(name: str, *, as_json: bool) -> int:
    """Print which properties hold; the exit status is 1 if one does not."""
    from nucleate.plugins.stage_check import check_stage

    if name not in STAGES:
        raise unknown(name, STAGES, "stage")
    found = check_stage(STAGES[name])
    if as_json:
        print(json.dumps([one._asdict() for one in found], indent=1))
    else:
        for one in found:
            print(f"{WORDS[one.holds]:15}{one.name}")
            if one.detail:
                print(textwrap.fill(one.detail, 100, initial_indent=" " * 15, subsequent_indent=" " * 15))
    return int(any(one.holds is False for one in found))


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line per stage and one per parameter below it, as wide as the terminal."""
    columns = max(80, shutil.get_terminal_size((120, 24)).columns)
    width = max(len(row["name"]) for row in rows) + 1
    inner = max(len(parameter["name"]) for row in rows for parameter in row["parameters"]) + 1
    first_use: dict[str, str] = {}
    for row in rows:
        print(_wrap(f"{row['name']:{width}}{row['shape']:10}", row["help"], columns))
        for parameter in row["parameters"]:
            text = f"{parameter['help']} [{parameter['allowed']}; default {format_default(parameter['default'])}]"
            first = first_use.setdefault(parameter["name"], row["name"])
            text = text if first == row["name"] else f"same as for {first}"
            lead = f"  {parameter['name']:{inner}}"
            print(_wrap(lead, text, columns))


def _wrap(lead: str, text: str, columns: int) -> str:
    return textwrap.fill(
        text,
        columns,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _json_value(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
