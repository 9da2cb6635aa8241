"""Runs a tiny random model of every architecture of Transformers, and compares its tokens with ``generate``.

For each model type: build the model, save it, load the folder, generate several prompts of different lengths in one
engine, and compare token for token with ``generate`` for each prompt alone. Writes the table of docs/architectures.md.

    python benchmarks/architectures.py [--types llama,qwen3] [--processes 2] [--write]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tiny_models import VOCABULARY, model_types, save_tiny

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.loader import load, runner_of
from nucleate.parameters.converters import one_line

PAGE = Path(__file__).parent.parent / "docs" / "architectures.md"
LENGTHS, OUTPUTS = (1, 3, 16, 17, 41), 12
SECONDS = 120
"""Time limit of a model type."""
NEAR_TIE = 1e-4
"""If the two best logits differ by less, either token is right, and the comparison of a sequence ends."""


NO_CACHE: dict[str, dict[str, Any]] = {"": {"use_cache": False}, "xlnet": {"use_mems": False}}
"""Arguments with which ``generate`` recomputes a sequence for each token."""


class Result(NamedTuple):
    """What happened with a model type. outcome: a key of SECTIONS."""

    model_type: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def check(model_type: str) -> Result:
    """Build, run and compare a model of a type."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            stock = save_tiny(model_type, folder)
        except Exception as error:  # noqa: BLE001 - an unusual config may contradict the small sizes
            return Result(model_type, "not built", f"{type(error).__name__}: {one_line(error)}")
        try:
            model = load(folder, device="cpu", runtime="torch")
            runner = runner_of(model, 32 << 20)
        except nc.ModelError as error:
            reason = re.sub(r"cannot load the model in \S+ on cpu: ", "", str(error))
            return Result(model_type, "rejected", reason)
        random = np.random.default_rng(0)
        prompts = [random.integers(3, VOCABULARY, length).tolist() for length in LENGTHS]
        try:
            expected = [generate(stock, ids) for ids in prompts]
        except Exception as error:  # noqa: BLE001
            return Result(model_type, "not built", f"generate raises {type(error).__name__}: {one_line(error)}")
        texts = run(runner, prompts)
    reason = runner.unbatched_reason
    outcome = "paged" if runner.paged else "one by one" if reason else "padded"
    problem = difference(texts, expected)
    without = NO_CACHE.get(model_type, NO_CACHE[""])
    if problem and not difference(texts, [generate(stock, ids, **without) for ids in prompts]):
        reason += ". Equal to generate without a cache; with one, generate itself gives other tokens"
    elif problem:
        return Result(model_type, "differs", f"{outcome}: {problem}")
    return Result(model_type, outcome, reason)


def difference(texts: list[list[int] | str], expected: list[tuple[list[int], Any]]) -> str:
    """How the first text that is not the expected one differs; empty if all are equal."""
    for tokens, (stock_tokens, logits_LV) in zip(texts, expected, strict=True):
        if isinstance(tokens, str):
            return tokens
        for step, (mine, other) in enumerate(zip(tokens, stock_tokens, strict=True)):
            if mine != other:
                gap = float(logits_LV[step, other] - logits_LV[step, mine])
                if gap > NEAR_TIE:
                    return f"token {step} differs, its logit by {gap:.2g}"
                break
    return ""


def generate(model: Any, ids: list[int], **settings: Any) -> tuple[list[int], Any]:
    """The tokens that Transformers generates, and the logits of each."""
    given = torch.tensor([ids])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=-1,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True, **settings,
    )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits).float().numpy()


def run(runner: Any, prompts: list[list[int]]) -> list[list[int] | str]:
    """The tokens that the engine generates for all prompts together, or the message of an error."""
    engine = Engine(runner, nc.LLM().tokenizer, max_num_batched_tokens=64)
    params = nc.SamplingParams(temperature=0, max_tokens=OUTPUTS, ignore_eos=True)
    names = [engine.add(Request(ids, params)) for ids in prompts]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    errors: dict[str, str] = {}
    while len(engine):
        for output in engine.step():
            tokens[output.request_id] += output.chunk.token_ids
            if output.chunk.finish_reason == "error":
                errors[output.request_id] = str(output.chunk.stop_reason)
    return [errors.get(name, tokens[name]) for name in names]


