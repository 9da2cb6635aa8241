"""Beam search on the command line: its flags and output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.flag_values import read_values
from nucleate.engine.beam_params import BeamCompletion, BeamParams
from nucleate.outputs import to_json, validation_text
from nucleate.sampling_params import SamplingParams
from nucleate.server.openai import beam_search

if TYPE_CHECKING:
    from nucleate.llm import LLM

PARAMETERS = {
    name: BeamParams.PARAMETERS[name]
    for name in ("num_beams", *beam_search.PARAMETER_FIELDS)
    if name in BeamParams.PARAMETERS
}
"""The parameters with a generated flag."""


def add_beams(parser: argparse.ArgumentParser) -> None:
    """Add the flags; ``read_beams`` reads them."""
    group = parser.add_argument_group("beam search (enabled by --num-beams; replaces sampling)")
    for parameter in PARAMETERS.values():
        flags.add_parameter(group, parameter)
    text = "When to stop once num_beams beams have finished: true, false or never, as in Transformers (default: false)."
    group.add_argument("--early-stopping", metavar="WHEN", help=text)


def read_beams(arguments: argparse.Namespace, values: Mapping[str, Any]) -> BeamParams | None:
    """Return the parameters of the beam search, or None. values: the sampling parameters that are given.

    Raises UsageError, and ParameterError, also for sampling parameters that beam search does not support.
    """
    given = read_values(arguments, PARAMETERS)
    if arguments.early_stopping is not None:
        early = arguments.early_stopping.lower()
        given["early_stopping"] = {"true": True, "false": False}.get(early, early)
    if not given:
        return None
    if "num_beams" not in given:
        raise UsageError(f"{next(iter(given))} needs --num-beams")
    num_beams, body = given.pop("num_beams"), {**values, **given, beam_search.USE_BEAM_SEARCH: True}
    return beam_search.read_beams(body, SamplingParams(**values), best_of=num_beams, stream=False, echo=False)


def search(llm: LLM, prompt: str, params: BeamParams, *, echo: str, as_json: bool) -> int:
    """Run a beam search and print the beams. Returns the exit status."""
    start = time.perf_counter()
    [found] = llm.beam_search([prompt], params)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"prompt": prompt, **to_json(found), "params": to_json(params)}, allow_nan=False))
    else:
        _show(found, echo)
        tokens = found.usage.completion_tokens
        print(f"[{tokens} tokens, {seconds:.2f} s on {llm.model.runtime}, {params.num_beams} beams]", file=sys.stderr)
        for place, beam in enumerate(found.outputs, 1):
            if beam.validation is not None:
                print(f"nucleate: beam {place}: {validation_text(beam.validation)}", file=sys.stderr)
    failed = [beam for beam in found.outputs if beam.finish_reason == "error"]
    for beam in failed:
        print(f"nucleate: beam search failed: {beam.stop_reason}", file=sys.stderr)
    return 1 if failed else 0


def _show(found: BeamCompletion, echo: str) -> None:
    for place, beam in enumerate(found.outputs):
        if len(found.outputs) > 1:
            lead = "\n" if place else ""
            print(f"{lead}--- beam {place + 1} of {len(found.outputs)}, score {beam.score:.4f}, {beam.finish_reason}")
        print(f"{echo}{beam.text}")
