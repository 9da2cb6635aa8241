"""Where the parameters in effect come from: flags, the model's generation_config.json, or the defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from nucleate.cli.terminal import NO_BREAK, Terminal, pad, text_width, truncated, wrapped
from nucleate.sampling_params import FIELDS, SamplingParams, plain

SHOWN_DEFAULTS = ("order", "draw")
"""Parameters with a stage or an effect of their own by default."""
ORIGINS = ("flag", "generation_config", "default")


def origins(params: SamplingParams, flags: Collection[str], recommended: SamplingParams) -> dict[str, str]:
    """The origin of each parameter of ``params`` that is set: "flag", "generation_config" or "default".

    flags: the names of parameters with a flag. recommended: the parameters that the model recommends. One of these that
    contradicts a flag has its default instead, see ``SamplingParams.override``.
    """

    def origin(name: str) -> str:
        if name in flags:
            return "flag"
        own = name in recommended.fields_set and getattr(params, name) == getattr(recommended, name)
        return "generation_config" if own else "default"

    return {name: origin(name) for name in FIELDS if name in params.fields_set}


def parameter_lines(params: SamplingParams, origin: Mapping[str, str], source: str, terminal: Terminal) -> list[str]:
    """The parameters in effect, one row per origin. source: the name of the model's file with recommended ones."""
    if params.pipeline is None:
        origin = {**origin, **{name: "default" for name in (*SHOWN_DEFAULTS, "seed") if name not in origin}}
    else:  # it replaces all parameters of stages
        origin = {name: own for name, own in origin.items() if own != "default"}
    labels = dict(zip(ORIGINS, ("flags", terminal.text(source), "defaults"), strict=True))
    width = max(text_width(labels[one]) for one in origin.values())
    room = None if terminal.columns is None else max(20, terminal.columns - width - 2)
    lines = list[str]()
    for kind, label in labels.items():
        values = [f"{name}{NO_BREAK}{_value(name, params, terminal)}" for name, own in origin.items() if own == kind]
        for number, line in enumerate(wrapped(", ".join(values), room, "") if values else ()):
            lines.append(f"{terminal.paint(pad('' if number else label, width, '<'), 'dim')}  {line}")
    return lines


def _value(name: str, params: SamplingParams, terminal: Terminal) -> str:
    """A value on one line, truncated to 60 columns."""
    value = getattr(params, name)
    if name == "pipeline":
        text = " | ".join(map(repr, value))
    elif name == "seed" and value is None:
        text = "random"
    elif isinstance(value, str) and re.fullmatch(r"[\w.-]+", value):
        text = value
    else:
        text = json.dumps(plain(value), ensure_ascii=False)
    return truncated(terminal.text(text), 60)


def config_name(folder: Path | None) -> str:
    """The name of the file with the parameters that a model recommends."""
    return folder.name if folder is not None and folder.is_file() else "generation_config.json"  # a GGUF file