def check_all(types: list[str], processes: int) -> Iterator[Result]:
    """Check each type in its own process, which inherits the imported libraries."""
    running: dict[int, tuple[str, Any, float]] = {}
    queue = list(types)
    while queue or running:
        while queue and len(running) < processes:
            sys.stdout.flush()
            model_type, file = queue.pop(0), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed after the process
            pid = os.fork()
            if not pid:
                signal.alarm(SECONDS)
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
                json.dump(check(model_type), file)
                file.flush()
                os._exit(0)
            running[pid] = model_type, file, time.monotonic()
        pid, status = os.wait()
        model_type, file, begin = running.pop(pid)
        file.seek(0)
        text = file.read()
        file.close()
        if text:
            result = Result(*json.loads(text))
        elif status == signal.SIGALRM:
            result = Result(model_type, "not built", f"no result within {SECONDS} s")
        else:
            result = Result(model_type, "differs", f"its process ended with status {status}")
        yield result._replace(seconds=time.monotonic() - begin)


SECTIONS = {
    "paged": ("Batched, paged", "These run in ragged batches over the paged KV cache."),
    "padded": (
        "Batched, padded",
        """These keep the cache of Transformers. Prompts, and the sequences that generate tokens, share
forward passes, padded on the left. [States are saved](engine.md#models) for common prefixes. There is
no speculation.""",
    ),
    "one by one": (
        "One sequence at a time",
        "These run with the cache of Transformers, or recompute the sequence for each token where the reason says so.",
    ),
    "rejected": (
        "Rejected when loaded",
        "Loading raises a `ModelError` with the reason. That of blt, dbrx and step3p7 comes from the small config.",
    ),
    "differs": ("Different tokens", "Their tokens differ from those of `generate`."),
    "not built": (
        "Not checked",
        "Their default config does not work in small, or needs a package that is not installed. They may run.",
    ),
}


def page(results: list[Result]) -> str:
    """docs/architectures.md."""
    counts = ", ".join(
        f"{sum(one.outcome == outcome for one in results)} {title.lower()}" for outcome, (title, _) in SECTIONS.items()
    )
    lines = [
        "# Architectures",
        "",
        "Which model types of Transformers run, and how. Written by `python benchmarks/architectures.py --write`: it",
        "builds a tiny random model of each type that has a causal language model, alone or with vision and audio",
        "parts. It has the first layers of the default config, with at least one of each kind, or those of published",
        "models where they have kinds that the default config lacks (`lfm2`: convolutions, `phimoe`: LongRoPE).",
        f"{OUTPUTS} greedy tokens after prompts of {', '.join(map(str, LENGTHS))} tokens, all in one engine, are",
        "compared with `generate` for each prompt. A model of a type may have another layout: every model is checked",
        "when it is loaded, and the log says why it runs one sequence at a time.",
        "",
        f"Transformers {transformers.__version__}, float32 on CPU, {len(results)} types:",
        f"{counts}.",
    ]
    for outcome, (title, text) in SECTIONS.items():
        found = [one for one in results if one.outcome == outcome]
        if found:
            lines += ["", f"## {title}", "", text, ""]
        if found and outcome in ("paged", "padded"):
            lines.append(", ".join(f"`{one.model_type}`" for one in found))
        elif found:
            lines += ["| type | reason |", "|---|---|"]
            lines += [f"| `{one.model_type}` | {cell(one.reason)} |" for one in found]
    return "\n".join(lines) + "\n"


def cell(reason: str) -> str:
    """A reason as a cell of a table, at most 200 characters."""
    reason = reason.replace(tempfile.gettempdir(), "")
    short = reason if len(reason) <= 200 else f"{reason[:197]}..."
    return re.sub(r"([|<*_])", r"\\\1", short)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", help="comma-separated model types; default: all")
    parser.add_argument("--processes", type=int, default=1, help="model types that are checked at a time (default: 1)")
    parser.add_argument("--write", action="store_true", help="write the table to docs/architectures.md")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    check("llama")  # imports and loads what all types need
    results = []
    for result in check_all(given.types.split(",") if given.types else model_types(), given.processes):
        print(f"{result.seconds:5.1f} s  {result.model_type:24} {result.outcome:10} {result.reason}", flush=True)
        results.append(result)
    if given.write:
        PAGE.write_text(page(sorted(results)), "utf-8")
