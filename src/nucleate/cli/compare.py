"""Compare sampling settings over prompts and seeds, by diversity and likelihood.

A setting is a list of fields, as in --setting 'temperature=0.8 top_p=0.9', with a name in front if it needs one
('warm: temperature=1.2'). Presets are a field (order=llama.cpp), and so are pipelines (pipeline='top_k(40) | gumbel').
Each setting continues each prompt once per seed. With --output, an interrupted comparison continues where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.parameters.parameter import ParameterError, read_json

USAGE = "--setting FIELDS [OPTIONS]"
COMMON = (
    *("--setting", "--settings", "--prompt", "--prompts", "--seeds", "--max-tokens"),
    *("--output", "--csv", "--plot", "--model", "--json"),
)
FLAGS = (
    Flag("--setting FIELDS", "Fields to compare, NAME=VALUE ... (repeatable).", action="append"),
    Flag(
        "--settings FILE",
        "JSON file: an object of settings by name, each an object of fields or text, or a list of texts.",
    ),
    Flag("--prompt TEXT", "Prompt (repeatable; default: built-in prompts).", action="append"),
    Flag("--prompts FILE", "File with a prompt per line: text, a JSON string, or an object with the field prompt."),
    Flag("--seeds N", "Outputs per setting and prompt (default: 8).", 8),
    Flag("--max-tokens N", "Maximum tokens per output, for settings without max_tokens", 64),
    Flag(
        "-o, --output FILE",
        "JSONL file to which results are appended; the comparison continues from those that it has.",
    ),
    Flag("--csv FILE", "Write the metrics to a CSV file."),
    Flag("--plot FILE", "Write a plot of the trade-off: a .png, .svg or .pdf file. Needs the extra 'plot'."),
    Flag("--x METRIC", "Metric on the x axis of the trade-off", "log_likelihood"),
    Flag("--y METRIC", "Metric on the y axis of the trade-off", "distinct_2"),
    Flag("--json", "Print a JSON list instead of a table."),
    flags.PROGRESS,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, FLAGS)
    flags.add_model(parser, watermark=False, chat=False)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    from nucleate.comparison.compare import compare, read_prompts
    from nucleate.comparison.comparison import check_metrics, check_plot
    from nucleate.llm import LLM

    check_metrics(arguments.x, arguments.y)
    if arguments.plot is not None:
        check_plot(arguments.plot)  # now, not after an hour
    prompts = [*(arguments.prompt or ()), *(read_prompts(arguments.prompts) if arguments.prompts else ())]
    show = sys.stderr.isatty() if arguments.progress is None else arguments.progress
    found = compare(
        LLM(**flags.model_options(arguments)),
        settings,
        prompts or None,
        seeds=arguments.seeds,
        max_tokens=arguments.max_tokens,
        output=arguments.output,
        use_tqdm=show,
        x=arguments.x,
        y=arguments.y,
    )
    print(json.dumps([*found.rows()], indent=1, allow_nan=False) if arguments.json else found)
    if arguments.csv is not None:
        found.to_csv(arguments.csv)
    if arguments.plot is not None:
        found.plot(arguments.plot)
    return 0


def read_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings by name, of the file and of the flags. Raises UsageError, ParameterError, OSError."""
    from nucleate.comparison.compare import named

    found: dict[str, Any] = {}
    if arguments.settings is not None:
        value = read_json(arguments.settings.read_text("utf-8-sig"), "settings")
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = named(value)
        if not isinstance(value, dict):
            raise ParameterError("settings", f"{arguments.settings} must be an object of settings by name")
        found |= value
    for name, setting in named(arguments.setting or []).items():
        if name in found:
            raise UsageError(f"--setting {name!r} is also in {arguments.settings}")
        found[name] = setting
    if not found:
        raise UsageError("nothing to compare: give --setting 'temperature=0.8 top_p=0.9', twice or more, or --settings")
    return found
