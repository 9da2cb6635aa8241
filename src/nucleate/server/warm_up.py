"""Runs the model once, and prepares grammars, before a server accepts requests."""

from __future__ import annotations

from contextlib import suppress

from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.structured_output.spec import StructuredOutputs


def _shortest_prompt(engine: Engine) -> list[int]:
    """Return a prompt that is valid for any model."""
    return [min(engine.tokenizer.eos_token_ids, default=0)]


def warm_up(engine: Engine) -> None:
    """Generate two sequences in one batch: a single one may take another code path in the model."""
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    engine.add(Request(_shortest_prompt(engine), params))
    while len(engine):
        for output in engine.step():
            if output.chunk.finish_reason == "error":
                raise ModelError(f"the model cannot be run: {output.chunk.stop_reason}")


def warm_up_grammars(engine: Engine, defaults: SamplingParams) -> None:
    """Prepare the vocabulary for grammars now: for a large one, that blocks all threads for seconds."""
    with suppress(ParameterError):  # llguidance is missing or the tokenizer unsuitable: requests get the error
        constraint = StructuredOutputs(json_object=True)
        engine.prepare(Request(_shortest_prompt(engine), SamplingParams(structured_outputs=constraint)))
    if defaults.structured_outputs is not None:
        engine.prepare(Request(_shortest_prompt(engine), defaults))
