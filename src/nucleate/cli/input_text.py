"""Text that a command is given: as an argument, in a file, through a pipe; whatever the locale. Knows no command."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from nucleate.cli.main import UsageError

FIRST_WORDS = "Once upon a time"


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The arguments that ``read_prompt`` reads."""
    text = "the text to continue; - reads stdin; after --, it may begin with -"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    parser.add_argument("-f", "--file", type=Path, help="read the prompt from a file")


def read_prompt(arguments: argparse.Namespace) -> str:
    """The prompt from wherever it comes."""
    if arguments.prompt is not None and arguments.file is not None:
        raise UsageError("give a prompt or --file, not both")
    if arguments.file is not None:
        text = decode(arguments.file.read_bytes(), str(arguments.file))
    elif arguments.prompt not in (None, "-"):
        text = arguments.prompt
    elif arguments.prompt == "-" or piped():
        if sys.stdin is None:
            raise UsageError("no prompt: stdin is closed")
        text = decode(sys.stdin.buffer.read(), "stdin")
    elif arguments.model is None:
        arguments.echo = True
        return FIRST_WORDS
    else:
        raise UsageError("no prompt: give one as an argument, with --file, or pipe one in")
    if not text:
        raise UsageError("the prompt is empty: give some text as an argument, with --file, or pipe it in")
    return str(text)


def decode(data: bytes, source: str) -> str:
    """The text of a file or of stdin: UTF-8, its line ends as they are. Raises UsageError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def piped() -> bool:
    """True if stdin is a pipe or a file, so that somebody meant it to be read."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # no real file, as under a test runner
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
