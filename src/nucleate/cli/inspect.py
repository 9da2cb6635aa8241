"""Show what every stage of the pipeline does to the next token of a prompt, and why.

Reads the prompt as generate does, runs the model once, and prints a line per stage; then the likeliest tokens, before
the first stage and after the last. Nothing is generated.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.input_text import add_prompt, read_prompt
from nucleate.cli.main import UsageError
from nucleate.sampling_params import REQUEST_PARAMETERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nucleate.llm import LLM
    from nucleate.sampling.trace import Trace, TraceStep
    from nucleate.sampling_params import SamplingParams
    from nucleate.tokenization.tokenizer import Tokenizer

USAGE = "[OPTIONS] [PROMPT]"
BAR = 24
"""Characters of the bar of the likeliest token."""

NEXT = ("stop_token_ids", "ignore_eos", "structured_outputs")
"""What of a request that is no stage has a say in the next token: min_tokens bans what ends the answer, and a form is a
mask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument(
        "--top", metavar="N", default="10", help="how many of the likeliest tokens to list [default 10]"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    flags.add_model(parser)
    parser.set_defaults(echo=False)
    later = (name for name in REQUEST_PARAMETERS if name not in NEXT)
    flags.add_sampling(parser, without=(*later, "logprobs", "logprob_token_ids"))


def run(arguments: argparse.Namespace) -> int:
    values = flags.given(arguments)
    top = int(arguments.top) if arguments.top.isascii() and arguments.top.isdigit() else 0
    if top < 1:
        raise UsageError(f"--top must be an integer >= 1, got {arguments.top!r}")
    prompt = read_prompt(arguments)
    from nucleate.engine.admission import admit, stages_of
    from nucleate.llm import LLM
    from nucleate.sampling.trace import trace

    llm = LLM(**flags.model_options(arguments))
    params = llm.default_params.override(**values)
    ids = llm.encode(prompt)
    admit(llm.model, llm.tokenizer, ids, params)
    stages, mask = stages_of(params, llm.model.vocab_size, llm.tokenizer), mask_of(llm, params)
    told = trace(llm.model.begin().forward(ids), stages, prompt_ids=ids, mask=mask)
    if arguments.json:
        page = {"prompt": prompt, "prompt_token_ids": ids, "params": params.to_dict(), **json.loads(told.to_json(top))}
        mentioned = {token for step in page["steps"] for token in (*step["touched"], *step["removed"])}
        mentioned |= {token for step in page["steps"] for token, _, _ in step["top"]}
        mentioned |= {*ids} if told.token_id is None else {*ids, told.token_id}
        print(json.dumps({**page, "tokens": {str(i): spelled(llm.tokenizer, i) for i in sorted(mentioned)}}))
    else:
        show(told, llm.tokenizer, ids, top)
    if told.error is not None:
        print(f"nucleate: no token can be drawn: {told.error}", file=sys.stderr)
    return 0 if told.error is None else 1


def mask_of(llm: LLM, params: SamplingParams) -> NDArray[np.int32] | None:
    """The tokens [W] that a text of the form asked for can begin with; None if none is asked for."""
    from nucleate.structured_output import GrammarCompiler, Guide, form_of

    form = form_of(params.structured_outputs, lambda: GrammarCompiler(llm.tokenizer, llm.model.vocab_size))
    return None if form is None else Guide(form, ignore_eos=params.ignore_eos).mask()[0]


def show(told: Trace, tokenizer: Tokenizer, ids: list[int], top: int) -> None:
    """The prompt as the model sees it, the table of stages, the likeliest tokens."""
    shown = [quoted(tokenizer, token) for token in ids[-8:]]
    print(f"{'... ' * (len(ids) > 8)}{' '.join(shown)}   ({len(ids)} tokens, seed {told.seed})\n")
    print(told.table(lambda token: quoted(tokenizer, token)))
    if told.steps:
        print(f"\n{likeliest(told, tokenizer, top)}")


def likeliest(told: Trace, tokenizer: Tokenizer, top: int) -> str:
    """The likeliest tokens as the draw found them, then those that a stage put out, with the name of that stage."""
    first, last = told.steps[0], told.steps[-1 if told.token_id is None else -2]
    tokens = last.likeliest(top)
    tokens += [token for token in first.likeliest(top + len(tokens)) if token not in tokens][: top - len(tokens)]
    if told.token_id is not None and told.token_id not in tokens:
        tokens.append(told.token_id)
    best = max(last.probabilities[token] for token in tokens)
    width = max(len(quoted(tokenizer, token)) for token in tokens)
    lines = [f"{'id':>7}  {'token':{width}}  {'before':>7}  {'after':>7}"]
    for token in tokens:
        before, after = first.probabilities[token], last.probabilities[token]
        name, out = quoted(tokenizer, token), removed_by(told.steps, token)
        note = f"out: {out}" if out else bar(after / best)
        drawn = " <- drawn" if token == told.token_id else ""
        lines.append(f"{token:>7}  {name:{width}}  {percent(before)}  {'' if out else percent(after):7}  {note}{drawn}")
    return "\n".join(lines)


def percent(p: float) -> str:
    """A probability in seven characters: a rare token is not shown as one that cannot be."""
    return f"{p:7.2%}" if p >= 0.0001 or p == 0 else f"{100 * p:6.0e}%"


def bar(part: float) -> str:
    """A bar, at most BAR characters long; in eighths of a character where the terminal has these."""
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "#" * max(1, round(part * BAR))
    whole, rest = divmod(max(1, round(part * BAR * 8)), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)


def removed_by(steps: tuple[TraceStep, ...], token: int) -> str:
    """The stage that put a token out before the draw, or nothing."""
    return next((step.name for step in steps if token in step.removed and "draw" not in shape(step)), "")


def shape(step: TraceStep) -> str:
    from nucleate.sampling.stage import shape_of

    return "" if step.stage is None else shape_of(step.stage).lower()


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token for a table: in quotes, on one line."""
    return json.dumps(spelled(tokenizer, token), ensure_ascii=False)


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; bytes that are no whole character as <0xNN>, and nothing for padding."""
    if tokenizer.is_padding(token):
        return ""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    return "".join(f"<0x{byte:02X}>" for byte in tokenizer.pieces.as_bytes(token))
