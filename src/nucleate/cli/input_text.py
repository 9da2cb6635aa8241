"""Reads the prompt of a command from its argument, a file or stdin, always as UTF-8."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from nucleate.cli.argument_parser import UsageError

DEFAULT_PROMPT = "Once upon a time"


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``read_prompt`` reads."""
    text = "Text to continue; - reads stdin. After --, the text may begin with -."
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help=text)
    parser.add_argument("-f", "--file", type=Path, metavar="FILE", help="Read the prompt from a file.")


def read_prompt(arguments: argparse.Namespace) -> str:
    """Return the prompt. Raises UsageError, OSError."""
    if arguments.prompt is not None and arguments.file is not None:
        raise UsageError("the argument PROMPT and --file cannot be combined")
    if arguments.file is not None:
        text = decode(arguments.file.read_bytes(), str(arguments.file))
    elif arguments.prompt not in (None, "-"):
        text = arguments.prompt
    elif arguments.prompt == "-" or is_piped():
        text = read_stdin("no prompt: ")
    elif arguments.model is None:
        arguments.echo = True
        return DEFAULT_PROMPT
    else:
        raise UsageError("no prompt: pass it as an argument, with --file or on stdin")
    if not text and arguments.prompt != "":
        raise UsageError(f"{arguments.file or 'stdin'} is empty: to generate from the BOS token, pass '' as the prompt")
    return str(text)


def read_stdin(problem: str = "") -> str:
    """Return the text of stdin. Raises UsageError. problem: the start of the message if it is closed."""
    if sys.stdin is None:
        raise UsageError(f"{problem}stdin is closed")
    return decode(sys.stdin.buffer.read(), "stdin")


def decode(data: bytes, source: str) -> str:
    """Decode UTF-8 without changing line ends. Raises UsageError."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: {error.reason} at byte {error.start}") from None


def is_piped() -> bool:
    """Return whether stdin is a pipe or a file, and so meant to be read."""
    if sys.stdin is None or sys.stdin.closed:
        return False
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # not a real file, as in tests
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)
