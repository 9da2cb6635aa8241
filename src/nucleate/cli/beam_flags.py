"""Beam search from the command line: its flags, and how what it finds is shown. Knows no model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nucleate.cli import flags
from nucleate.cli.main import UsageError
from nucleate.cli.output_text import plain, worth
from nucleate.engine.beam.params import BeamCompletion, BeamParams
from nucleate.sampling_params import SamplingParams
from nucleate.server.openai import beam_search

if TYPE_CHECKING:
    from nucleate.llm import LLM

_FIELDS = {"num_beams": "num_beams", **beam_search.FIELDS_OF_BEAMS}
PARAMETERS = {
    name: replace(BeamParams.PARAMETERS[field], name=name)
    for name, field in _FIELDS.items()
    if field in BeamParams.PARAMETERS
}
"""By flag, as a body of a request has them."""


def add_beams(parser: argparse.ArgumentParser) -> None:
    """Add the flags; ``read_beams`` finds them."""
    group = parser.add_argument_group("beam search (with --num-beams: the likeliest answers, nothing is drawn)")
    for parameter in PARAMETERS.values():
        flags.add_parameter(group, parameter, ("--beam-width",) if parameter.name == "num_beams" else ())
    text = "when so many answers as beams are enough: true, false or never [default false]"
    group.add_argument("--early-stopping", metavar="WHEN", help=text)


def read_beams(arguments: argparse.Namespace, values: Mapping[str, Any]) -> BeamParams | None:
    """The search that the flags ask for, if any; values: the parameters of sampling that are given.

    Raises UsageError; ParameterError, also for parameters that say how to draw.
    """
    given = flags.given(arguments, PARAMETERS)
    if arguments.early_stopping is not None:
        early = arguments.early_stopping.lower()
        given["early_stopping"] = {"true": True, "false": False}.get(early, early)
    if not given:
        return None
    if "num_beams" not in given:
        raise UsageError(f"{next(iter(given))} is for a beam search: give --num-beams, too")
    num_beams, body = given.pop("num_beams"), {**values, **given, beam_search.SWITCH: True}
    return beam_search.read_beams(body, SamplingParams(**values), best_of=num_beams, stream=False, echo=False)


def search(llm: LLM, prompt: str, params: BeamParams, *, echo: str, as_json: bool) -> int:
    """Search, and print what was found. Returns the exit status."""
    start = time.perf_counter()
    [found] = llm.beam_search([prompt], params)
    seconds = time.perf_counter() - start
    if as_json:
        print(json.dumps({"prompt": prompt, **plain(found), "params": plain(params)}, allow_nan=False))
    else:
        _show(found, echo)
        tokens = found.usage.completion_tokens
        print(
            f"[{tokens} tokens, {seconds:.2f} s on {llm.model.runtime}, num_beams {params.num_beams}]", file=sys.stderr
        )
        for place, beam in enumerate(found.outputs, 1):
            if beam.validation is not None:
                print(f"nucleate: answer {place}: {worth(beam.validation)}", file=sys.stderr)
    failed = [beam for beam in found.outputs if beam.finish_reason == "error"]
    for beam in failed:
        print(f"nucleate: the search ended with an error: {beam.stop_reason}", file=sys.stderr)
    return 1 if failed else 0


def _show(found: BeamCompletion, echo: str) -> None:
    for place, beam in enumerate(found.outputs):
        if len(found.outputs) > 1:
            lead = "\n" if place else ""
            print(f"{lead}--- answer {place + 1} of {len(found.outputs)}, score {beam.score:.4f}, {beam.finish_reason}")
        print(f"{echo}{beam.text}")
