"""The argument parser of all commands: a short and a full help, and errors that suggest the intended flag."""

from __future__ import annotations

import argparse
import difflib
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NoReturn

SYNONYMS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""Flags of other programs, and ours."""
SIMILARITY = 0.8
"""Minimum similarity (difflib's ratio) of a suggested flag."""
_MAX_WIDTH = 100


class UsageError(Exception):
    """The command line is wrong: exit status 2. usage: the usage line of the command, if it helps."""

    usage = ""


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

    common: help texts of the most used arguments, by flag or by the metavar of a positional argument. With them,
    ``--help`` lists only these, on one screen, and ``--help-all`` lists everything.
    """

    def __init__(self, *, common: Mapping[str, str] = MappingProxyType({}), **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=HelpFormatter, **options)
        self.common = common
        self.add_argument("-h", "--help", action=_Help, help="Show this help.")
        if common:
            self.add_argument("--help-all", action=_HelpAll, help="Show the help of all options.")

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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown flags first, because the word after one would be taken for a positional argument."""
        if unknown := [] if args is None else self._unknown_flags(list(args)):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(args, namespace)

    def _unknown_flags(self, words: list[str]) -> list[str]:
        """Return the unknown flags before ``--``, each with the word after it, which may be its value."""
        found: list[str] = []
        for word, value in pairwise([*words[: words.index("--") if "--" in words else len(words)], "-"]):
            known = word.partition("=")[0] in self._option_string_actions
            if word.startswith("--") and word[2:3].isalpha() and not known and not any(map(str.isspace, word)):
                found += [word] if value.startswith("-") or "=" in word else [word, value]
        return found

    def format_short_help(self) -> str:
        """Return the help of the common arguments."""
        actions = {name: action for action in self._actions for name in (*action.option_strings, action.metavar)}
        rows = [(_invocation(actions[name], name), text) for name, text in self.common.items()]
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


def closest_flag(word: str, flags: Iterable[str]) -> list[str]:
    """Return the flag that a misspelled one, or one of another program, stands for; [] if there is none."""
    known = SYNONYMS.get(word)
    return (
        [known]
        if known is not None and known in flags
        else difflib.get_close_matches(word, flags, n=1, cutoff=SIMILARITY)
    )


def _invocation(action: argparse.Action, name: str) -> str:
    """Return how the short help writes an argument: with its one-letter flag and metavar."""
    if not action.option_strings:
        return name
    short = next((f"{flag}, " for flag in action.option_strings if len(flag) == 2), "")
    metavar = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"{short}{name}{metavar}"


class _Help(argparse.Action):
    """Prints the short help, if there is one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(nargs=0, **{**options, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        if isinstance(parser, ArgumentParser) and parser.common:
            print(parser.format_short_help(), end="")
        else:
            parser.print_help()
        parser.exit()


class _HelpAll(_Help):
    """Prints the help of all arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        parser.exit()
