"""Reads the tokenizer files of a model folder: tokenizer.json, special tokens, EOS ids and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class FolderSettings:
    """``special_tokens`` by role, EOS ids, chat template and the whole ``tokenizer_config.json`` of a folder."""

    special_tokens: Mapping[str, str]
    eos_token_ids: frozenset[int]
    chat_template: str | None
    config: Mapping[str, Any]


def read_folder(folder: Path) -> tuple[tokenizers.Tokenizer, FolderSettings]:
    """Load a folder. Raises FileNotFoundError or ValueError with the path and the problem, on one line."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: no tokenizer.json in this folder")
    return _read_tokenizer(path), _read_settings(folder)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer file: {_line(error)}") from None
    # A file may contain truncation and padding settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_settings(folder: Path) -> FolderSettings:
    config = _read_json(folder / "tokenizer_config.json")
    mapped = _read_json(folder / "special_tokens_map.json")
    tokens = {role: _content(config.get(role) or mapped.get(role)) for role in ROLES}
    special_tokens = {role: token for role, token in tokens.items() if token is not None}
    # generation_config.json takes precedence; older models have it in config.json.
    eos = _read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = _read_json(folder / "config.json").get("eos_token_id")
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token_id) is int and token_id >= 0 for token_id in eos_ids):
        raise ValueError(f"{folder}: eos_token_id must be a token id or a list of them, not {eos!r:.100}")
    return FolderSettings(special_tokens, frozenset(eos_ids), _read_template(folder, config), config)


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several templates, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise ValueError(f"{folder}: chat_template must be a string, not {type(template).__name__}")


def _content(token: object) -> str | None:
    """The content of a special token, which is a string or an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {_line(error)}") from None
    if not isinstance(value, dict):  # about the file, not an argument
        raise ValueError(f"{path}: expected a JSON object, found {type(value).__name__}")  # noqa: TRY004
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
