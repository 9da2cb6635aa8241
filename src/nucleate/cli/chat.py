"""Chat with a model in the terminal.

Each line is a message; a text of several lines stands between two lines of three quotes, or has a backslash at the end
of each line but the last. Lines that begin with / are commands (/help lists them; the Tab key completes them). Ctrl-C
stops the reply, Ctrl-D or /quit ends the program. Earlier lines are kept for the next chat. Sampling parameters that
are not set take the values of the model's generation_config.json (see --generation-config), then the defaults listed
here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.generate import StreamPrinter
from nucleate.cli.sampling_flags import add_sampling, read_values, set_parameter
from nucleate.cli.terminal import Terminal
from nucleate.outputs import CompletionChunk
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams

if TYPE_CHECKING:
    from nucleate.llm import LLM

USAGE = "[OPTIONS]"
COMMON = (
    *("--model", "--chat-template", "--system", "--max-tokens", "--temperature", "--top-p"),
    *("--top-k", "--min-p", "--repetition-penalty", "--seed", "--json-schema"),
)
QUOTES = '"""'
COMMANDS = {
    "set NAME VALUE": "Set a sampling parameter, as in /set temperature 0.7. Without VALUE: restore the default.",
    "seed N": "Use seed N for the next reply, N + 1 for the one after it. Without N: a random seed each.",
    "show": "Show the model, the system message, the sampling parameters and the length of the conversation.",
    "system TEXT": "Start a new conversation with this system message.",
    "new": "Start a new conversation.",
    "retry": "Generate the last reply again, with another seed.",
    "edit TEXT": "Replace the last message and reply to it. Without TEXT: edit it in the terminal.",
    "probs N": "Show the probabilities of the tokens of the last reply, beside the N likeliest ones (default: 3).",
    "save FILE": "Save the conversation and the sampling parameters.",
    "load FILE": "Continue a saved conversation.",
    "help": "Show this list.",
    "quit": "Exit.",
}
HISTORY_LINES = 1000
MAX_ALTERNATIVES = 20


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
        llm.use_chat_template("plain")
        print("The model has no chat template: chatting in the format plain (see --chat-template).", file=sys.stderr)
    chat = ChatSession(llm, llm.default_params.override(**values), arguments.system)
    with InputLines(sys.stdin.isatty()) as chat.lines:
        if chat.lines.interactive:
            print("Type /help for commands, Ctrl-D to exit.", file=sys.stderr)
        return max([chat.handle(message) for message in chat.lines], default=0)


class InputLines:
    """The messages and commands on stdin, until its end or /quit. In a terminal: with editing, history and completion.

    The history is in the folder nucleate of XDG_STATE_HOME, or ~/.local/state, and has the last ``HISTORY_LINES``.
    """

    def __init__(self, interactive: bool) -> None:
        self.interactive = interactive
        self._readline: Any = None
        if interactive:
            with contextlib.suppress(ImportError):  # not on Windows: there, input() has the editing of the console
                self._readline = importlib.import_module("readline")
        base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
        self._file = Path(base) / "nucleate" / "chat_history"

    def __enter__(self) -> Self:
        if (readline := self._readline) is not None:
            with contextlib.suppress(OSError):  # no history
                readline.read_history_file(self._file)
            self._start = readline.get_current_history_length()
            readline.set_history_length(HISTORY_LINES)
            readline.set_completer_delims(" ")
            readline.set_completer(self._complete)
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")  # a pasted text is one message
        return self

    def __exit__(self, *_: object) -> None:
        if (readline := self._readline) is not None:
            with contextlib.suppress(OSError):  # a home that is read-only
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file.touch(mode=0o600)
                if hasattr(readline, "append_history_file"):  # keeps what other chats have added
                    readline.append_history_file(readline.get_current_history_length() - self._start, self._file)
                else:
                    readline.write_history_file(self._file)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                message = self._message()
            except EOFError:
                if self.interactive:
                    print(file=sys.stderr)  # the shell prompt starts on a new line
                return
            except KeyboardInterrupt:  # at the prompt, only clear the message
                if not self.interactive:
                    raise
                print(file=sys.stderr)
                continue
            if message.startswith("/") and message.split()[0] == "/quit":
                return
            if message:
                yield message

    def edit(self, text: str) -> str:
        """Return a text after the user has changed it. Raises EOFError, KeyboardInterrupt."""
        self._readline.set_startup_hook(lambda: self._readline.insert_text(text))
        try:
            return self._message()
        finally:
            self._readline.set_startup_hook(None)

    @property
    def can_edit(self) -> bool:
        """Whether ``edit`` works: in a terminal, and not on Windows."""
        return self._readline is not None

    def _message(self) -> str:
        line = self._line("> ").strip()
        if line.startswith(QUOTES):
            text = line.removeprefix(QUOTES)
            with contextlib.suppress(EOFError):  # the end of the input is the end of the text
                while not text.endswith(QUOTES):
                    text += "\n" + self._line("... ")
            text = text.removesuffix(QUOTES).strip()
            return f" {text}" if text.startswith("/") else text  # no command
        while line.endswith("\\"):
            line = line[:-1]
            with contextlib.suppress(EOFError):
                line += "\n" + self._line("... ").rstrip()
        return line

    def _line(self, prompt: str) -> str:
        return input(prompt if self.interactive else "")

    def _complete(self, text: str, state: int) -> str | None:
        """Return one of the completions of the word at the cursor: commands, parameters, files."""
        command, *rest = self._readline.get_line_buffer().lstrip().split(" ")
        found: Iterable[str] = ()
        if not rest and command.startswith("/"):
            found = (f"/{usage.split()[0]}" for usage in COMMANDS)
        elif command == "/set" and len(rest) == 1:
            found = (name for name in FIELDS if name != "n")
        elif command in ("/save", "/load") and len(rest) == 1:
            folder = Path(text).expanduser().parent if text else Path()
            with contextlib.suppress(OSError):
                shown = text[: text.rfind("/") + 1]
                found = [f"{shown}{one.name}{'/' * one.is_dir()}" for one in sorted(folder.iterdir())]
        matching = [one for one in found if one.startswith(text)]
        return [*matching, None][min(state, len(matching))]


