"""The flags of sampling parameters: generated from their declarations, and read into validated values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nucleate.cli.argument_parser import BOOLEANS, Flag, UsageError, add_flags
from nucleate.cli.flags import JSON_WHITESPACE, read_content
from nucleate.parameters.parameter import Parameter, ParameterError, read_json, unknown
from nucleate.sampling.pipeline_format import KIND as PIPELINE
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS, REQUEST_PARAMETERS, SamplingParams
from nucleate.structured_output.spec import TRIGGER_TYPES, StructuredOutputs

ALIASES: Mapping[str, str] = {"temperature": "-t, --temperature, --temp", "n": "-n, --n"}
"""The flags of sampling parameters with more than one."""
STRUCTURED = "StructuredOutputs"
"""The kind of parameter with several flags; ``/set`` takes it as JSON."""
REPEATABLE = ("tuple[str, ...]", "tuple[str | tuple[int, ...], ...]")
"""The kinds whose flag can be repeated, with one text each."""
METAVARS = {
    **dict.fromkeys(REPEATABLE, "TEXT"),
    "str": "NAME",
    "str | tuple[str, ...]": "NAME,...",
    "float": "NUMBER",
    "int": "N",
    "tuple[int, ...]": "ID,ID...",
    "str | tuple[int, ...]": "TEXT",
    "Mapping[int, float]": "ID=NUMBER,...",
    PIPELINE: "STAGE|STAGE|...",
}
_STOP = ("min_tokens", "max_tokens", "include_stop_str_in_output", "ignore_eos")
_TITLE = "structured output (at most one of the first six; @FILE reads the value from a file)"
STRUCTURED_FLAGS: Mapping[str, Flag] = {
    "json_schema": Flag("--json-schema @FILE|JSON", "Generate JSON that conforms to this JSON schema."),
    "json_object": Flag("--json-object", "Generate a JSON object."),
    "regex": Flag("--regex PATTERN", "Generate text that matches this regular expression as a whole."),
    "choice": Flag("--choice TEXT", "Generate one of several texts. Repeat the flag for each text.", action="append"),
    "grammar": Flag("--grammar @FILE|TEXT", "Generate text of this grammar, in Lark or GBNF."),
    "structural_tag": Flag(
        "--structural-tag @FILE|JSON",
        "Generate free text with sections that follow a schema, pattern or grammar, as this structural tag says.",
    ),
    "grammar_lazy": Flag(
        "--grammar-lazy",
        "Apply the grammar only from a trigger on; before it, the text is free. Needs --grammar-trigger.",
    ),
    "grammar_triggers": Flag(
        "--grammar-trigger TYPE:VALUE",
        "What begins the grammar with --grammar-lazy: word:TEXT, token:TEXT or pattern:REGEX. Repeat for each trigger.",
        action="append",
    ),
    "on_unsupported": Flag(
        "--schema-on-unsupported ACTION",
        "What to do with schema keywords that cannot be enforced: error rejects the schema, approximate also treats "
        "oneOf as anyOf, ignore skips and reports them (default: error).",
    ),
    "strict_keywords": Flag(
        "--schema-strict-keywords",
        "Reject a schema with an unknown keyword that looks like a misspelled one, instead of ignoring it.",
    ),
    "whitespace": JSON_WHITESPACE,
    "max_digits": Flag(
        "--json-max-digits N",
        "Maximum number of consecutive digits of a number in JSON; 0 for no limit (default: 16).",
        type=str,  # its error is that of the field
    ),
}


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each field of SamplingParams. Without a flag, the model's recommendation applies."""
    groups, titles = dict[str, list[Flag]](), _group_titles()
    for name, parameter in FIELDS.items():
        if name not in without and parameter.kind != STRUCTURED:
            groups.setdefault(titles.get(name, "sampling"), []).append(parameter_flag(parameter))
    if "structured_outputs" not in without:
        groups[_TITLE] = [*STRUCTURED_FLAGS.values()]
    for title, flags in groups.items():
        add_flags(parser, flags, title)


def _group_titles() -> dict[str, str]:
    """Return the title of the help group of each sampling parameter, by default the package of its stage."""
    found: dict[str, str] = {}
    for stage in STAGES.values():
        package = stage.__module__.split(".")[-2] if stage.__module__.startswith("nucleate.") else "plug-ins"
        found |= {parameter.name: package for parameter in stage.parameters.values()}
    titles = {"constraints": "token constraints", "selection": "sampling"}
    groups = {name: titles.get(package, package) for name, package in found.items()}
    for name in (*REQUEST_PARAMETERS, "min_tokens"):
        groups[name] = "stop criteria" if name in _STOP or name.startswith("stop") else "output"
    return {**groups, "logprobs": "output", "logprob_token_ids": "output"}


