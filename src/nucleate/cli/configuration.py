"""Values of flags from a configuration file (YAML) and from environment variables.

The keys of the file are the names of the flags. The variables are ``NUCLEATE_`` and the name in upper case, such as
``NUCLEATE_MAX_NUM_SEQS``. The command line has precedence over variables, variables over the file.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nucleate.cli.argument_parser import SIMILARITY, ArgumentParser, UsageError, closest_flag, flag_values
from nucleate.parameters.converters import install_extra

PREFIX = "NUCLEATE_"
CONFIG, PLUGIN = "--config", "--plugin"
OTHER_VARIABLES = frozenset({"API_KEYS", "CACHE", "PLUGINS", "THREADS", "WATERMARK_KEY_FILE", "TEST_GGUF"})
"""Variables that are not named after a flag."""
COMMAND_LINE_ONLY = frozenset({"--help", "--help-all", "--debug", CONFIG})
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

Values = dict[str, Any]


class Configuration:
    """The file of ``--config`` or ``NUCLEATE_CONFIG``, and the environment. Raises UsageError for an invalid file."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        names = [*flag_values(arguments, CONFIG)] or [environment.get(f"{PREFIX}CONFIG", "")]
        self._file, self._environment = names[-1], environment
        self._values = read_yaml(Path(self._file)) if self._file else {}

    @property
    def plugins(self) -> list[str]:
        """The plug-ins of the file: they define flags, so they are loaded before the parser is made."""
        found = self._values.get("plugin")
        return [] if found is None else [*map(str, found)] if isinstance(found, list) else [str(found)]

    def parse(self, parser: ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, with the file and the variables as defaults. Raises UsageError."""
        actions = {flag: action for action in parser.actions for flag in action.option_strings if flag[:2] == "--"}
        command_line = parser.parse_given(arguments)  # first: it may ask for help
        layers = [*self._from_file(parser, actions), *self._from_environment(parser, actions), command_line]
        found = parser.parse_args([])
        for layer in layers:
            vars(found).update(layer)
        return found

    def _from_file(self, parser: ArgumentParser, actions: Mapping[str, argparse.Action]) -> Iterator[Values]:
        seen: dict[str, str] = {}
        for key, value in self._values.items():
            flag = f"--{key.replace('_', '-')}"
            if flag not in actions or flag in COMMAND_LINE_ONLY:
                raise self._unknown_key(key, flag, actions)
            action = actions[flag]
            if other := seen.get(action.dest if action.nargs != 0 else flag):
                raise UsageError(f"{self._file}: {other} and {key} are the same setting")
            seen[action.dest if action.nargs != 0 else flag] = key
            if value is not None:
                yield _parse(parser, action, flag, value, f"{self._file}: {key}")

    def _unknown_key(self, key: str, flag: str, actions: Mapping[str, argparse.Action]) -> UsageError:
        if flag in COMMAND_LINE_ONLY:
            return UsageError(f"{self._file}: {key[:100]!r} can only be set on the command line")
        near = [name.removeprefix("--") for name in closest_flag(flag, [*actions])]
        hint = f"; did you mean {near[0]!r}?" if near else " (keys are the names of flags, see --help-all)"
        return UsageError(f"{self._file}: unknown key {key[:100]!r}{hint}")

    def _from_environment(self, parser: ArgumentParser, actions: Mapping[str, argparse.Action]) -> Iterator[Values]:
        """Yield the values of variables. A misspelled name is an error; others may belong to other programs."""
        own = [flag for flag in actions if flag not in COMMAND_LINE_ONLY | {PLUGIN}]  # there is NUCLEATE_PLUGINS
        flags = {flag[2:].replace("-", "_").upper(): flag for flag in own}
        known = [*flags, *OTHER_VARIABLES, "CONFIG"]
        for variable, text in sorted(self._environment.items()):
            name = variable.removeprefix(PREFIX)
            if not variable.startswith(PREFIX) or (name == "PORT" and "://" in text):  # set by Kubernetes
                continue
            if name in flags:
                action = actions[flags[name]]
                value = read_yaml_text(text, variable) if _is_list(action) and text.startswith("[") else text
                yield _parse(parser, action, flags[name], value, variable)
            elif name not in known and (near := difflib.get_close_matches(name, known, n=1, cutoff=SIMILARITY)):
                raise UsageError(f"unknown environment variable {variable}; did you mean {PREFIX}{near[0]}?")


def _parse(parser: ArgumentParser, action: argparse.Action, flag: str, value: Any, source: str) -> Values:
    """Return what a flag with this value sets. source: the place of the value, for errors."""
    if action.nargs == 0:
        given = _BOOLEANS.get(value.lower()) if isinstance(value, str) else None
        if given is None:
            raise UsageError(f"{source} must be true or false, got {str(value)[:60]!r}")
        return parser.parse_given([flag]) if given else {action.dest: action.default}
    texts = [*map(str, value)] if isinstance(value, list) and _is_list(action) else [_text(action, value, source)]
    try:
        return parser.parse_given([f"{flag}={text}" for text in texts])
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _is_list(action: argparse.Action) -> bool:
    """Whether a flag can be repeated."""
    return isinstance(action, argparse._AppendAction | argparse._ExtendAction)  # noqa: SLF001  # no public names


def _text(action: argparse.Action, value: Any, source: str) -> str:
    """Return a value as on a command line. A list or mapping is for flags such as ID,ID... or ID=NUMBER,..."""
    if isinstance(value, str):
        return value
    metavar = str(action.metavar or "")
    if isinstance(value, dict) and "=" in metavar:
        value = [f"{key}={item}" for key, item in value.items()]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        separator = next((mark for mark in "|," if mark in metavar), None)
        if separator is not None:
            return separator.join(value)
    raise UsageError(f"{source} must be one value, got a {'list' if isinstance(value, list) else 'mapping'}")


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
