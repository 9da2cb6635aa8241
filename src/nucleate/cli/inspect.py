"""Show what each sampling stage does to the next token of a prompt.

Reads the prompt as generate does, runs the model, and prints the parameters with their origin, one line per stage, then
the most likely tokens before the first stage and after the last one. With --steps, does so for several tokens, which
are those that generate gives with the same seed; for more than 5, prints one line per token.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.cli.inspect_tables import (
    StepTable,
    TokenNames,
    config_name,
    origins,
    parameter_lines,
    prompt_line,
    stage_lines,
    token_lines,
)
from nucleate.cli.sampling_flags import add_sampling, read_values
from nucleate.cli.terminal import Terminal, wrapped
from nucleate.generation.loop import generate
from nucleate.llm import LLM
from nucleate.outputs import CompletionChunk, Finish
from nucleate.parameters.converters import install_extra
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.sampler import Sampler, SamplerOutput
from nucleate.sampling.trace import Trace, trace
from nucleate.sampling_params import REQUEST_PARAMETERS, SamplingParams
from nucleate.tokenization.tokenizer import Tokenizer, token_text

USAGE = "[OPTIONS] [PROMPT]"
COMMON = (
    *("PROMPT", "--model", "--steps", "--top", "--temperature", "--top-p", "--top-k"),
    *("--min-p", "--order", "--seed", "--regex", "--json", "--web"),
)
MAX_TABLES = 5
"""The maximum number of steps with a table per step."""

FLAGS = (
    Flag("--steps N", f"Number of tokens to generate and inspect; above {MAX_TABLES}, one line per token", "1"),
    Flag("--top N", "Number of most likely tokens to list", "10"),
    Flag("--json", "Print one JSON object instead of tables."),
    Flag("--web", "Open the inspector page in a browser: all stages of every token, with sliders, draws and branches."),
    Flag("--port PORT", "Port of --web; 0 is any free port", 0),
    Flag("--no-browser", "With --web: print the address only."),
)
NEXT_TOKEN_FIELDS = ("stop_token_ids", "ignore_eos", "structured_outputs", "pipeline")
"""Request parameters that affect the next token: min_tokens bans the end tokens, structured output is a mask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_prompt(parser)
    add_flags(parser, FLAGS)
    flags.add_model(parser, speculation=False, watermark=False)
    later = (name for name in REQUEST_PARAMETERS if name not in NEXT_TOKEN_FIELDS)
    add_sampling(parser, without=(*later, "logprobs", "logprob_token_ids"))


def run(arguments: argparse.Namespace) -> int:
    if arguments.web:
        return run_web(arguments)
    if arguments.chat_template is not None:
        raise UsageError("--chat-template needs --web")
    values = read_values(arguments)
    top, steps = (_count(name, getattr(arguments, name)) for name in ("top", "steps"))
    prompt = flags.read_prompt(arguments)
    llm = LLM(**flags.model_options(arguments))
    params = llm.default_params.override(**values)
    ids = llm.encode(prompt)
    tokens = inspected(llm, ids, params, steps)
    origin = origins(params, values, llm.default_params)
    if arguments.json:
        head = {"prompt": prompt, "prompt_token_ids": ids, "params": params.to_dict(), "origins": origin}
        page, finish = to_json(head, tokens, llm.tokenizer, top, steps)
        print(json.dumps(page, allow_nan=False))
    else:
        terminal = Terminal.of_stdout()
        lines = parameter_lines(params, origin, config_name(llm.folder), terminal)
        finish = show(tokens, ids, TokenNames(llm.tokenizer, terminal), lines, top, steps)
    if finish is not None and finish.reason == "error":
        print(f"nucleate: no token can be sampled: {finish.detail}", file=sys.stderr)
        return 1
    return 0


