"""The flags that several commands share, and what they select: prompt, model, engine, speculation and watermark."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nucleate.chat.chat_format import REASONING_PARSERS, TOOL_CALL_PARSERS
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.models import BUNDLED_MODEL
from nucleate.models.gguf.gguf_options import CACHE_TYPES, FLASH_ATTENTION
from nucleate.parameters.parameter import ParameterError
from nucleate.speculative.config import ACCEPTANCE_RULES, METHODS, TREE_METHODS, Speculation
from nucleate.tokenization.chat_template import NAMED_TEMPLATES

MODEL = (
    Flag(
        "-m, --model MODEL",
        "Model folder, GGUF file, Hugging Face id or owner/name:Q4_K_M (default: bundled model).",
    ),
    Flag("--tokenizer TOKENIZER", "Tokenizer folder or Hugging Face id (default: that of the model)."),
    Flag("--revision REVISION", "Branch, tag or commit of a Hugging Face id (default: the main branch)."),
    Flag("--device DEVICE", "Device: auto, cpu, cuda, cuda:1, ... (default: auto).", "auto"),
    Flag("--dtype DTYPE", "Data type of the weights: auto, float32, bfloat16 or float16", "auto"),
    Flag("--runtime RUNTIME", "Model runtime: auto, numpy, torch or openvino", "auto"),
    Flag(
        "--tensor-parallel, --tensor-parallel-size N",
        "Number of processes that share the model, each with a GPU or a part of the cores",
        1,
    ),
    Flag(
        "--batch-invariant",
        "Compute the same text for a seed whatever else runs at the time; slower with few sequences (default: off).",
        False,
        action=argparse.BooleanOptionalAction,
    ),
    *(
        Flag(
            f"--{name} NAME",
            f"Format of {subject}: {', '.join(choices)} (default: auto, from the chat template).",
            "auto",
            choices=choices,
        )
        for name, choices, subject in (
            ("tool-call-parser", TOOL_CALL_PARSERS, "tool calls"),
            ("reasoning-parser", REASONING_PARSERS, "the reasoning section"),
        )
    ),
    Flag(
        "--companion-model MODEL",
        "Companion model of contrastive decoding, with the same vocabulary: folder or id (default: none).",
    ),
    Flag(
        "--generation-config SOURCE",
        "Where the defaults of sampling parameters come from: auto (the model's generation_config.json) or none",
        "auto",
        choices=("auto", "none"),
    ),
)
"""The arguments of ``LLM``."""
CHAT_TEMPLATE = Flag(
    "--chat-template TEMPLATE",
    f"Chat template: {', '.join(NAMED_TEMPLATES)} or a Jinja file (default: that of the model).",
)
GGUF = (
    Flag("--n-gpu-layers N", "Layers on the GPU; -1: all (default: -1)."),
    Flag("--n-ctx N", "Size of the KV cache in tokens, for all sequences together (default: see the docs)."),
    Flag("--n-threads N", "Threads of a forward pass (default: physical cores)."),
    Flag("--cache-type-k TYPE", f"Type of the keys in the KV cache: {', '.join(CACHE_TYPES)} (default: f16)."),
    Flag("--cache-type-v TYPE", "Type of the values, which needs flash attention if quantised (default: f16)."),
    Flag("--flash-attn MODE", f"Flash attention: {', '.join(FLASH_ATTENTION)} (default: auto)."),
)
"""The fields of ``GgufOptions``."""


def read_property(text: str) -> tuple[str, str]:
    """A property of OpenVINO. Raises ArgumentTypeError."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r:.80}")
    return name, value


