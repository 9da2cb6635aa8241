"""Talk to a model. Lines are messages; lines that begin with / are commands (/help lists them).

Ctrl-C stops an answer, not the program; Ctrl-D or /quit ends it.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.generate import StreamPrinter
from nucleate.cli.main import UsageError
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams

if TYPE_CHECKING:
    from nucleate.llm import LLM

USAGE = "[OPTIONS]"
HELP = """/set NAME VALUE   change a sampling parameter, as in /set temperature 0.7; without VALUE, back to its default
/params           show the sampling parameters
/system TEXT      begin a new conversation with this system message
/new              begin a new conversation
/again            answer the last message once more, with other noise
/help             this list
/quit             end"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    flags.add_model(parser)
    flags.add_speculation(parser)
    flags.add_sampling(parser, without=("n",))


def run(arguments: argparse.Namespace) -> int:
    values = flags.given(arguments)
    if sys.stdin is None:
        raise UsageError("nothing to read: stdin is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):  # a line that is no text is an error of that line alone
        sys.stdin.reconfigure(errors="surrogateescape")
    from nucleate.llm import LLM

    llm = LLM(**flags.model_options(arguments))
    if llm.tokenizer.chat_template is None:
        raise UsageError(f"the model in {llm.folder} has no chat template; use nucleate generate")
    chat = ChatSession(llm, llm.default_params.override(**values), arguments.system)
    if sys.stdin.isatty():
        print("/help lists the commands, Ctrl-D ends", file=sys.stderr)
    return max([chat.hear(line) for line in lines()], default=0)


def lines() -> Iterator[str]:
    """The lines the user types, or those piped in, until the end or /quit."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  # gives input() its editing and history
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            if prompt:
                print(file=sys.stderr)  # the shell's own prompt begins on a line of its own
            return
        except KeyboardInterrupt:  # at the prompt it only clears the line
            if not prompt:
                raise
            print(file=sys.stderr)
            continue
        if line.split()[:1] == ["/quit"]:
            return
        if line:
            yield line


class ChatSession:
    """A conversation and its parameters."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm, self.params, self.answers = llm, params, 0
        self.messages: list[dict[str, str]] = []
        self.begin(system)

    def begin(self, system: str | None) -> None:
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system else []

    def hear(self, line: str) -> int:
        """Obey a command or answer a message. Returns 1 if that failed."""
        try:
            if line.startswith("/"):
                command, *rest = line[1:].split(maxsplit=1) or [""]
                return self.obey(command, "".join(rest))
            return self.answer([*self.messages, {"role": "user", "content": line}])
        except ParameterError as error:
            print(f"nucleate: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # between two lines, too, it does not end the program, unless nobody types them
            if not sys.stdin.isatty():
                raise
            print(file=sys.stderr)
            return 0

    def obey(self, command: str, rest: str) -> int:
        match command:
            case "set":
                self.set(*(rest.split(maxsplit=1) or [""]))
            case "params":
                print(self.params)
            case "system":
                self.begin(rest or None)
            case "new":
                self.begin(self.system)
            case "again":
                users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
                if not users:
                    raise ParameterError("again", "there is no message to answer again")
                return self.answer(self.messages[: users[-1] + 1])
            case "help":
                print(HELP)
            case _:
                raise ParameterError("command", f"there is no command /{command}; /help lists them")
        return 0

    def set(self, name: str, value: str = "") -> None:
        """Set a parameter, or without a value set it back to what the model recommends."""
        name = name.replace("-", "_")
        if name == "n":
            raise ParameterError("n", "a chat has one answer at a time: n cannot be set")
        if value or name not in FIELDS:
            self.params = flags.assign(self.params, name, value)
        else:
            self.params = self.params.replace(**{name: getattr(self.llm.default_params, name)})

    def answer(self, messages: list[dict[str, str]]) -> int:
        """Stream an answer to the last message and keep both, also if Ctrl-C cut it short.

        A message that cannot be answered is not kept, and leaves the conversation as it was.
        """
        kept = self.fitting(messages)
        stream, parts, params = StreamPrinter(1), [], self.params
        if params.seed is not None:  # each answer of a conversation has noise of its own
            params = params.replace(seed=(params.seed + self.answers) % 2**64)
        pieces = self.llm.stream_chat(kept, params)
        self.answers += 1
        for _ in range((len(messages) - len(kept)) // 2):
            print("(the oldest exchange is forgotten: the context is nearly full)", file=sys.stderr)
        try:
            for piece in pieces:
                stream.print(piece)
                parts.append(piece.text)
        except KeyboardInterrupt:
            pass
        self.messages = [*kept, {"role": "assistant", "content": "".join(parts)}]
        return stream.end(self.llm.model.runtime)

    def fitting(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """The messages without the oldest exchanges, while they fill more than 3/4 of the context."""
        room = self.llm.model.context_length * 3 // 4
        while len(self.llm.encode_chat(messages)) > room:
            users = [i for i, message in enumerate(messages) if message["role"] == "user"]
            if len(users) < 2:
                break
            messages = messages[: users[0]] + messages[users[1] :]
        return messages
