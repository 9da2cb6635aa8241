"""``nucleate COMMAND ...``: finds the command, and turns every error into one line and an exit status.

Exit status: 0 done; 1 failed (a model that cannot be loaded, an answer that ended in an error); 2 bad usage (flags,
values, prompts); 130 interrupted. Imports nothing heavy: a command's file is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

COMMANDS = {
    "generate": "continue a prompt, streaming to the terminal",
    "chat": "talk to a model",
    "serve": "answer OpenAI's clients over HTTP",
    "batch": "answer the lines of a file, many at a time",
    "inspect": "show what every stage does to the next token of a prompt",
    "bench": "measure what drawing a token costs here",
    "warm": "compile the CPU kernels now, not when they are first needed",
    "stages": "list every stage of the pipeline with its parameters",
}


ALIKE = 0.8
"""How alike two flags are, as difflib has it, of which one may be a slip for the other."""


class ArgumentParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += "; a value that begins with - is written --flag=VALUE"
        elif message.startswith("unrecognized arguments: "):
            message += self._near(message.split())
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _near(self, words: Sequence[str]) -> str:
        """The flags that may be meant by words that are like them."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        said = [word.partition("=")[0] for word in words if word.startswith("--")]
        found = [near for word in said for near in difflib.get_close_matches(word, flags, n=1, cutoff=ALIKE)]
        return f"; did you mean {', '.join(found)}?" if found else ""


class UsageError(Exception):
    """The command line is wrong; exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is text, not flags
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    debug = len(options) < end
    open_outputs()
    try:
        return run(options + arguments[end:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away, as with `| head`: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  # whatever it is, the user sees one line
        if debug:
            traceback.print_exc()
        print(f"nucleate: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) or hasattr(error, "field") else 1


def open_outputs() -> None:
    """Make stdout and stderr take every text, whatever they are: closed, or of an encoding that has not all characters.

    Without a stderr, ``print(..., file=sys.stderr)`` would write to stdout.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  # for as long as we run
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def one_line(error: Exception) -> str:
    """The message of an error; errors nobody planned for say their type and how to see more."""
    from nucleate.models.protocol import ModelError
    from nucleate.parameters.parameter import ParameterError

    message = " ".join(str(error).split())
    if isinstance(error, UsageError | ParameterError | ModelError):
        return message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {message} (add --debug for the traceback)"


def run(arguments: list[str]) -> int:
    """Find the command and run it."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from nucleate import __version__

        print(f"nucleate {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"there is no command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
    command = importlib.import_module(f"nucleate.cli.{name}")
    prog = f"nucleate {name}"
    parser = ArgumentParser(prog=prog, usage=f"{prog} {command.USAGE}", description=command.__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parsed = parser.parse_args(arguments[1:])
    from nucleate.jit.thread_pool import cores

    cores()  # what is wrong with NUCLEATE_THREADS is told now
    return int(command.run(parsed))


def usage() -> str:
    rows = "\n".join(f"  {name:10}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: nucleate COMMAND [OPTIONS]\n\nFrom an LLM's logits to text. A tiny model ships inside.\n\n"
        f"commands:\n{rows}\n\n`nucleate COMMAND --help` has the details; `nucleate --version` the version."
    )
