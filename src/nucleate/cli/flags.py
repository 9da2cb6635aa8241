"""Command-line flags: one per sampling parameter, generated from the parameters, and those for model and engine."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nucleate.chat.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS
from nucleate.cli.flag_values import REPEATABLE, STRUCTURED
from nucleate.cli.structured_flags import add_structured
from nucleate.cli.watermark_flags import watermark_option
from nucleate.models import BUNDLED_MODEL
from nucleate.models.gguf.gguf_options import CACHE_TYPES, FLASH_ATTENTION
from nucleate.parameters.parameter import Parameter, ParameterError
from nucleate.sampling.pipeline_format import KIND as PIPELINE
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS, REQUEST_PARAMETERS
from nucleate.speculative.config import ACCEPTANCE_RULES, METHODS, TREE_METHODS, Speculation

ALIASES: Mapping[str, tuple[str, ...]] = {"temperature": ("-t", "--temp"), "n": ("-n",)}
"""Additional flags of sampling parameters; a short flag comes first."""
_STOP = ("min_tokens", "max_tokens", "include_stop_str_in_output", "ignore_eos")


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each field of SamplingParams. Without a flag, the model's recommendation applies."""
    groups, titles = dict[str, Any](), _group_titles()
    for name, parameter in FIELDS.items():
        if name not in without and parameter.kind != STRUCTURED:
            title = titles.get(name, "sampling")
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_parameter(groups[title], parameter)
    if "structured_outputs" not in without:
        add_structured(parser)


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


def add_parameter(group: Any, parameter: Parameter) -> None:
    """Add the flag of a parameter; ``read_values`` reads its value."""
    shared: dict[str, Any] = {"dest": f"param_{parameter.name}", "default": None}
    name, text = parameter.name.replace("_", "-"), parameter.help.rstrip(".").replace("%", "%%")
    text = text[0].upper() + text[1:]
    if parameter.kind == "bool":  # the flag is for the value that is not the default
        flag, value = (f"--no-{name}", False) if parameter.default else (f"--{name}", True)
        text = text if value else f"Do not {text[0].lower()}{text[1:]}"
        group.add_argument(flag, action="store_const", const=value, help=f"{text}.", **shared)
        return
    if parameter.kind in REPEATABLE:
        shared |= {"action": "append", "metavar": "TEXT"}
    else:
        shared["metavar"] = _METAVARS[parameter.kind]
    text = f"{text} (default: {format_default(parameter.default)}; {parameter.allowed})."
    short = [flag for flag in ALIASES.get(parameter.name, ()) if len(flag) == 2]
    long = [flag for flag in ALIASES.get(parameter.name, ()) if len(flag) > 2]
    group.add_argument(*short, f"--{name}", *long, help=text, **shared)


def format_default(default: Any) -> str:
    """Format a default."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | str):
        return str(default)
    return f"{default:g}" if default or default == 0 else "none"


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select a model and how it runs."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="Model folder, GGUF file, Hugging Face id or owner/name:Q4_K_M (default: bundled model).",
    )
    for flag, text in (
        ("--tokenizer", "Tokenizer folder or Hugging Face id (default: that of the model)."),
        ("--revision", "Branch, tag or commit of a Hugging Face id (default: the main branch)."),
    ):
        group.add_argument(flag, metavar=flag.removeprefix("--").upper(), help=text)
    group.add_argument(
        "--device", metavar="DEVICE", default="auto", help="Device: auto, cpu, cuda, cuda:1, ... (default: auto)."
    )
    text = "Data type of the weights: auto, float32, bfloat16 or float16 (default: auto)."
    group.add_argument("--dtype", metavar="DTYPE", default="auto", help=text)
    group.add_argument(
        "--runtime", metavar="RUNTIME", default="auto", help="Model runtime: auto, numpy or torch (default: auto)."
    )
    group.add_argument(
        "--tensor-parallel",
        "--tensor-parallel-size",
        type=int,
        metavar="N",
        default=1,
        help="Number of processes that share the model, each with a GPU or a part of the cores (default: 1).",
    )
    for flag, names, subject in (
        ("--tool-call-parser", TOOL_CALL_PARSERS, "tool calls"),
        ("--reasoning-parser", REASONING_PARSERS, "the reasoning section"),
    ):
        text = f"Format of {subject}: {', '.join(names)} (default: auto, from the chat template)."
        group.add_argument(flag, metavar="NAME", default="auto", choices=names, help=text)
    text = "Companion model of contrastive decoding, with the same vocabulary: folder or id (default: none)."
    group.add_argument("--companion-model", metavar="MODEL", help=text)
    group.add_argument(
        "--generation-config",
        metavar="SOURCE",
        choices=("auto", "none"),
        default="auto",
        help="Where the defaults of sampling parameters come from: auto (the model's generation_config.json) or none "
        "(default: auto).",
    )
    _add_gguf(parser)


def _add_gguf(parser: argparse.ArgumentParser) -> None:
    """Add the flags for GGUF models, which llama.cpp runs."""
    group = parser.add_argument_group("GGUF models (llama.cpp)")
    types = ", ".join(CACHE_TYPES)
    for flag, kind, metavar, text in (
        ("--n-gpu-layers", int, "N", "Layers on the GPU; -1: all (default: -1)."),
        ("--n-ctx", int, "N", "Size of the KV cache in tokens, for all sequences together (default: see the docs)."),
        ("--n-threads", int, "N", "Threads of a forward pass (default: physical cores)."),
        ("--cache-type-k", str, "TYPE", f"Type of the keys in the KV cache: {types} (default: f16)."),
        ("--cache-type-v", str, "TYPE", "Type of the values, which needs flash attention if quantised (default: f16)."),
        ("--flash-attn", str, "MODE", f"Flash attention: {', '.join(FLASH_ATTENTION)} (default: auto)."),
    ):
        group.add_argument(flag, type=kind, metavar=metavar, help=text)


def add_name(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the flag for the model name in requests and responses. several: requests may use any of several names."""
    text = "Model name in requests and responses (default: the value of --model)."
    if several:
        text = text.replace(" (", "; with several names, requests may use any, and responses have the first (")
        parser.add_argument("--served-model-name", action="extend", nargs="+", metavar="NAME", help=text)
    else:
        parser.add_argument("--served-model-name", metavar="NAME", help=text)


