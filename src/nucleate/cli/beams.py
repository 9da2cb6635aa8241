"""Beam search from the command line: its flags, and how what it finds is shown. Knows no model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nucleate.cli.main import UsageError
from nucleate.core.parameter import ParameterError

if TYPE_CHECKING:
    from nucleate.engine.beam import BeamCompletion, BeamParams
    from nucleate.llm import LLM

NAMES = {
    "beam_width": ("width", int, "INTEGER", "look for the likeliest answers with so many beams, and draw nothing"),
    "length_penalty": ("length_penalty", float, "NUMBER", "of beams: their logprob is divided by length ** this; 1.0"),
    "early_stopping": ("early_stopping", str, "WHEN", "of beams: when width answers are enough: true, false or never"),
    "beam_groups": ("groups", int, "INTEGER", "groups that share the beams, each a search of its own; 1"),
    "diversity_penalty": (
        "diversity_penalty",
        float,
        "NUMBER",
        "what a token loses for each beam of an earlier group that goes on with it; 0",
    ),
}
"""By flag: the field of BeamParams, how its text is read, what it is called, its help."""

SHARED = ("max_tokens", "stop_token_ids", "ignore_eos", "structured", "logprobs", "skip_special_tokens")
"""The parameters of sampling that mean the same to a search."""

EARLY = {"true": True, "false": False, "never": "never"}


def add_beams(parser: argparse.ArgumentParser) -> None:
    """Add the flags; ``read_beams`` finds them."""
    group = parser.add_argument_group("beam search")
    for name, (_, kind, metavar, text) in NAMES.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=_read(kind), metavar=metavar, help=text)


def _read(kind: type) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        return EARLY.get(text.lower(), text) if kind is str else kind(text)

    number.__name__ = kind.__name__  # for argparse's message
    return number


def read_beams(arguments: argparse.Namespace, values: Mapping[str, Any]) -> BeamParams | None:
    """The search that the flags ask for, if any; values: the parameters of sampling that are given.

    Raises UsageError, also for those that say how to draw; ParameterError.
    """
    given = {name: getattr(arguments, name) for name in NAMES if getattr(arguments, name) is not None}
    if not given:
        return None
    if "beam_width" not in given:
        raise UsageError(f"{_flag(next(iter(given)))} is for a beam search: give --beam-width, too")
    if odd := [name for name in values if name not in (*SHARED, "n")]:
        raise UsageError(f"a beam search draws nothing: leave out {', '.join(map(_flag, odd))}")
    from nucleate.engine.beam import BeamParams

    shared = {name: value for name, value in values.items() if name in SHARED}
    try:
        searched = {NAMES[name][0]: value for name, value in given.items()}
        return BeamParams(**searched, **shared, returned=values.get("n", 1))
    except ParameterError as error:
        flag = next((name for name, (field, *_) in NAMES.items() if field == error.field), error.field)
        raise UsageError(f"{_flag('n' if flag == 'returned' else flag)}: {error}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def search(llm: LLM, prompt: str, params: BeamParams, *, echo: str, as_json: bool) -> int:
    """Search, and print what was found. Returns the exit status."""
    from nucleate.cli.generate import plain, worth

    start = time.perf_counter()
    [found] = llm.beam_search([prompt], params)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"prompt": prompt, **plain(found), "params": plain(params)}, allow_nan=False))
    else:
        _show(found, echo)
        tokens = found.usage.completion_tokens
        print(f"[{tokens} tokens, {seconds:.2f} s on {llm.model.runtime}, width {params.width}]", file=sys.stderr)
        for place, beam in enumerate(found.beams, 1):
            if beam.validation is not None:
                print(f"nucleate: answer {place}: {worth(beam.validation)}", file=sys.stderr)
    failed = [beam for beam in found.beams if beam.finish_reason == "error"]
    for beam in failed:
        print(f"nucleate: the search ended with an error: {beam.stop_reason}", file=sys.stderr)
    return 1 if failed else 0


def _show(found: BeamCompletion, echo: str) -> None:
    for place, beam in enumerate(found.beams):
        if len(found.beams) > 1:
            lead = "\n" if place else ""
            print(f"{lead}--- answer {place + 1} of {len(found.beams)}, score {beam.score:.4f}, {beam.finish_reason}")
        print(f"{echo}{beam.text}")
