"""Reads a YAML mapping whose values are texts, as on a command line, so that no text becomes a date or a boolean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nucleate.cli.argument_parser import UsageError
from nucleate.parameters.converters import install_extra

MAX_BYTES = 2**20


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a file: a mapping of names to texts, None, lists or mappings of these. Raises UsageError."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"configuration file {file} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UsageError(f"configuration file {file} has {len(data)} bytes; at most {MAX_BYTES} are allowed")
    try:
        found = read_yaml_text(data.decode("utf-8-sig"), str(file))
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise UsageError(f"{file} must be a YAML mapping, such as 'max-num-seqs: 64'")
    return found


def read_yaml_text(text: str, source: str) -> Any:
    """Parse YAML. Numbers, booleans and dates stay texts; null is None. Raises UsageError, also for aliases."""
    try:
        import yaml
    except ImportError:
        raise UsageError(f"a configuration file needs PyYAML: {install_extra('server')}") from None

    class Loader(yaml.BaseLoader):  # type: ignore[misc]  # untyped
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):  # nested ones grow exponentially
                mark = self.peek_event().start_mark
                raise yaml.YAMLError(f"line {mark.line + 1}: aliases are not supported")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set[str]()
            for key, _ in node.value:
                if str(key.value) in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: duplicate key {str(key.value)[:100]!r}")
                seen.add(str(key.value))
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    null = "tag:yaml.org,2002:null"
    Loader.add_implicit_resolver(null, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
    Loader.add_constructor(null, lambda *_: None)
    try:
        return yaml.load(text, Loader)  # noqa: S506  # a BaseLoader makes no objects
    except (yaml.YAMLError, RecursionError, TypeError) as error:
        raise UsageError(f"{source} is not valid YAML: {' '.join(str(error).split())[:300]}") from None