def model_names(arguments: argparse.Namespace) -> list[str]:
    """Return the model names in requests; the first one is that in responses. None is twice in it."""
    given = getattr(arguments, "served_model_name", None)
    model = str(arguments.model or BUNDLED_MODEL)
    names = given if isinstance(given, list) else [given or (Path(model).name if Path(model).is_file() else model)]
    return [*dict.fromkeys(map(str, names))]


def model_name(arguments: argparse.Namespace) -> str:
    """Return the model name in responses."""
    return model_names(arguments)[0]


def model_root(arguments: argparse.Namespace) -> str:
    """Return the name under which the model was loaded, without the folders of this machine."""
    model = str(arguments.model or BUNDLED_MODEL)
    return Path(model).resolve().name if Path(model).exists() else model


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags that size an engine."""
    group = parser.add_argument_group("engine")
    for flag, metavar, default, text in (
        ("--max-num-seqs", "N", 64, "Maximum number of sequences that run at the same time (default: 64)."),
        (
            "--max-num-batched-tokens",
            "N",
            None,
            "Maximum number of tokens per forward pass (default: 96 on a CPU, 1024 on a GPU; more for many drafts).",
        ),
        (
            "--max-model-len",
            "N",
            None,
            "Maximum tokens of prompt and completion (default: the model's context length).",
        ),
        (
            "--kv-cache-memory",
            "BYTES",
            None,
            "Size of the KV cache in bytes (default: up to a quarter of the free memory).",
        ),
    ):
        group.add_argument(flag, type=int, default=default, metavar=metavar, help=text)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine flags as keyword arguments of ``LLM.new_engine``."""
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_cache_memory")
    given = {name: getattr(arguments, name) for name in names} | {"json_whitespace": arguments.structured_whitespace}
    return {name: value for name, value in given.items() if value is not None}


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add the flags for speculative decoding."""
    group = parser.add_argument_group("speculative decoding")
    text = f"Speculative decoding method: {', '.join(METHODS)} (default: off)."
    group.add_argument("--speculative", choices=METHODS, metavar="METHOD", help=text)
    text = "Draft model of the method draft: folder or Hugging Face id (default: the one for the bundled model)."
    group.add_argument("--speculative-model", metavar="MODEL", help=text)
    text = "Maximum number of draft tokens per step (default: 4)."
    group.add_argument("--num-speculative-tokens", type=int, metavar="N", help=text)
    text = f"Maximum children of a node in the draft tree; more than 1 needs {', '.join(TREE_METHODS)} (default: 1)."
    group.add_argument("--speculative-tree-width", type=int, metavar="N", help=text)
    text = (
        "Acceptance rule: coupled (same tokens as without speculation), rejection or block (same distribution) or "
        "typical (lossy) (default: coupled)."
    )
    group.add_argument("--speculative-acceptance-rule", choices=ACCEPTANCE_RULES, metavar="RULE", help=text)


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model, speculation and watermark flags as keyword arguments of ``LLM``. Raises ParameterError."""
    options = {name: getattr(arguments, name) for name in _MODEL_OPTIONS}
    speculation = _speculation(arguments) if hasattr(arguments, "speculative") else None
    options |= _gguf_option(arguments)
    options |= watermark_option(arguments) if hasattr(arguments, "watermark") else {}
    return options if speculation is None else {**options, "speculative_config": speculation}


def _gguf_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword argument ``gguf_options`` of ``LLM``, if a flag is given."""
    given = {name: getattr(arguments, name) for name in _GGUF_OPTIONS if getattr(arguments, name) is not None}
    return {"gguf_options": given} if given else {}


def _speculation(arguments: argparse.Namespace) -> Speculation | None:
    options = {field: getattr(arguments, name) for name, field in _SPECULATION_FIELDS.items()}
    options = {field: value for field, value in options.items() if value is not None}
    if arguments.speculative is not None:
        return Speculation(arguments.speculative, **options)
    for name, field in _SPECULATION_FIELDS.items():
        if field in options:
            raise ParameterError(name, f"--{name.replace('_', '-')} needs --speculative")
    return None


_MODEL_OPTIONS = (
    *("model", "tokenizer", "revision", "device", "dtype", "runtime", "generation_config", "companion_model"),
    *("tensor_parallel", "tool_call_parser", "reasoning_parser"),
)

_GGUF_OPTIONS = ("n_gpu_layers", "n_ctx", "n_threads", "cache_type_k", "cache_type_v", "flash_attn")
_SPECULATION_FIELDS = {
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    "speculative_tree_width": "tree_width",
    "speculative_acceptance_rule": "acceptance_rule",
}
"""The fields of ``Speculation`` by argument."""


_METAVARS = {
    "str": "NAME",
    "str | tuple[str, ...]": "NAME,...",
    "float": "NUMBER",
    "int": "N",
    "tuple[int, ...]": "ID,ID...",
    "str | tuple[int, ...]": "TEXT",
    "Mapping[int, float]": "ID=NUMBER,...",
    PIPELINE: "STAGE|STAGE|...",
}
