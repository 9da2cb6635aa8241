"""Writes tokenizers of Transformers as the files that ``Tokenizer`` reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.transformers_model import libraries
from nucleate.parameters.converters import one_line


def convert_tokenizer(folder: Path, out: Path) -> None:
    """Write the tokenizer of a folder without tokenizer.json, converted by Transformers, to another folder."""
    _, transformers = libraries()
    try:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(out)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"cannot load a tokenizer from {folder}: {one_line(error)}") from error
    if not (out / "tokenizer.json").is_file():
        raise ModelError(f"the tokenizer in {folder} has no fast version (tokenizer.json)")
    for name in ("config.json", "generation_config.json"):  # they contain the EOS ids
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def save_tokenizer(tokenizer: Any, out: Path) -> None:
    """Write a tokenizer of Transformers in memory to a folder; one without a fast version is converted."""
    name = type(tokenizer).__name__
    try:
        tokenizer.save_pretrained(out)
        if not (out / "tokenizer.json").is_file():
            _convert(tokenizer).save(str(out / "tokenizer.json"))
    except ModelError:
        raise
    except Exception as error:  # the tokenizer's code may raise anything
        raise ModelError(
            f"the tokenizer {name} cannot be converted: {type(error).__name__}: {one_line(error)}"
        ) from error


def _convert(tokenizer: Any) -> Any:
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS

    name = type(tokenizer).__name__
    converter = SLOW_TO_FAST_CONVERTERS.get(name.removesuffix("Legacy"))
    if converter is None:
        raise ModelError(f"the tokenizer {name} has no fast version (tokenizer.json)")
    return converter(tokenizer).converted()