class ChatSession:
    """A conversation and its sampling parameters."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm, self.params = llm, params
        self.replies = 0  #: since the seed was set
        self.last_seed: int | None = None
        self._last_params, self._last_count = params, 0  #: of the last reply: its parameters and number of tokens
        self.messages: list[dict[str, str]] = []
        self.lines = InputLines(interactive=False)
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
            return self.reply([*self.messages, {"role": "user", "content": line.strip()}])
        except ParameterError as error:
            print(f"nucleate: {error}", file=sys.stderr)
        except OSError as error:
            print(f"nucleate: {error.filename}: {error.strerror}", file=sys.stderr)
        except KeyboardInterrupt:  # in a terminal, Ctrl-C does not end the program
            if not self.lines.interactive:
                raise
            print(file=sys.stderr)
        return 0

    def run_command(self, command: str, rest: str) -> int:
        """Run a command; its methods return None, or the exit status of a reply."""
        commands: Mapping[str, Callable[[str], int | None]] = {
            "set": lambda rest: self.set(*(rest.split(maxsplit=1) or [""])),
            "seed": lambda rest: self.set("seed", rest),
            "show": lambda _: self.show(),
            "system": lambda rest: self.start(rest or None),
            "new": lambda _: self.start(self.system),
            "retry": lambda _: self.reply(self._until_last_message("retry")),
            "edit": self.edit,
            "probs": self.show_probabilities,
            "save": self.save,
            "load": self.load,
            "help": lambda _: show_help(),
        }
        if command not in commands:
            raise ParameterError("command", f"unknown command /{command}; type /help for a list")
        return commands[command](rest) or 0

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
        if name == "seed":
            self.replies = 0

    def show(self) -> None:
        model = self.llm.model
        used = len(self.llm.encode_chat(self.messages)) if _users(self.messages) else 0
        print(f"model         {self.llm.folder} on {model.runtime}")
        print(f"system        {self.system or 'none'}")
        print(f"parameters    {self.params}")
        print(f"last seed     {'none' if self.last_seed is None else self.last_seed}")
        print(f"conversation  {len(self.messages)} messages, {used} of {model.context_length} tokens")

    def edit(self, text: str) -> int:
        """Replace the last message of the user, with a text or in the terminal, and reply to it."""
        messages = self._until_last_message("edit")
        if not text:
            if not self.lines.can_edit:
                raise ParameterError("edit", "/edit needs a text if there is no terminal that can edit")
            with contextlib.suppress(EOFError):
                text = self.lines.edit(messages[-1]["content"])
        return self.reply([*messages[:-1], {"role": "user", "content": text}]) if text else 0

    def _until_last_message(self, command: str) -> list[dict[str, str]]:
        if not (users := _users(self.messages)):
            raise ParameterError(command, f"there is no message for /{command}")
        return self.messages[: users[-1] + 1]

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
        status = stream.show(interruptible(chunks) if self.lines.interactive else chunks, self.llm.model.runtime)
        self.messages = [*kept_messages, {"role": "assistant", "content": stream.text}]
        self.last_seed = None if stream.last is None else stream.last.seed
        self._last_params, self._last_count = params, stream.tokens
        return status

    def truncate(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Remove the oldest messages while the conversation fills more than 3/4 of the context."""
        limit = self.llm.model.context_length * 3 // 4
        while len(self.llm.encode_chat(messages)) > limit:
            if len(users := _users(messages)) < 2:
                break
            messages = messages[: users[0]] + messages[users[1] :]
        return messages

    def show_probabilities(self, count: str) -> int:
        """Print the tokens of the last reply with their probabilities: the reply is generated again with its seed."""
        if count and not (count.isdecimal() and 0 < int(count) <= MAX_ALTERNATIVES):
            message = f"/probs takes the number of likeliest tokens, 1 to {MAX_ALTERNATIVES}, got {count!r:.60}"
            raise ParameterError("probs", message)
        if self.last_seed is None or self.messages[-1:] == [] or self.messages[-1]["role"] != "assistant":
            raise ParameterError("probs", "there is no reply of this program to show the probabilities of")
        length = max(self._last_count, 1)
        values: dict[str, Any] = {"logprobs": int(count or 3), "logprobs_mode": "raw", "max_tokens": length}
        values |= {"seed": self.last_seed, "min_tokens": min(self._last_params.min_tokens, length)}
        params = self._last_params.replace(**values)
        tokenizer, terminal = self.llm.tokenizer, Terminal.of_stdout()
        texts = tokenizer.pieces.tokens
        print("     p  token           the likeliest tokens, before the sampling parameters")
        chunks = self.llm.stream_chat(self.messages[:-1], params)
        for chunk in interruptible(chunks) if self.lines.interactive else chunks:
            for step in chunk.logprobs or ():
                shown = [
                    (terminal.quoted(tokenizer.decode([one.token_id], False) if one.token_id in texts else ""), one)
                    for one in (step.chosen, *step.top)
                ]
                (text, chosen), *others = shown
                likeliest = "  ".join(f"{other} {math.exp(one.logprob):.1%}" for other, one in others)
                print(f"{math.exp(chosen.logprob):6.1%}  {text:<14}  {likeliest}", flush=True)
        return 0

    def save(self, name: str) -> None:
        """Write the conversation to a file. It replaces no other file than a saved conversation."""
        file = _file("save", name)
        if file.exists():
            _read_saved(file)
        saved = {"model": str(self.llm.folder), "messages": self.messages, "sampling_params": self.params.to_dict()}
        new = file.with_name(f"{file.name}.part")
        new.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", "utf-8", "surrogateescape")
        new.replace(file)
        print(f"saved {len(self.messages)} messages to {file}", file=sys.stderr)

    def load(self, name: str) -> None:
        file = _file("load", name)
        messages, params = _read_saved(file)
        self.params, self.messages, self.last_seed, self.replies = params, messages, None, 0
        self.system = next((one["content"] for one in messages[:1] if one["role"] == "system"), None)
        print(f"loaded {len(messages)} messages from {file}", file=sys.stderr)


