"""Print what is inside a model: architecture, size, context length, tokenizer, sampling defaults.

Weights are not loaded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nucleate.cli.argument_parser import Flag, UsageError, add_flags

USAGE = "[OPTIONS] [MODEL]"
MAX_VALUE = 100  # characters of a metadata value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "GGUF file, owner/name:QUANTISATION, model folder or Hugging Face id (default: bundled)."
    parser.add_argument("model", nargs="?", metavar="MODEL", help=text)
    flags = (Flag("--metadata", "Print all key-value pairs of a GGUF file."), Flag("--json", "Print one JSON object."))
    add_flags(parser, flags)


def run(arguments: argparse.Namespace) -> int:
    from nucleate.models.gguf.gguf_file import find_gguf
    from nucleate.models.loader import resolve

    path = None if arguments.model is None else find_gguf(arguments.model)
    if path is None and arguments.metadata:
        raise UsageError("--metadata needs a GGUF model")
    facts = _folder_facts(resolve(arguments.model)) if path is None else _gguf_facts(path, metadata=arguments.metadata)
    if arguments.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    metadata = facts.pop("metadata", {})
    for table in (facts, metadata):
        width = max(map(len, table), default=0)
        for name, value in table.items():
            text = " ".join(str(value).split())
            text = text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
            print(f"{name.replace('_', ' ') if '.' not in name else name:<{width}}  {text}")
    return 0


def _gguf_facts(path: Path, *, metadata: bool) -> dict[str, Any]:
    from nucleate.llm.model_loading import template_beside
    from nucleate.models.gguf.gguf_model import GgufModel, recommended
    from nucleate.models.gguf.gguf_options import GgufOptions

    model = GgufModel(path, GgufOptions(n_gpu_layers=0), vocab_only=True)
    vocabulary, beside = model.vocabulary, template_beside(path)
    facts: dict[str, Any] = {
        "file": str(path),
        "architecture": model.architecture,
        "name": model.metadata.get("general.name", "none"),
        "weights": f"{model.file_type}, {_count(model.num_parameters)} parameters, {_bytes(model.size)}",
        "layers": model.num_layers,
        "context_length": model.context_length,
        "kv_cache": f"{_bytes(model.token_bytes)} per token at f16",
        "state": "recurrent" if model.recurrent else "KV cache",
        "batch_invariant": "not available" if model.recurrent else "tested when an engine starts with it",
        "tokenizer": f"{model.metadata.get('tokenizer.ggml.model', 'none')}, {model.vocab_size} tokens",
        "special_tokens": ", ".join(f"{role}={text}" for role, text in vocabulary.special_tokens.items()) or "none",
        "ends": ", ".join(vocabulary.text(token) for token in sorted(vocabulary.eos_token_ids)) or "none",
        "chat_template": _template(model.chat_template or beside, "" if model.chat_template else " (in its folder)"),
        "sampling": _sampling(recommended(model.metadata)),
    }
    return {**facts, "metadata": dict(model.metadata)} if metadata else facts


def _folder_facts(folder: Path) -> dict[str, Any]:
    from nucleate.models.loader import is_openvino
    from nucleate.models.model_files import read_config, recommended
    from nucleate.models.openvino_model import weights_of
    from nucleate.tokenization.tokenizer import Tokenizer

    config = read_config(folder / "config.json")
    text = config.get("text_config", config)
    if is_openvino(folder):
        kind, size = weights_of(folder)
        kind = f"OpenVINO {kind}"
    else:
        kind = str(text.get("dtype", text.get("torch_dtype", "unknown")))
        size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    facts: dict[str, Any] = {
        "folder": str(folder),
        "architecture": config.get("model_type", "unknown"),
        "weights": f"{kind}, {_bytes(size)}",
        "layers": text.get("num_hidden_layers", "unknown"),
        "context_length": text.get("max_position_embeddings", "unknown"),
    }
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(folder)
        facts["tokenizer"] = f"{tokenizer.vocab_size} tokens"
        facts["special_tokens"] = ", ".join(f"{role}={one}" for role, one in tokenizer.special_tokens.items()) or "none"
        facts["chat_template"] = _template(tokenizer.chat_template)
    return {**facts, "sampling": _sampling(recommended(folder))}


def _template(text: str | None, place: str = "") -> str:
    return f"{len(text)} characters{place}" if text else "none (see --chat-template)"


def _sampling(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def _count(number: int) -> str:
    power = min(int(math.log10(max(number, 1))) // 3, 4)
    return f"{number / 1000**power:.3g}{['', ' thousand', ' million', ' billion', ' trillion'][power]}"


def _bytes(number: int) -> str:
    power = min(int(math.log2(max(number, 1))) // 10, 4)
    return f"{number / 1024**power:.3g} {['bytes', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"
