"""Continue a prompt, streaming to the terminal.

The prompt is the argument, or a file (--file), or what is piped in. With none of them the embedded model tells a story.
The text goes to stdout; tokens per second and the seed go to stderr at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable

from nucleate.cli import flags
from nucleate.cli.beam_flags import add_beams, read_beams, search
from nucleate.cli.input_text import add_prompt, read_prompt
from nucleate.cli.output_text import plain, worth
from nucleate.outputs import CompletionChunk, Validation

USAGE = "[OPTIONS] [PROMPT]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    parser.add_argument("--json", action="store_true", help="print one JSON object when all is done, instead of text")
    flags.add_model(parser)
    flags.add_speculation(parser)
    add_beams(parser)
    flags.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    values = flags.given(arguments)
    beams = read_beams(arguments, values)
    prompt = read_prompt(arguments)
    from nucleate.llm import LLM

    llm = LLM(**flags.model_options(arguments))
    if beams is not None:
        return search(llm, prompt, beams, echo=prompt if arguments.echo else "", as_json=arguments.json)
    params = llm.default_params.override(**values)
    if arguments.json:
        completion = llm.generate(prompt, params)[0]
        print(json.dumps({"prompt": prompt, **plain(completion), "params": params.to_dict()}, allow_nan=False))
        return 1 if any(output.finish_reason == "error" for output in completion.outputs) else 0
    pieces = llm.stream(prompt, params)
    return show(pieces, StreamPrinter(params.n, prompt if arguments.echo else ""), llm.model.runtime)


def show(pieces: Iterable[CompletionChunk], stream: StreamPrinter, runtime: str) -> int:
    """Print pieces as they come, then the figures. Returns the exit status."""
    status = 0
    try:
        for piece in pieces:
            stream.print(piece)
    except KeyboardInterrupt:
        status = 130
    return stream.end(runtime) or status


class StreamPrinter:
    """Prints the pieces of one or more answers, each after ``echo``, and keeps count."""

    def __init__(self, answers: int, echo: str = "") -> None:
        self.echo, self.answers, self.tokens, self.index = echo, answers, 0, -1
        self.start, self.first = time.perf_counter(), 0.0
        self.last: CompletionChunk | None = None
        self.failures: list[str] = []
        self.validations: list[tuple[int, Validation]] = []

    def print(self, piece: CompletionChunk) -> None:
        if piece.index != self.index:
            if self.answers > 1:
                lead = "\n\n" if self.index >= 0 else ""
                print(f"{lead}--- answer {piece.index + 1} of {self.answers}, seed {piece.seed}", flush=True)
            print(self.echo, end="")
        self.index, self.last = piece.index, piece
        self.first = self.first or time.perf_counter()
        self.tokens += len(piece.token_ids)
        print(piece.text, end="", flush=True)
        if piece.finish_reason == "error":
            self.failures.append(str(piece.stop_reason))
        if piece.validation is not None:
            self.validations.append((piece.index + 1, piece.validation))

    def end(self, runtime: str) -> int:
        """End the text with a newline, then the figures on stderr. Returns 1 if an answer failed."""
        print(flush=True)
        if self.last is None:
            return 0
        seconds = time.perf_counter() - self.start
        decoding = max(time.perf_counter() - self.first, 1e-9)
        rate = (self.tokens - 1) / decoding if self.tokens > 1 else self.tokens / seconds
        seed = (self.last.seed - self.index) % 2**64
        why = self.last.finish_reason or "interrupted"
        figures = f"[{self.tokens} tokens, {rate:.0f} tokens/s on {runtime}, seed {seed}, {why}]"
        print(figures, file=sys.stderr)
        for number, validation in self.validations:
            which = f"answer {number}: " if self.answers > 1 else ""
            print(f"nucleate: {which}{worth(validation)}", file=sys.stderr)
        for failure in self.failures:
            print(f"nucleate: the answer ended with an error: {failure}", file=sys.stderr)
        return 1 if self.failures else 0
