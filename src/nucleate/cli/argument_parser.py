"""The argument parser of all commands: a short and a full help, and errors that suggest the intended flag.

Values of flags can also be in a configuration file (YAML), whose keys are the names of flags, and in environment
variables: ``NUCLEATE_`` and the name in upper case, such as ``NUCLEATE_MAX_NUM_SEQS``. The command line has precedence
over variables, variables over the file.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from nucleate.parameters.converters import install_extra

SYNONYMS: Mapping[str, str] = {
    "--max-new-tokens": "--max-tokens",
    "--max-length": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--repeat-penalty": "--repetition-penalty",
    "--repeat-last-n": "--penalty-last-n",
    "--typical": "--typical-p",
    "--beam-width": "--num-beams",
    "--ctx-size": "--max-model-len",
    "--max-num-batched-token": "--max-num-batched-tokens",
    "--gpu-memory-utilization": "--kv-cache-memory",
    "--speculative-config": "--speculative",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "--guided-json": "--json-schema",
    "--guided-regex": "--regex",
    "--guided-choice": "--choice",
    "--guided-grammar": "--grammar",
    "--allowed-origins": "--allow-origin",
    "--timeout-keep-alive": "--keep-alive-seconds",
    "--timeout-graceful-shutdown": "--shutdown-timeout-seconds",
    "--limit-concurrency": "--max-connections",
}
"""Flags of other programs, and ours."""
SIMILARITY = 0.8
"""Minimum similarity (difflib's ratio) of a suggested flag."""
_MAX_WIDTH = 100


class UsageError(Exception):
    """The command line is wrong: exit status 2. usage: the usage line of the command, if it helps."""

    usage = ""


TYPES: Mapping[str, type] = {"N": int, "BYTES": int, "FILE": Path, "PATH": Path}
"""The types of values, by the metavar of their flag."""


class Flag:
    """A row of a table of flags.

    names: as in the help, such as "-m, --model MODEL"; without a metavar, it is a switch. The type follows from the
    metavar (N is an integer, FILE a path) or from the default. text: the help; the default is added unless it ends with
    a period. options: others of ``argparse``.
    """

    def __init__(self, names: str, text: str, default: Any = None, **options: Any) -> None:
        words = names.replace(", ", " ").split()
        self.names, metavar = [word for word in words if word.startswith("-")], words[-1]
        self.name = next(name for name in self.names if name.startswith("--"))[2:].replace("-", "_")  #: of the argument
        self.help = text if text.endswith(".") else f"{text} (default: {default})."
        self.options = options
        if metavar in self.names:
            options.setdefault("action", "store_true")
            if default is not None:
                options["default"] = default
            return
        options |= {"metavar": metavar, "default": default}
        kind = TYPES.get(metavar) if default is None else type(default)
        if "type" not in options and kind in (int, float, Path):
            options["type"] = kind

    def value(self, arguments: argparse.Namespace) -> Any:
        """Its value in parsed arguments; None if the command does not have it."""
        return getattr(arguments, self.name, None)


def add_flags(parser: Any, flags: Iterable[Flag], title: str = "") -> None:
    """Add flags to a parser, or to a group of it. title: that of a new group."""
    group = parser.add_argument_group(title) if title else parser
    for flag in flags:
        group.add_argument(*flag.names, help=flag.help, **flag.options)


class HelpFormatter(argparse.HelpFormatter):
    """Writes ``-t, --temperature NUMBER`` instead of repeating the metavar, and fills paragraphs up to 100 columns."""

    def __init__(self, prog: str) -> None:
        width = min(_MAX_WIDTH, shutil.get_terminal_size((80, 24)).columns) - 2
        super().__init__(prog, max_help_position=30, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.strip().split("\n\n"))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        metavar = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {metavar}"


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser with a short help.

    common: help texts of the most used arguments, by flag or by the metavar of a positional argument; an empty one is
    that of the argument. With them, ``--help`` lists only these, on one screen, and ``--help-all`` lists everything.
    """

    def __init__(self, *, common: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self.common = common or {}
        self.add_argument("-h", "--help", action=_Help, help="Show this help.")
        if common:
            self.add_argument("--help-all", action=_Help, help="Show the help of all options.")

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """The arguments in the order in which they were added."""
        return tuple(self._actions)

    def parse_given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Parse arguments and return only the values that they set, without defaults."""
        defaults = [(action, action.default) for action in self._actions]
        try:
            for action, _ in defaults:
                action.default = argparse.SUPPRESS
            return vars(self.parse_args(arguments))
        finally:
            for action, default in defaults:
                action.default = default

    def format_short_help(self) -> str:
        """Return the help of the common arguments."""
        actions = {name: action for action in self._actions for name in action.option_strings or [str(action.metavar)]}
        rows = [(_invocation(actions[name], name), text or actions[name].help) for name, text in self.common.items()]
        width = max(len(left) for left, _ in rows) + 4
        lines = [f"  {left:{width - 2}}{text}" for left, text in rows]
        summary = (self.description or "").strip().splitlines()[0]
        end = f"Run '{self.prog} --help-all' to list all options."
        return "\n".join([f"usage: {self.usage}", "", summary, "", "common options:", *lines, "", end, ""])

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; write a value that begins with - as --flag=VALUE"
        elif message.startswith("unrecognized arguments: "):
            message += self._suggestion(message.split())
        error = UsageError(f"{message} (see {self.prog} --help)")
        error.usage = f"usage: {self.usage}"
        raise error

    def _suggestion(self, words: Sequence[str]) -> str:
        """Suggest the flags that misspelled ones may stand for."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        given = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]
        found = [flag for word in given for flag in closest_flag(word, flags)]
        return f"; did you mean {', '.join(found)}?" if found else ""


def flag_values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """Yield the values of a flag in a command line, for flags that are read before there is a parser."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for word, value in pairwise([*arguments[:end], ""]):
        if word == flag:
            yield value
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def closest_flag(word: str, flags: Collection[str]) -> list[str]:
    """Return the flag that a misspelled one, or one of another program, stands for; [] if there is none."""
    if SYNONYMS.get(word) in flags:
        return [SYNONYMS[word]]
    return difflib.get_close_matches(word, flags, n=1, cutoff=SIMILARITY)


def _invocation(action: argparse.Action, name: str) -> str:
    """Return how the short help writes an argument: with its one-letter flag and metavar."""
    if not action.option_strings:
        return name
    short = next((f"{flag}, " for flag in action.option_strings if len(flag) == 2), "")
    metavar = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"{short}{name}{metavar}"


class _Help(argparse.Action):
    """Prints the short help, if there is one and it is not ``--help-all``."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: Any, namespace: object, values: object, flag: str | None = None) -> None:
        print(parser.format_short_help() if parser.common and flag != "--help-all" else parser.format_help(), end="")
        parser.exit()


PREFIX = "NUCLEATE_"
CONFIG, PLUGIN = "--config", "--plugin"
OTHER_VARIABLES = frozenset({"API_KEYS", "CACHE", "PLUGINS", "THREADS", "WATERMARK_KEY_FILE", "TEST_GGUF"})
"""Variables that are not named after a flag."""
COMMAND_LINE_ONLY = frozenset({"--help", "--help-all", "--debug", CONFIG})
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

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
            if flag in COMMAND_LINE_ONLY:
                raise UsageError(f"{self._file}: {key[:100]!r} can only be set on the command line")
            if flag not in actions:
                near = [name.removeprefix("--") for name in closest_flag(flag, actions)]
                hint = f"; did you mean {near[0]!r}?" if near else " (keys are the names of flags, see --help-all)"
                raise UsageError(f"{self._file}: unknown key {key[:100]!r}{hint}")
            action = actions[flag]
            if (other := seen.setdefault(action.dest if action.nargs != 0 else flag, key)) != key:
                raise UsageError(f"{self._file}: {other} and {key} are the same setting")
            if value is not None:
                yield _parse(parser, action, flag, value, f"{self._file}: {key}")

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
        given = BOOLEANS.get(value.lower()) if isinstance(value, str) else None
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