def show_help() -> None:
    width = max(map(len, COMMANDS)) + 1
    print("\n".join(f"/{usage:<{width}} {text}" for usage, text in COMMANDS.items()))


def interruptible(chunks: Iterable[CompletionChunk]) -> Iterator[CompletionChunk]:
    """Yield chunks until Ctrl-C, which is a KeyboardInterrupt after the chunk: the engine keeps its cache.

    A second Ctrl-C interrupts the engine, as in a long prompt.
    """
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, stop)
    try:
        for chunk in chunks:
            yield chunk
            if stopped:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _users(messages: list[dict[str, str]]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "user"]


def _file(command: str, name: str) -> Path:
    if not name:
        raise ParameterError(command, f"/{command} needs the name of a file")
    return Path(name).expanduser()


def _read_saved(file: Path) -> tuple[list[dict[str, str]], SamplingParams]:
    """Return the messages and the sampling parameters of a saved conversation. Raises ParameterError, OSError."""
    try:
        saved = json.loads(file.read_text("utf-8"))
        messages = [{name: one[name] for name in ("role", "content")} for one in saved["messages"]]
        params = saved["sampling_params"]
        if not all(isinstance(text, str) for one in messages for text in one.values()):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ParameterError("file", f"{file} is not a conversation that /save has written") from None
    return messages, SamplingParams(**params)
