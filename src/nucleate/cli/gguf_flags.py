"""Flags for GGUF models, which llama.cpp runs."""

from __future__ import annotations

import argparse
from typing import Any

from nucleate.models.gguf.gguf_options import CACHE_TYPES, FLASH_ATTENTION

FIELDS = ("n_gpu_layers", "n_ctx", "n_threads", "cache_type_k", "cache_type_v", "flash_attn")


def add_gguf(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
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


def gguf_option(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword argument ``gguf_options`` of ``LLM``, if a flag is given."""
    given = {name: getattr(arguments, name) for name in FIELDS if getattr(arguments, name) is not None}
    return {"gguf_options": given} if given else {}
