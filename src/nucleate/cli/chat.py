"""Chat with a model in the terminal.

Each line is a message; lines that begin with / are commands (/help lists them). Ctrl-C stops the reply, Ctrl-D or /quit
ends the program. Sampling parameters that are not set take the values of the model's generation_config.json (see
--generation-config), then the defaults listed here.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.generate import StreamPrinter
from nucleate.cli.sampling_flags import add_sampling, read_values, set_parameter
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams

if TYPE_CHECKING:
    from nucleate.llm import LLM

USAGE = "[OPTIONS]"
COMMON = (
    *("--model", "--system", "--max-tokens", "--temperature", "--top-p"),
    *("--top-k", "--min-p", "--repetition-penalty", "--seed", "--json-schema"),
)
HELP = """/set NAME VALUE   Set a sampling parameter, as in /set temperature 0.7. Without VALUE: restore the default.
/params           Show the sampling parameters.
/system TEXT      Start a new conversation with this system message.
/new              Start a new conversation.
/regenerate       Regenerate the last reply with another seed.
/help             Show this list.
/quit             Exit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="System message at the start of the conversation.")
    flags.add_model(parser)
    add_sampling(parser, without=("n",))


def run(arguments: argparse.Namespace) -> int:
    values = read_values(arguments)
    if sys.stdin is None:
        raise UsageError("nothing to read: stdin is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):  # invalid UTF-8 is an error of that line only
        sys.stdin.reconfigure(errors="surrogateescape")
    from nucleate.llm import LLM

    llm = LLM(**flags.model_options(arguments))
    if llm.tokenizer.chat_template is None:
        raise UsageError(f"the model in {llm.folder} has no chat template; use 'nucleate generate' instead")
    chat = ChatSession(llm, llm.default_params.override(**values), arguments.system)
    if sys.stdin.isatty():
        print("Type /help for commands, Ctrl-D to exit.", file=sys.stderr)
    return max([chat.handle(line) for line in lines()], default=0)


def lines() -> Iterator[str]:
    """Yield the lines of stdin until its end or /quit."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  # editing and history for input()
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print(file=sys.stderr)  # the shell prompt starts on a new line
            return
        except KeyboardInterrupt:  # at the prompt, only clear the line
            if not prompt:
                raise
            print(file=sys.stderr)
            continue
        if line.split()[:1] == ["/quit"]:
            return
        if line:
            yield line


class ChatSession:
    """A conversation and its sampling parameters."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm, self.params, self.replies = llm, params, 0
        self.messages: list[dict[str, str]] = []
        self.start(system)

    def start(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def handle(self, line: str) -> int:
        """Run a command or reply to a message. Returns 1 if generation failed; a typing error is only reported."""
        try:
            if line.startswith("/"):
                command, *rest = line[1:].split(maxsplit=1) or [""]
                return self.run_command(command, "".join(rest))
            return self.reply([*self.messages, {"role": "user", "content": line}])
        except ParameterError as error:
            print(f"nucleate: {error}", file=sys.stderr)
            return 0
        except KeyboardInterrupt:  # in a terminal, Ctrl-C does not end the program
            if not sys.stdin.isatty():
                raise
            print(file=sys.stderr)
            return 0

    def run_command(self, command: str, rest: str) -> int:
        match command:
            case "set":
                self.set(*(rest.split(maxsplit=1) or [""]))
            case "params":
                print(self.params)
            case "system":
                self.start(rest or None)
            case "new":
                self.start(self.system)
            case "regenerate":
                if not (users := _users(self.messages)):
                    raise ParameterError("regenerate", "there is no reply to regenerate")
                return self.reply(self.messages[: users[-1] + 1])
            case "help":
                print(HELP)
            case _:
                raise ParameterError("command", f"unknown command /{command}; type /help for a list")
        return 0

    def set(self, name: str, value: str = "") -> None:
        """Set a parameter; without a value, restore the model's recommendation."""
        name = name.replace("-", "_")
        if name == "n":
            raise ParameterError("n", "n cannot be set in a chat, which has one reply at a time")
        if value or name not in FIELDS:
            self.params = set_parameter(self.params, name, value)
        else:
            kept = {field: getattr(self.params, field) for field in self.params.fields_set if field != name}
            self.params = self.llm.default_params.override(**kept)

    def reply(self, messages: list[dict[str, str]]) -> int:
        """Stream the reply to the last message and keep both, also if Ctrl-C stopped it.

        A message that causes an error leaves the conversation unchanged.
        """
        kept_messages = self.truncate(messages)
        stream, params = StreamPrinter(1), self.params
        if params.seed is not None:  # each reply uses another seed
            params = params.replace(seed=(params.seed + self.replies) % 2**64)
        chunks = self.llm.stream_chat(kept_messages, params)
        self.replies += 1
        for _ in range((len(messages) - len(kept_messages)) // 2):
            print("(context nearly full: the oldest messages were removed)", file=sys.stderr)
        status = stream.show(chunks, self.llm.model.runtime)
        self.messages = [*kept_messages, {"role": "assistant", "content": stream.text}]
        return status

    def truncate(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Remove the oldest messages while the conversation fills more than 3/4 of the context."""
        limit = self.llm.model.context_length * 3 // 4
        while len(self.llm.encode_chat(messages)) > limit:
            if len(users := _users(messages)) < 2:
                break
            messages = messages[: users[0]] + messages[users[1] :]
        return messages


def _users(messages: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "user"]
