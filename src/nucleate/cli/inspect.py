"""Show what each sampling stage does to the next token of a prompt.

Reads the prompt as generate does, runs the model once, and prints one line per stage, then the most likely tokens
before the first stage and after the last one. Generates nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.input_text import add_prompt, read_prompt
from nucleate.sampling_params import REQUEST_PARAMETERS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nucleate.llm import LLM
    from nucleate.sampling.stage import Pipeline
    from nucleate.sampling.trace import Trace, TraceStep
    from nucleate.sampling_params import SamplingParams
    from nucleate.stopping.stop_matcher import StopRules
    from nucleate.tokenization.tokenizer import Tokenizer

USAGE = "[OPTIONS] [PROMPT]"
COMMON = {
    "PROMPT": "Text whose next token to inspect; - reads stdin.",
    "--file": "Read the prompt from a file.",
    "--model": "Folder or Hugging Face id (default: bundled).",
    "--top": "Number of tokens to list (default: 10).",
    "--temperature": "Sampling temperature; 0 is greedy.",
    "--top-p": "Nucleus sampling: keep this probability mass.",
    "--top-k": "Keep the k most likely tokens.",
    "--min-p": "Minimum probability, relative to the best token.",
    "--order": "Order of the stages: canonical, vllm, hf, ...",
    "--seed": "Seed for reproducible output.",
    "--regex": "Generate text that matches a pattern.",
    "--json": "Print one JSON object instead of tables.",
}
"""The options of ``--help``."""
BAR = 24
"""Length of the bar of the most likely token, in characters."""

NEXT_TOKEN_FIELDS = ("stop_token_ids", "ignore_eos", "structured_outputs")
"""Request parameters that affect the next token: min_tokens bans the end tokens, structured output is a mask."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_prompt(parser)
    parser.add_argument("--top", metavar="N", default="10", help="Number of most likely tokens to list (default: 10).")
    parser.add_argument("--json", action="store_true", help="Print one JSON object instead of tables.")
    flags.add_model(parser)
    parser.set_defaults(echo=False)
    later = (name for name in REQUEST_PARAMETERS if name not in NEXT_TOKEN_FIELDS)
    flags.add_sampling(parser, without=(*later, "logprobs", "logprob_token_ids"))


def run(arguments: argparse.Namespace) -> int:
    values = flags.read_values(arguments)
    top = int(arguments.top) if arguments.top.isascii() and arguments.top.isdigit() else 0
    if top < 1:
        raise UsageError(f"--top must be an integer >= 1, got {arguments.top!r}")
    prompt = read_prompt(arguments)
    from nucleate.engine.request import admit, stages_of
    from nucleate.llm import LLM
    from nucleate.sampling.trace import trace

    llm = LLM(**flags.model_options(arguments))
    params = llm.default_params.override(**values)
    ids = llm.encode(prompt)
    rules = admit(llm.model, llm.tokenizer, ids, params)
    stages, mask = stages_of(params, llm.model.vocab_size, llm.tokenizer), grammar_mask(llm, params)
    companion = companion_logits(llm, stages, ids, rules)
    result = trace(llm.model.begin().forward(ids), stages, prompt_ids=ids, mask=mask, companion=companion)
    if arguments.json:
        page = {
            "prompt": prompt,
            "prompt_token_ids": ids,
            "params": params.to_dict(),
            **json.loads(result.to_json(top)),
        }
        mentioned = {token for step in page["steps"] for token in (*step["touched"], *step["removed"])}
        mentioned |= {token for step in page["steps"] for token, _, _ in step["top"]}
        mentioned |= {*ids} if result.token_id is None else {*ids, result.token_id}
        print(json.dumps({**page, "tokens": {str(i): token_text(llm.tokenizer, i) for i in sorted(mentioned)}}))
    else:
        show(result, llm.tokenizer, ids, top)
    if result.error is not None:
        print(f"nucleate: no token can be sampled: {result.error}", file=sys.stderr)
    return 0 if result.error is None else 1