OPENVINO = Flag(
    "--openvino-property NAME=VALUE",
    "Property of OpenVINO, such as KV_CACHE_PRECISION=f16 (repeatable).",
    type=read_property,
    action="append",
)
ENGINE = (
    Flag("--max-num-seqs N", "Maximum number of sequences that run at the same time", 64),
    Flag(
        "--max-num-batched-tokens N",
        "Maximum number of tokens per forward pass (default: max_num_seqs + 96; on a GPU + 1024; more for drafts).",
    ),
    Flag("--max-model-len N", "Maximum tokens of prompt and completion (default: the model's context length)."),
    Flag("--kv-cache-memory BYTES", "Size of the KV cache in bytes (default: up to a quarter of the free memory)."),
)
"""The arguments of ``LLM.new_engine``."""
SPECULATION = {
    "method": Flag(
        "--speculative METHOD", f"Speculative decoding method: {', '.join(METHODS)} (default: off).", choices=METHODS
    ),
    "model": Flag(
        "--speculative-model MODEL",
        "Draft model of the method draft, or draft heads of the methods eagle and medusa: folder or Hugging Face id "
        "(default: those for the bundled model).",
    ),
    "num_speculative_tokens": Flag(
        "--num-speculative-tokens N", "Maximum number of draft tokens per step (default: 4)."
    ),
    "tree_width": Flag(
        "--speculative-tree-width N",
        f"Maximum children of a node in the draft tree; more than 1 needs {', '.join(TREE_METHODS)} (default: 1).",
    ),
    "acceptance_rule": Flag(
        "--speculative-acceptance-rule RULE",
        "Acceptance rule: coupled (same tokens as without speculation), rejection or block (same distribution) or "
        "typical (lossy) (default: coupled).",
        choices=ACCEPTANCE_RULES,
    ),
}
"""The fields of ``Speculation``."""
DEFAULT_PROMPT = "Once upon a time"
JSON_WHITESPACE = Flag(
    "--json-whitespace MODE",
    "Whitespace between JSON tokens: flexible (a space, or a line break with indentation) or none, which takes fewer "
    "tokens (default: flexible). In serve and batch, also for requests with a constraint or tools that do not say.",
)
KEY_VARIABLE = "NUCLEATE_WATERMARK_KEY_FILE"
WATERMARK_KINDS = "Kind: kgw, gumbel or synthid, or as in 'kgw(context=2)'"
WATERMARK = Flag("--watermark KIND", f"Watermark all outputs. {WATERMARK_KINDS} (default: off).")
WATERMARK_KEY = Flag("--watermark-key FILE", f"File with the secret key (default: ${KEY_VARIABLE}).")
PROGRESS = Flag(
    "--progress", "Show a progress bar (default: if stderr is a terminal).", action=argparse.BooleanOptionalAction
)


def add_model(
    parser: argparse.ArgumentParser,
    *,
    engine: bool = False,
    speculation: bool = True,
    watermark: bool = True,
    chat: bool = True,
) -> None:
    """Add the flags that select a model and how it runs. chat: whether the command has conversations."""
    add_flags(parser, (*MODEL, CHAT_TEMPLATE) if chat else MODEL, "model")
    add_flags(parser, GGUF, "GGUF models (llama.cpp)")
    add_flags(parser, (OPENVINO,), "OpenVINO models")
    if engine:
        add_flags(parser, ENGINE, "engine")
    if speculation:
        add_flags(parser, SPECULATION.values(), "speculative decoding")
    if watermark:
        add_flags(parser, (WATERMARK, WATERMARK_KEY), "watermark")


