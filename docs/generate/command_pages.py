"""Generates a page per command from its argument parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from nucleate.cli.main import COMMANDS, command_parser


def command_page(name: str) -> str:
    """Return the page of a command: its description, and every argument by group."""
    parser = command_parser(name)
    about = (parser.description or "").strip().partition("\n")[2].strip()
    parts = [f"# nucleate {name}", COMMANDS[name], f"```text\n{parser.usage}\n```", *filter(None, [_plain(about)])]
    for group in parser._action_groups:  # noqa: SLF001  # argparse has no public list
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]  # noqa: SLF001
        if shown:
            parts += [f"## {(group.title or 'options').capitalize()}", *filter(None, [_plain(group.description or "")])]
            parts += [_argument(action, parser) for action in shown]
    return "\n\n".join(parts) + "\n"


def _argument(action: argparse.Action, parser: Any) -> str:
    values = parser._get_formatter()._format_args(action, action.metavar or action.dest.upper())  # noqa: SLF001
    text = " ".join((action.help or "").replace("%%", "%").split())
    return (
        f"`{', '.join([*action.option_strings]) or ''} {'' if action.nargs == 0 else values}".rstrip().replace(
            "` ", "`"
        )
        + f"`\n: {_plain(text)}"
    )


def _plain(text: str) -> str:
    """Return help text as Markdown: flags and file names as code, and no other markup."""
    return "\n\n".join(_paragraphs(text))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in filter(None, re.split(r"\n\s*\n", text)):
        line = re.sub(r"``([^`]+)``", r"`\1`", " ".join(paragraph.split()))
        parts = re.split(r"(`[^`]+`)", line)
        yield "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    """Return prose with flags as code."""
    return re.sub(r"(?<![\w-])(--[a-z][a-z0-9-]*)", r"`\1`", re.sub(r"([*_<\[\]#|])", r"\\\1", text))