def parameter_flag(parameter: Parameter) -> Flag:
    """Return the flag of a parameter; ``read_values`` reads its value."""
    name, text = parameter.name.replace("_", "-"), parameter.help.rstrip(".").replace("%", "%%")
    text = text[0].upper() + text[1:]
    options: dict[str, Any] = {"dest": f"param_{parameter.name}"}
    if parameter.kind == "bool":  # the flag is for the value that is not the default
        flag, value = (f"--no-{name}", False) if parameter.default else (f"--{name}", True)
        text = text if value else f"Do not {text[0].lower()}{text[1:]}"
        return Flag(flag, f"{text}.", action="store_const", const=value, **options)
    options["type"] = str  # ``read_values`` parses it, with better errors
    if parameter.kind in REPEATABLE:
        options["action"] = "append"
    text = f"{text} (default: {format_default(parameter.default)}; {parameter.allowed})."
    return Flag(f"{ALIASES.get(parameter.name, f'--{name}')} {METAVARS[parameter.kind]}", text, **options)


def format_default(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | str):
        return str(default)
    return f"{default:g}" if default or default == 0 else "none"


def read_values(arguments: argparse.Namespace, parameters: Mapping[str, Parameter] = FIELDS) -> dict[str, Any]:
    """Return the validated values of the flags that are given, by default of the sampling parameters."""
    given = {name: getattr(arguments, f"param_{parameter.name}", None) for name, parameter in parameters.items()}
    values = {name: parse_value(parameters[name], value) for name, value in given.items() if value is not None}
    structured = read_structured(arguments) if "structured_outputs" in parameters else None
    return values if structured is None else {**values, "structured_outputs": structured}


def parse_value(parameter: Parameter, text: Any) -> Any:
    """Parse the value of a parameter from a command line. Raises ParameterError."""
    if parameter.optional and isinstance(text, str) and text.lower() == "none":
        return None
    try:
        return parameter.check(_PARSE[parameter.kind](text) if parameter.kind in _PARSE else text)
    except ValueError as error:
        if parameter.kind in (STRUCTURED, PIPELINE) and isinstance(error, ParameterError):
            raise  # it names a part of the value
        raise parameter.error(text) from None  # with the text as written


def set_parameter(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """Return the parameters with one of them set from text, as ``/set`` does. Raises ParameterError."""
    name = name.replace("-", "_")
    return params.override(**{name: parse_text(name, text)})


def parse_text(name: str, text: str) -> Any:
    """Parse the value of a sampling parameter from one text. Raises ParameterError."""
    if name not in FIELDS:
        raise unknown(name, FIELDS)
    parameter = FIELDS[name]
    if parameter.kind == "bool":
        return parse_value(parameter, BOOLEANS.get(text.lower(), text))
    return parse_value(parameter, (text,) if parameter.kind in REPEATABLE else text)


def _table(text: str) -> dict[int, float]:
    pairs = [part.split("=") for part in text.split(",")]
    table = {int(token): float(value) for token, value in pairs}
    if len(table) < len(pairs):
        raise ValueError("a token id is repeated")
    return table


def _names(text: str) -> Any:
    """Parse one name, or a list of names; a list of one ends with a comma."""
    return tuple(name.strip() for name in text.removesuffix(",").split(",")) if "," in text else text


def _pipeline(text: str) -> Any:
    """Parse stages separated by |, or the JSON list of ``SamplingParams.to_json``; ``@FILE`` reads them from a file."""
    text = read_content("--pipeline", text).strip()
    return None if text.lower() == "none" else read_json(text, "pipeline") if text.startswith("[") else text


_PARSE: Mapping[str, Callable[[str], Any]] = {
    "float": float,
    "int": int,
    "tuple[int, ...]": lambda text: tuple(map(int, text.split(","))),
    "Mapping[int, float]": _table,
    "str | tuple[str, ...]": _names,
    STRUCTURED: StructuredOutputs.from_json,
    PIPELINE: _pipeline,
}


def read_structured(arguments: argparse.Namespace) -> StructuredOutputs | None:
    """Return the constraint that the flags set, or None. Raises ParameterError, UsageError, OSError."""
    given = {field: flag.value(arguments) for field, flag in STRUCTURED_FLAGS.items()}
    values = {field: value for field, value in given.items() if value not in (None, False)}
    for field in ("json_schema", "grammar", "structural_tag"):
        if field in values:
            values[field] = read_content(STRUCTURED_FLAGS[field].names[0], values[field])
    if (text := values.get("max_digits", "")).isdecimal() and len(text) < 10:
        values["max_digits"] = int(text)
    if "grammar_triggers" in values:
        values["grammar_triggers"] = [_trigger(text) for text in values["grammar_triggers"]]
    if hasattr(arguments, "max_num_seqs"):  # it is the engine's default: see ``flags.engine_options``
        values.pop("whitespace", None)
    return StructuredOutputs(**values) if values else None


def _trigger(text: str) -> dict[str, str]:
    kind, colon, value = text.partition(":")
    if not colon or kind not in TRIGGER_TYPES:
        raise UsageError(f"--grammar-trigger must be TYPE:VALUE with the type {', '.join(TRIGGER_TYPES)}, got {text}")
    return {"type": kind, "value": value}