def add_name(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add the flag for the model name in requests and responses. several: requests may use any of several names."""
    more = "; with several names, requests may use any, and responses have the first" if several else ""
    text = f"Model name in requests and responses{more} (default: the value of --model)."
    options: dict[str, Any] = {"action": "extend", "nargs": "+"} if several else {}
    add_flags(parser, [Flag("--served-model-name NAME", text, **options)])


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``read_prompt`` reads."""
    text = "Text to continue; - reads stdin. After --, the text may begin with -."
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    add_flags(parser, [Flag("-f, --file FILE", "Read the prompt from a file.")])


def model_names(arguments: argparse.Namespace) -> list[str]:
    """Return the model names in requests; the first one is that in responses. None is twice in it."""
    given = getattr(arguments, "served_model_name", None)
    model = str(arguments.model or BUNDLED_MODEL)
    names = given if isinstance(given, list) else [given or (Path(model).name if Path(model).is_file() else model)]
    return [*dict.fromkeys(map(str, names))]


def model_root(arguments: argparse.Namespace) -> str:
    """Return the name under which the model was loaded, without the folders of this machine."""
    model = str(arguments.model or BUNDLED_MODEL)
    return Path(model).resolve().name if Path(model).exists() else model


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine flags as keyword arguments of ``LLM.new_engine``."""
    return _given(arguments, {**{flag.name: flag for flag in ENGINE}, "json_whitespace": JSON_WHITESPACE})


def model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the model, speculation and watermark flags as keyword arguments of ``LLM``. Raises ParameterError."""
    options = {flag.name: flag.value(arguments) for flag in (*MODEL, CHAT_TEMPLATE)}
    if given := _given(arguments, {flag.name: flag for flag in GGUF}):
        options["gguf_options"] = given
    if (pairs := OPENVINO.value(arguments)) is not None:
        options["openvino_properties"] = dict(pairs)
    if given := _given(arguments, SPECULATION):
        if "method" not in given:
            flag = SPECULATION[next(iter(given))]
            raise ParameterError(flag.name, f"{flag.names[0]} needs --speculative")
        options["speculative_config"] = Speculation(**given)
    if (kind := WATERMARK.value(arguments)) is not None:
        from nucleate.watermark import read_watermark

        options["watermark"] = read_watermark(kind, read_key(arguments))
    elif WATERMARK_KEY.value(arguments) is not None:
        raise ParameterError("watermark_key", "--watermark-key needs --watermark")
    return options


def _given(arguments: argparse.Namespace, flags: Mapping[str, Flag]) -> dict[str, Any]:
    """Return the values that are set, by the name of the field."""
    values = {field: flag.value(arguments) for field, flag in flags.items()}
    return {field: value for field, value in values.items() if value is not None}


def read_key(arguments: argparse.Namespace) -> Any:
    """Return the key of a watermark. Raises ParameterError."""
    from nucleate.sampling.watermark_key import WatermarkKey

    path = arguments.watermark_key or os.environ.get(KEY_VARIABLE)
    if not path:
        raise ParameterError("watermark_key", f"a watermark needs a key: --watermark-key FILE, or {KEY_VARIABLE}")
    return WatermarkKey.read(path)


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the prompt. Raises UsageError, OSError."""
    if arguments.prompt is not None and arguments.file is not None:
        raise UsageError("the argument PROMPT and --file cannot be combined")
    if arguments.file is not None:
        text = decode(arguments.file.read_bytes(), str(arguments.file))
    elif arguments.prompt not in (None, "-"):
        text = arguments.prompt
    elif arguments.prompt == "-" or is_piped():
        text = read_stdin("no prompt: ")
    elif arguments.model is None:
        arguments.echo = True
        return DEFAULT_PROMPT
    else:
        raise UsageError("no prompt: pass it as an argument, with --file or on stdin")
    if not text and arguments.prompt != "":
        raise UsageError(f"{arguments.file or 'stdin'} is empty: to generate from the BOS token, pass '' as the prompt")
    return str(text)


def read_stdin(problem: str = "") -> str:
    """Return the text of stdin. Raises UsageError. problem: the start of the message if it is closed."""
    if sys.stdin is None:
        raise UsageError(f"{problem}stdin is closed")
    return decode(sys.stdin.buffer.read(), "stdin")


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 without changing line ends. Raises UsageError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def is_piped() -> bool:
    """Return whether stdin is a pipe or a file, and so meant to be read."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # not a real file, as in tests
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def read_content(flag: str, text: str) -> str:
    """Return the content of the file if the text is ``@FILE``; otherwise the text."""
    if text.startswith("@"):
        return decode(Path(text[1:]).read_bytes(), text[1:]).removeprefix("\ufeff")
    if os.path.isfile(text):  # noqa: PTH113  # Path(text) raises for some texts
        raise UsageError(f"{flag} {text} is a file name; use {flag} @{text} to read the file")
    return text
