"""Continue a prompt and stream the text to the terminal.

The prompt is the argument, a file (--file) or piped in; without any, the bundled model tells a story. The text goes to
stdout, then the statistics (tokens per second, seed, finish reason) to stderr. With --chat-template, the prompt is a
message, and the text is the reply to it. Sampling parameters that are not set take the values of the model's
generation_config.json (see --generation-config), then the defaults listed here.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.cli.sampling_flags import add_sampling, parameter_flag, read_values
from nucleate.engine.beam_params import BeamCompletion, BeamParams
from nucleate.outputs import CompletionChunk, Validation, to_json, validation_text
from nucleate.sampling_params import SamplingParams
from nucleate.server.openai import fields

if TYPE_CHECKING:
    from nucleate.llm import LLM

USAGE = "[OPTIONS] [PROMPT]"
COMMON = (
    *("PROMPT", "--file", "--model", "--max-tokens", "--temperature", "--top-p", "--top-k"),
    *("--min-p", "--stop", "--seed", "--n", "--json-schema", "--json"),
)
FLAGS = (
    Flag("--suffix TEXT", "Text that follows the output, for models with fill-in-the-middle tokens (default: none)."),
    Flag("--echo", "Print the prompt before each completion."),
    Flag("--json", "Print one JSON object at the end instead of text."),
)
BEAM_PARAMETERS = {
    name: BeamParams.PARAMETERS[name]
    for name in ("num_beams", *fields.BEAM_PARAMETER_FIELDS)
    if name in BeamParams.PARAMETERS
}
"""The parameters of beam search with a generated flag."""
EARLY_STOPPING = Flag(
    "--early-stopping WHEN",
    "When to stop once num_beams beams have finished: true, false or never, as in Transformers (default: false).",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_prompt(parser)
    add_flags(parser, FLAGS)
    flags.add_model(parser)
    title = "beam search (enabled by --num-beams; replaces sampling)"
    add_flags(parser, [*map(parameter_flag, BEAM_PARAMETERS.values()), EARLY_STOPPING], title)
    add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    values = read_values(arguments)
    beams, suffix = read_beams(arguments, values), arguments.suffix
    if beams is not None and suffix is not None:
        raise UsageError("--suffix cannot be combined with --num-beams")
    messages = None
    if arguments.chat_template is not None and (beams is not None or suffix is not None):
        raise UsageError(f"--chat-template cannot be combined with {'--suffix' if beams is None else '--num-beams'}")
    prompt = flags.read_prompt(arguments)
    if arguments.chat_template is not None:
        messages = [{"role": "user", "content": prompt}]
    from nucleate.llm import LLM

    llm = LLM(**flags.model_options(arguments))
    echo = prompt if arguments.echo else ""
    if beams is not None:
        return search_beams(llm, prompt, beams, echo=echo, as_json=arguments.json)
    params = llm.default_params.override(**values)
    if arguments.json:
        completion = llm.chat(messages, params) if messages else llm.generate(prompt, params, suffix=suffix)[0]
        print(json.dumps({"prompt": prompt, **to_json(completion), "params": params.to_dict()}, allow_nan=False))
        return 1 if any(output.finish_reason == "error" for output in completion.outputs) else 0
    stream = StreamPrinter(params.n, echo)
    chunks = llm.stream_chat(messages, params) if messages else llm.stream(prompt, params, suffix=suffix)
    status = stream.show(chunks, llm.model.runtime)
    return status or (130 if stream.interrupted else 0)


class StreamPrinter:
    """Prints the chunks of one or more completions, each after ``echo``, and counts tokens."""

    def __init__(self, n: int, echo: str = "") -> None:
        self.echo, self.n, self.tokens, self.index = echo, n, 0, -1
        self.start, self.first = time.perf_counter(), 0.0
        self.last: CompletionChunk | None = None
        self.text, self.interrupted = "", False  #: all text; whether Ctrl-C ended it
        self.failures: list[str] = []
        self.reasoning = False  #: whether the line of the reasoning has not ended
        self.validations: list[tuple[int, Validation]] = []

    def show(self, chunks: Iterable[CompletionChunk], runtime: str) -> int:
        """Print chunks as they arrive, until their end or Ctrl-C, then the statistics. Returns 1 if one failed."""
        try:
            for chunk in chunks:
                self.print(chunk)
        except KeyboardInterrupt:
            self.interrupted = True
        return self.end(runtime)

    def print(self, chunk: CompletionChunk) -> None:
        if chunk.index != self.index:
            if self.n > 1:
                lead = "\n\n" if self.index >= 0 else ""
                print(f"{lead}--- completion {chunk.index + 1} of {self.n}, seed {chunk.seed}", flush=True)
            print(self.echo, end="")
        self.index, self.last = chunk.index, chunk
        self.first = self.first or time.perf_counter()
        self.tokens, self.text = self.tokens + len(chunk.token_ids), self.text + chunk.text
        self._print_reasoning(chunk)
        print(chunk.text, end="", flush=True)
        if chunk.finish_reason == "error":
            self.failures.append(str(chunk.stop_reason))
        if chunk.validation is not None:
            self.validations.append((chunk.index + 1, chunk.validation))

    def _print_reasoning(self, chunk: CompletionChunk) -> None:
        """Print the reasoning of a chat to stderr, and end it with a newline."""
        if chunk.reasoning:
            print(chunk.reasoning, end="", file=sys.stderr, flush=True)
        elif self.reasoning and chunk.text:
            print(file=sys.stderr, flush=True)
        self.reasoning = bool(chunk.reasoning) or (self.reasoning and not chunk.text)

    def end(self, runtime: str) -> int:
        """End the text with a newline and print the statistics to stderr. Returns 1 if a completion failed."""
        print(flush=True)
        if self.last is None:
            return 0
        seconds = time.perf_counter() - self.start
        decoding = max(time.perf_counter() - self.first, 1e-9)
        rate = (self.tokens - 1) / decoding if self.tokens > 1 else self.tokens / seconds
        seed = (self.last.seed - self.index) % 2**64
        reason = self.last.finish_reason or "interrupted"
        statistics = f"[{self.tokens} tokens, {rate:.0f} tokens/s on {runtime}, seed {seed}, {reason}]"
        print(statistics, file=sys.stderr)
        for number, validation in self.validations:
            which = f"completion {number}: " if self.n > 1 else ""
            print(f"nucleate: {which}{validation_text(validation)}", file=sys.stderr)
        for failure in self.failures:
            print(f"nucleate: generation failed: {failure}", file=sys.stderr)
        return int(bool(self.failures))


def read_beams(arguments: argparse.Namespace, values: Mapping[str, Any]) -> BeamParams | None:
    """Return the parameters of the beam search, or None. values: the sampling parameters that are given.

    Raises UsageError, and ParameterError, also for sampling parameters that beam search does not support.
    """
    given = read_values(arguments, BEAM_PARAMETERS)
    if arguments.early_stopping is not None:
        early = arguments.early_stopping.lower()
        given["early_stopping"] = {"true": True, "false": False}.get(early, early)
    if not given:
        return None
    if "num_beams" not in given:
        raise UsageError(f"{next(iter(given))} needs --num-beams")
    num_beams, body = given.pop("num_beams"), {**values, **given, fields.USE_BEAM_SEARCH: True}
    return fields.read_beams(body, SamplingParams(**values), best_of=num_beams, stream=False, echo=False)


def search_beams(llm: LLM, prompt: str, params: BeamParams, *, echo: str, as_json: bool) -> int:
    """Run a beam search and print the beams. Returns the exit status."""
    start = time.perf_counter()
    [found] = llm.beam_search([prompt], params)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"prompt": prompt, **to_json(found), "params": to_json(params)}, allow_nan=False))
    else:
        _show_beams(found, echo)
        tokens = found.usage.completion_tokens
        print(f"[{tokens} tokens, {seconds:.2f} s on {llm.model.runtime}, {params.num_beams} beams]", file=sys.stderr)
        for place, beam in enumerate(found.outputs, 1):
            if beam.validation is not None:
                print(f"nucleate: beam {place}: {validation_text(beam.validation)}", file=sys.stderr)
    failed = [beam for beam in found.outputs if beam.finish_reason == "error"]
    for beam in failed:
        print(f"nucleate: beam search failed: {beam.stop_reason}", file=sys.stderr)
    return 1 if failed else 0


def _show_beams(found: BeamCompletion, echo: str) -> None:
    for place, beam in enumerate(found.outputs):
        if len(found.outputs) > 1:
            lead = "\n" if place else ""
            print(f"{lead}--- beam {place + 1} of {len(found.outputs)}, score {beam.score:.4f}, {beam.finish_reason}")
        print(f"{echo}{beam.text}")