def grammar_mask(llm: LLM, params: SamplingParams) -> NDArray[np.int32] | None:
    """Return the mask [W] of the structured-output constraint; None without one."""
    from nucleate.structured_output import GrammarCompiler, Guide, compile_grammar

    grammar = compile_grammar(params.structured_outputs, lambda: GrammarCompiler(llm.tokenizer, llm.model.vocab_size))
    return None if grammar is None else Guide(grammar, ignore_eos=params.ignore_eos).mask()[0]


def companion_logits(llm: LLM, stages: Pipeline, ids: list[int], rules: StopRules) -> NDArray[np.float32] | None:
    """Return the logits [V] of the companion sequence; None for a pipeline without one."""
    from nucleate.engine.companions import admit_companion
    from nucleate.sampling.companion import split_combine

    stage, _ = split_combine(stages)
    if stage is None:
        return None
    companion, _ = admit_companion(stage, ids, rules, llm.model, llm.companion_model)
    model = llm.companion_model if stage.companion_model and llm.companion_model is not None else llm.model
    return model.begin().forward(companion.prompt_ids)


def show(result: Trace, tokenizer: Tokenizer, ids: list[int], top: int) -> None:
    """Print the tokens of the prompt, the table of stages and the most likely tokens."""
    shown = [quoted(tokenizer, token) for token in ids[-8:]]
    print(f"{'... ' * (len(ids) > 8)}{' '.join(shown)}   ({len(ids)} tokens, seed {result.seed})\n")
    print(result.table(lambda token: quoted(tokenizer, token)))
    if result.steps:
        print(f"\n{most_likely(result, tokenizer, top)}")


def most_likely(result: Trace, tokenizer: Tokenizer, top: int) -> str:
    """Return a table of the most likely tokens before sampling, then those that a stage removed, with its name."""
    first, last = result.steps[0], result.steps[-1 if result.token_id is None else -2]
    tokens = last.most_likely(top)
    tokens += [token for token in first.most_likely(top + len(tokens)) if token not in tokens][: top - len(tokens)]
    if result.token_id is not None and result.token_id not in tokens:
        tokens.append(result.token_id)
    best = max(last.probabilities[token] for token in tokens)
    width = max(len(quoted(tokenizer, token)) for token in tokens)
    lines = [f"{'id':>7}  {'token':{width}}  {'before':>7}  {'after':>7}"]
    for token in tokens:
        before, after = first.probabilities[token], last.probabilities[token]
        name, out = quoted(tokenizer, token), removed_by(result.steps, token)
        note = f"removed: {out}" if out else bar(after / best)
        sampled = " <- sampled" if token == result.token_id else ""
        lines.append(
            f"{token:>7}  {name:{width}}  {percent(before)}  {'' if out else percent(after):7}  {note}{sampled}"
        )
    return "\n".join(lines)


def percent(p: float) -> str:
    """Format a probability in seven characters; a small one is not shown as 0."""
    return f"{p:7.2%}" if p >= 0.0001 or p == 0 else f"{100 * p:6.0e}%"


def bar(part: float) -> str:
    """Return a bar of at most BAR characters, with eighths of a character if the terminal supports them."""
    if "utf" not in (sys.stdout.encoding or "").lower():
        return "#" * max(1, round(part * BAR))
    whole, rest = divmod(max(1, round(part * BAR * 8)), 8)
    return "█" * whole + " ▏▎▍▌▋▊▉"[rest] * (rest > 0)


def removed_by(steps: tuple[TraceStep, ...], token: int) -> str:
    """Return the stage that removed a token before sampling, or an empty string."""
    return next((step.name for step in steps if token in step.removed and "draw" not in shape(step)), "")


def shape(step: TraceStep) -> str:
    from nucleate.sampling.stage import shape_of

    return "" if step.stage is None else shape_of(step.stage).lower()


def quoted(tokenizer: Tokenizer, token: int) -> str:
    """Quote the text of a token, on one line."""
    return json.dumps(token_text(tokenizer, token), ensure_ascii=False)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token; bytes of an incomplete character as <0xNN>, and nothing for padding."""
    if tokenizer.is_padding(token):
        return ""
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    return "".join(f"<0x{byte:02X}>" for byte in tokenizer.pieces.as_bytes(token))
