"""The entry point ``nucleate COMMAND ...``: runs a command, and reports errors in one line with an exit status.

Exit status: 0 success; 1 failure (such as a model that cannot be loaded or a completion that ended with an error); 2
wrong usage (flags, values, prompts); 130 interrupted. The module of a command is imported when the command is run: its
``FLAGS`` or ``add_arguments``, ``COMMON`` (the arguments that ``--help`` lists) and ``run``.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from nucleate.cli.argument_parser import PLUGIN, ArgumentParser, Configuration, UsageError, add_flags, flag_values

__all__ = ["COMMANDS", "UsageError", "main"]

COMMANDS = {
    "generate": "Continue a prompt and stream the text to the terminal.",
    "chat": "Chat with a model in the terminal.",
    "serve": "Run an OpenAI-compatible HTTP server.",
    "batch": "Process a JSONL file of requests.",
    "compare": "Compare sampling settings over prompts and seeds.",
    "conform": "Check whether a server or a sampler samples what it says.",
    "detect": "Look for a watermark in a text.",
    "list": "List the models on this machine.",
    "pull": "Download a model from the Hugging Face hub.",
    "info": "Print what is inside a model.",
    "inspect": "Show what each sampling stage does to the next token of a prompt.",
    "bench": "Measure the time to sample a token on this machine.",
    "warm": "Compile the CPU kernels now instead of on first use.",
    "stages": "List all sampling stages with their parameters.",
    "completion": "Print a shell completion script.",
}
CONFIGURABLE = frozenset({"serve"})
"""The commands whose flags can also be set in a file or by environment variables."""

SHORT: Mapping[str, str] = {
    "--model": "Folder, GGUF file or hub id (default: bundled).",
    "PROMPT": "Text to continue; - reads stdin.",
    "--chat-template": "Chat format or Jinja file (default: the model's).",
    "OUTPUT": "Output file to append records to; - is stdout.",
    "--max-tokens": "Maximum tokens per output.",
    "--temperature": "Sampling temperature; 0 is greedy.",
    "--top-p": "Nucleus sampling: keep this probability mass.",
    "--top-k": "Keep the k most likely tokens.",
    "--min-p": "Minimum probability, relative to the best token.",
    "--repetition-penalty": "Penalize repeated tokens; 1 is off.",
    "--order": "Order of the stages: canonical, vllm, hf, ...",
    "--stop": "End the output before this text (repeatable).",
    "--seed": "Seed for reproducible output.",
    "--n": "Completions per prompt (default: 1).",
    "--json-schema": "Generate JSON that conforms to a schema.",
    "--regex": "Generate text that matches a pattern.",
    "--steps": "Number of tokens to inspect (default: 1).",
    "--web": "Open the inspector page in a browser.",
    "--settings": "JSON file of settings by name.",
    "--prompts": "File with a prompt per line, text or JSON.",
    "--output": "JSONL file of results, to resume.",
    "--plot": "Plot the trade-off: .png, .svg or .pdf.",
    "--host": "Address to bind (default: 127.0.0.1).",
    "--api-key-file": "File with accepted API keys, one per line.",
    "--config": "YAML file with values of flags.",
    "--served-model-name": "Model name in requests (default: --model).",
    "--max-num-seqs": "Maximum sequences that run at once (default: 64).",
    "--max-model-len": "Maximum tokens of prompt and completion.",
    "--kv-cache-memory": "Size of the KV cache in bytes.",
    "--speculative": "Speculative decoding method (default: off).",
    "--log-level": "debug, info, warning or error (default: info).",
    "--log-format": "json or text (default: text in a terminal).",
    "--device": "auto, cpu, cuda, cuda:1, ... (default: auto).",
}
"""What the short help says about an argument whose own help is longer than a line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows -- is text, not flags
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    debug = len(options) < end
    open_outputs()
    try:
        return run(options + arguments[end:])
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # noqa: BLE001  # every error is reported in one line
        if debug:
            traceback.print_exc()
        if isinstance(error, UsageError) and error.usage:
            print(error.usage, file=sys.stderr)
        print(f"nucleate: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) or hasattr(error, "field") else 1


def open_outputs() -> None:
    """Make stdout and stderr accept any text, even if they are closed or their encoding lacks characters.

    Without a stderr, ``print(..., file=sys.stderr)`` would write to stdout.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115  # open until exit
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def one_line(error: Exception) -> str:
    """Return the message of an error; for an unexpected one, also its type and how to get the traceback."""
    from nucleate.models.protocol import ModelError
    from nucleate.parameters.parameter import ParameterError

    message = " ".join(str(error).split())
    if isinstance(error, UsageError | ParameterError | ModelError):
        return message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {message} (add --debug for the traceback)"


def run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help", *arguments[2:]]
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
        raise UsageError(f"unknown command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
    configuration = Configuration(arguments[1:], os.environ) if name in CONFIGURABLE else None
    plugins = [] if configuration is None else configuration.plugins
    from nucleate.jit.thread_pool import cores
    from nucleate.plugins.plugin_loader import load_plugins

    load_plugins([*plugins, *flag_values(arguments[1:], PLUGIN)])  # first: a registered stage has flags
    command, parser = importlib.import_module(f"nucleate.cli.{name}"), command_parser(name)
    parsed = parser.parse_args(arguments[1:]) if configuration is None else configuration.parse(parser, arguments[1:])
    cores()  # reports an invalid NUCLEATE_THREADS before any work
    return int(command.run(parsed))


def command_parser(name: str) -> ArgumentParser:
    command = importlib.import_module(f"nucleate.cli.{name}")
    prog = f"nucleate {name}"
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} {command.USAGE}".rstrip(),
        description=command.__doc__,
        common={name: SHORT.get(name, "") for name in getattr(command, "COMMON", ())},
    )
    add_arguments(parser, name)
    return parser


def add_arguments(parser: ArgumentParser, name: str) -> None:
    command = importlib.import_module(f"nucleate.cli.{name}")
    if hasattr(command, "add_arguments"):
        command.add_arguments(parser)
    else:
        add_flags(parser, command.FLAGS)
    text = "Load stages from a module or a .py file (repeatable; also: NUCLEATE_PLUGINS, separated by commas)."
    parser.add_argument(PLUGIN, action="append", metavar="MODULE", help=text)
    parser.add_argument("--debug", action="store_true", help="Show the traceback of an error.")


def usage() -> str:
    rows = "\n".join(f"  {name:12}{summary}" for name, summary in COMMANDS.items())
    return (
        "usage: nucleate COMMAND [OPTIONS]\n\nGenerate text with a language model. A small model is bundled.\n\n"
        f"commands:\n{rows}\n\nRun 'nucleate help COMMAND' for the options of a command, 'nucleate --version' for the "
        "version."
    )