def _count(name: str, text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if number < 1:
        raise UsageError(f"--{name} must be an integer >= 1, got {text!r}")
    return number


def to_json(
    head: Mapping[str, Any], tokens: Iterable[InspectedToken], tokenizer: Tokenizer, top: int, steps: int
) -> tuple[dict[str, Any], Finish | None]:
    """The JSON object for one step, or for several: the same for each in ``traces``. Also returns how they finished."""
    pages, text, finish = list[dict[str, Any]](), "", None
    for token in tokens:
        pages.append(json.loads(token.trace.to_json(top)))
        text, finish = text + token.text, token.finish
    mentioned = {*head["prompt_token_ids"], *(page["token_id"] for page in pages)} - {None}
    for step in (step for page in pages for step in page["steps"]):
        mentioned |= {*step["touched"], *step["removed"], *(token for token, _, _ in step["top"])}
    more: dict[str, Any] = pages[0]
    if steps > 1:
        ids = [page["token_id"] for page in pages if page["token_id"] is not None]
        reason, detail = finish or (None, None)
        more = {"output_token_ids": ids, "text": text, "finish_reason": reason, "stop_reason": detail}
        more |= {"seed": pages[0]["seed"], "traces": pages}
    names = {str(token): token_text(tokenizer, token) for token in sorted(mentioned)}
    return {**head, "entropy_unit": "nats", **more, "tokens": names}, finish


def show(
    tokens: Iterable[InspectedToken], ids: list[int], names: TokenNames, parameters: list[str], top: int, steps: int
) -> Finish | None:
    """Print the prompt, the parameters and the steps as they are generated. Returns how they finished."""
    terminal, text, token, table = names.terminal, "", None, None
    for token in tokens:
        result, text = token.trace, text + token.text
        lines = list[str]()
        if result.step == 0:
            lines += [prompt_line(ids, (), names, "", f"   ({len(ids)} tokens, seed {result.seed})"), *parameters, ""]
        if steps > MAX_TABLES and result.steps:
            table = table or StepTable(names, steps, len(result.steps[0].scores))
            lines += table.lines(result)
        elif result.steps:
            if steps > 1:
                lines += [""] * (result.step > 0)
                lines += [step_line(ids, token, names, steps), ""]
            lines += [*stage_lines(result, names, terminal), "", *token_lines(result, names, terminal, top)]
        if lines:
            print("\n".join(lines), flush=True)
    if token is None:
        return None
    if steps > 1:
        print("\n" + "\n".join(output_lines(text, len(token.output_ids) + 1, token.finish, steps, terminal)))
    return token.finish


def step_line(ids: list[int], token: InspectedToken, names: TokenNames, steps: int) -> str:
    """The heading of one of several steps, with the tokens before it unless they are those above."""
    start = f"step {token.trace.step + 1} of {steps}"
    if not token.output_ids:
        return names.terminal.paint(start, "bold")
    return prompt_line(ids, token.output_ids, names, f"{start}   ", "")


def output_lines(text: str, count: int, finish: Finish | None, steps: int, terminal: Terminal) -> list[str]:
    """The text of several steps, and why there are fewer of them than requested."""
    lines = wrapped(f"output  {terminal.quoted(text)}", terminal.columns, " " * len("output  "))
    if finish is None or finish.reason == "error" or count == steps:
        return lines
    if finish.reason == "length":
        why = "max_tokens or the length of the context is reached"
    elif finish.detail is None:
        why = "end of sequence"
    else:
        why = f"stop token {finish.detail}" if isinstance(finish.detail, int) else f"stop string {finish.detail!r}"
    return [*lines, f"ended after {count} of {steps} tokens: {why}"]


def run_web(arguments: argparse.Namespace) -> int:
    """Serve the inspector page to this machine only until Ctrl-C, and open a browser."""
    from nucleate.cli.serve import missing_packages

    if names := missing_packages():
        raise UsageError(f"--web needs {', '.join(names)}: {install_extra('server')}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nucleate.jit.kernel_libraries import warm
    from nucleate.server.app import application
    from nucleate.server.limits import ServerLimits
    from nucleate.server.request_log import RequestLog, configure
    from nucleate.server.run import bind, default_sigint_handler, serve
    from nucleate.server.service import REGEX_SECONDS, Service

    given = arguments.prompt is not None or arguments.file is not None or flags.is_piped()
    prompt = flags.read_prompt(arguments) if given else None
    values = SamplingParams(**read_values(arguments)).to_dict()
    with (
        default_sigint_handler(),
        bind("127.0.0.1", arguments.port) as bound,
        configure(sys.stderr, log_format="text", level="warning"),
    ):
        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(regex_seconds=REGEX_SECONDS)
        warm(background=True)
        name = flags.model_names(arguments)[0]
        service = Service(llm, engine, name, llm.default_params, ServerLimits())
        log = RequestLog()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/inspector{settings_hash(prompt, values)}"
        print(f"The inspector is at {url}\nPress Ctrl-C to stop.", flush=True)
        if not arguments.no_browser:
            threading.Thread(target=_open_browser, args=(url, bound.getsockname()), daemon=True).start()
        return serve(application(service, log, hosts=()), service, log, bound)


def settings_hash(prompt: str | None, params: dict[str, Any]) -> str:
    """The hash of a link to the page with these settings; empty for its example."""
    if prompt is None and not params:
        return ""
    text = json.dumps({"prompt": prompt or "Once upon a time", "params": params})
    return f"#s={urlsafe_b64encode(text.encode()).decode().rstrip('=')}"


def _open_browser(url: str, address: tuple[str, int]) -> None:
    """Open a browser as soon as the server accepts connections."""
    import webbrowser

    for _ in range(600):
        try:
            socket.create_connection(address[:2], timeout=1.0).close()
        except OSError:
            threading.Event().wait(0.1)
        else:
            webbrowser.open(url)
            return


class InspectedToken(NamedTuple):
    """The trace of one token. output_ids: the tokens before it. text: that it completed. finish: of the last token."""

    trace: Trace
    output_ids: tuple[int, ...]
    text: str
    finish: Finish | None


class TracingSampler(Sampler):
    """A sampler of one row that also traces its steps. last: the trace of the last step."""

    last: Trace

    def add(self, params: Any = None, prompt_ids: Sequence[int] = (), **options: Any) -> Any:
        self._given, self._prompt_ids = params, prompt_ids
        return super().add(params, prompt_ids, **options)

    def __call__(self, logits_RV: Any, rows: Any = None, *, mask: Any = None, companion: Any = None) -> SamplerOutput:
        """Sample. The trace has all stages, the stateful ones with their state of this step."""
        [row] = self.rows
        output_ids, states = self.output_ids(row), iter([one for one in self.stages(row) if is_stateful(one)])
        stages = tuple(next(states) if is_stateful(stage) else stage for stage in self._given)
        words: dict[str, Any] = {"prompt_ids": [self._prompt_ids], "output_ids": [output_ids], "companion": companion}
        [self.last] = trace(logits_RV, stages, **words, mask=mask, step=len(output_ids), seed=self.seed(row))
        return super().__call__(logits_RV, rows, mask=mask, companion=companion)


def inspected(llm: LLM, prompt_ids: list[int], params: SamplingParams, steps: int) -> Iterator[InspectedToken]:
    """Generate up to ``steps`` tokens, at least one, with their traces.

    Arguments are validated now; the model runs lazily. Raises ParameterError.
    """
    sampler = TracingSampler(llm.model.vocab_size)
    options: dict[str, Any] = {"companion_model": llm.companion_model, "sampler": sampler, "steps": steps}
    chunks = generate(llm.model, llm.tokenizer, prompt_ids, params, **options)
    return (_inspected(sampler.last, sampler.output_ids(0), chunk) for chunk in chunks)


def _inspected(found: Trace, output_ids: tuple[int, ...], chunk: CompletionChunk) -> InspectedToken:
    detail = chunk.stop_reason if found.error is None else found.error
    finish = None if chunk.finish_reason is None else Finish(chunk.finish_reason, detail)
    return InspectedToken(found, output_ids[: found.step], chunk.text, finish)
