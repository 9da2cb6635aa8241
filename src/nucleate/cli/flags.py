"""Flags for every sampling parameter, made from the parameters themselves; and those that name the model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from nucleate.cli.structured_flags import add_structured, read_structured
from nucleate.parameters.parameter import Parameter, ParameterError, unknown
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.speculative.config import ACCEPTANCE_RULES, METHODS, TREE_METHODS, Speculation
from nucleate.structured_output.spec import StructuredOutputs


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag per field of SamplingParams. Flags that are not given leave the model's recommendation."""
    title = "sampling parameters (what a model recommends in its generation_config.json goes before these defaults)"
    group = parser.add_argument_group(title)
    for name, parameter in FIELDS.items():
        if name not in without and parameter.kind != STRUCTURED:
            add_parameter(group, parameter)
    if "structured_outputs" not in without:
        add_structured(parser)


def add_parameter(group: Any, parameter: Parameter, aliases: Sequence[str] = ()) -> None:
    """Add a flag for a parameter; ``given`` reads its value."""
    shared: dict[str, Any] = {"dest": f"param_{parameter.name}", "default": None}
    name = parameter.name.replace("_", "-")
    if parameter.kind == "bool":  # the flag is for what is not the default
        flag, value = (f"--no-{name}", False) if parameter.default else (f"--{name}", True)
        group.add_argument(
            flag, action="store_const", const=value, help=f"{'turn off: ' * (not value)}{parameter.help}", **shared
        )
        return
    if parameter.kind in TEXTS:
        shared |= {"action": "append", "metavar": "TEXT"}
    else:
        shared["metavar"] = _METAVARS[parameter.kind]
    text = f"{parameter.help} [{parameter.allowed}; default {shown(parameter.default)}]"
    group.add_argument(f"--{name}", *aliases, help=text.replace("%", "%%"), **shared)


