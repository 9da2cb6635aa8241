"""List the models on this machine: the embedded one, those in NUCLEATE_MODELS and those in the Hugging Face cache.

NUCLEATE_MODELS is a list of folders, separated by colons, with GGUF files and model folders. All commands take the
names as --model.
"""

from __future__ import annotations

import argparse
import sys

from nucleate.cli.terminal import Cell, Terminal, TextTable

USAGE = ""
FLAGS = ()


def run(arguments: argparse.Namespace) -> int:
    from nucleate.models.gguf.gguf_file import MODELS_VARIABLE, model_folders
    from nucleate.models.model_store import stored_models

    rows = [
        (Cell(one.name, "bold"), Cell(one.kind), Cell(size_text(one.size)), Cell(str(one.path), "dim"))
        for one in stored_models()
    ]
    print("\n".join(TextTable(("name", "kind", "size", "path"), "<<><", rows).lines(Terminal.of_stdout())))
    for folder in model_folders():
        if not folder.is_dir():
            print(f"nucleate: {MODELS_VARIABLE}: there is no folder {folder}", file=sys.stderr)
    return 0


def size_text(size: int) -> str:
    """A number of bytes in MB or GB, as file managers and model hubs show it."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
