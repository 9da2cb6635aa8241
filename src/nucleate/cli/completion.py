"""Print a shell completion script.

Bash: add eval "$(nucleate completion bash)" to ~/.bashrc. Zsh: save the output as _nucleate in a directory of $fpath.
"""

from __future__ import annotations

import argparse

from nucleate.cli.argument_parser import ArgumentParser

USAGE = "SHELL"
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=f"Shell: {', '.join(SHELLS)}.")


def run(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(full_parser(), shell=arguments.shell))
    return 0


def full_parser() -> argparse.ArgumentParser:
    """Return one parser with all commands."""
    from nucleate.cli.main import COMMANDS
    from nucleate.cli.main import add_arguments as add_arguments_of

    parser = ArgumentParser(prog="nucleate", usage="nucleate COMMAND [OPTIONS]")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary in COMMANDS.items():
        add_arguments_of(commands.add_parser(name, help=summary), name)
    return parser