def shown(default: Any) -> str:
    """A default in words."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | str):
        return str(default)
    return f"{default:g}" if default or default == 0 else "none"


EMBEDDED = "nucleate-tiny"
"""What requests call the embedded model."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a model and how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help="a folder or a Hugging Face id; without it, the embedded model")
    group.add_argument("--device", metavar="DEVICE", default="auto", help='"auto", "cpu", "cuda", "cuda:1"...')
    group.add_argument("--dtype", metavar="DTYPE", default="auto", help='"auto", "float32", "bfloat16", "float16"')
    group.add_argument("--runtime", metavar="RUNTIME", default="auto", help='"auto", "numpy" or "torch"')


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the flag for what requests call the model."""
    text = "what requests may call the model, and answers do [default: what --model says]"
    parser.add_argument("--served-model-name", metavar="NAME", help=text)


def model_name(arguments: argparse.Namespace) -> str:
    """What requests call the model."""
    return str(arguments.served_model_name or arguments.model or EMBEDDED)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags that size an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="answers at a time [default 64]")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens that are read at a time")
    group.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of a prompt with its answer")
    group.add_argument("--kv-cache-memory", type=int, metavar="BYTES", help="memory for keys and values")


def engine_options(arguments: argparse.Namespace) -> dict[str, int]:
    """What the flags say of an engine, as ``LLM.new_engine`` takes it."""
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say whether tokens are drafted, and how."""
    title = "drafts (tokens that are guessed, and verified several at a time: the same text, sooner)"
    group = parser.add_argument_group(title)
    text = "who guesses: n-grams of the text, suffixes of it and of earlier answers, or a part trained for the model"
    group.add_argument("--speculative", choices=METHODS, help=f"{text} [default: nobody]")
    group.add_argument("--speculative-tokens", type=int, metavar="N", help="most tokens of a draft [default 4]")
    text = f"most draft tokens that follow the same one, of {', '.join(TREE_METHODS)}: drafts are trees [default 1]"
    group.add_argument("--speculative-branches", type=int, metavar="N", help=text)
    text = "how drafts are verified: all but typical are exact, and coupled gives the very tokens [default coupled]"
    group.add_argument("--speculative-rule", choices=ACCEPTANCE_RULES, help=text)


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of a model and of drafts, as ``LLM`` takes it. Raises ParameterError."""
    options = {name: getattr(arguments, name) for name in ("model", "device", "dtype", "runtime")}
    drafts = _speculation(arguments) if hasattr(arguments, "speculative") else None
    return options if drafts is None else {**options, "speculative_config": drafts}


def _speculation(arguments: argparse.Namespace) -> Speculation | None:
    said = {name: getattr(arguments, f"speculative_{name}") for name in _SPECULATIVE}
    said = {name: value for name, value in said.items() if value is not None}
    if arguments.speculative is None:
        if said:
            name = next(iter(said))
            raise ParameterError(f"speculative_{name}", f"--speculative-{name} goes with --speculative")
        return None
    return Speculation(arguments.speculative, **{_SPECULATIVE[name]: value for name, value in said.items()})


_SPECULATIVE = {"tokens": "num_speculative_tokens", "branches": "tree_width", "rule": "acceptance_rule"}


def given(arguments: argparse.Namespace, parameters: Mapping[str, Parameter] = FIELDS) -> dict[str, Any]:
    """The parameters given as flags, parsed and checked; those of sampling, unless others are named."""
    values = {}
    for name, parameter in parameters.items():
        said = (
            read_structured(arguments)
            if parameter.kind == STRUCTURED
            else getattr(arguments, f"param_{parameter.name}", None)
        )
        if said is not None:
            values[name] = said if isinstance(said, StructuredOutputs) else parse(parameter, said)
    return values


def parse(parameter: Parameter, text: Any) -> Any:
    """The value of a parameter as written on a command line. Raises ParameterError."""
    try:
        return parameter.check(_PARSE[parameter.kind](text) if parameter.kind in _PARSE else text)
    except ValueError as error:
        if parameter.kind == STRUCTURED and isinstance(error, ParameterError):  # of a part of it: it says more
            raise
        raise parameter.error(text) from None  # as it was written, not as it was read


def assign(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """The parameters with one of them set from text, as ``/set`` does. Raises ParameterError."""
    name = name.replace("-", "_")
    if name not in FIELDS:
        raise unknown(name, FIELDS)
    kind = FIELDS[name].kind
    return params.override(**{name: parse(FIELDS[name], _READ[kind](text) if kind in _READ else text)})


def _switch(text: str) -> Any:
    return {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}.get(text.lower(), text)


def _integer(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def _integers(text: str) -> tuple[int, ...] | None:
    return None if text.lower() == "none" else tuple(int(part) for part in text.split(","))


def _table(text: str) -> dict[int, float]:
    pairs = [part.split("=") for part in text.split(",")]
    table = {int(token): float(value) for token, value in pairs}
    if len(table) < len(pairs):
        raise ValueError("a token is there twice")
    return table


def _names(text: str) -> Any:
    """One name, or a list of them; a list of one ends with a comma."""
    return tuple(name.strip() for name in text.removesuffix(",").split(",")) if "," in text else text


def _form(text: str) -> StructuredOutputs | None:
    return None if text.lower() == "none" else StructuredOutputs.from_json(text)


STRUCTURED = "StructuredOutputs"
"""The kind that has flags of its own; ``/set`` takes it as JSON."""

TEXTS = ("tuple[str, ...]", "tuple[str | tuple[int, ...], ...]")
"""The kinds whose flag may be given several times, a text each."""

_PARSE: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": _integer,
    "tuple[int, ...]": _integers,
    "Mapping[int, float]": _table,
    "str | tuple[str, ...]": _names,
    STRUCTURED: _form,
}
_READ: dict[str, Callable[[str], Any]] = {"bool": _switch, **dict.fromkeys(TEXTS, lambda text: (text,))}
_METAVARS = {
    "str": "NAME",
    "str | tuple[str, ...]": "NAME,...",
    "float": "NUMBER",
    "int": "INTEGER",
    "tuple[int, ...]": "ID,ID...",
    "Mapping[int, float]": "ID=NUMBER,...",
}
