"""Beam search in a body: ``use_beam_search``, and the fields that say how to search. Knows no engine's work.

``best_of`` (or ``n``) is the width, and the ``n`` best of what is found are told. A search draws nothing, so that the
fields that say how to draw, or when else to stop, are refused; temperature may be 0 or 1, and a seed changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nucleate.engine.beam.params import BeamParams
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.server.openai.fields import read_switch

SWITCH = "use_beam_search"
FIELDS_OF_BEAMS: Mapping[str, str] = MappingProxyType(
    {
        "length_penalty": "length_penalty",
        "early_stopping": "early_stopping",
        "num_beam_groups": "num_beam_groups",
        "diversity_penalty": "diversity_penalty",
    }
)
"""Fields of a body that need ``use_beam_search``, and what ``BeamParams`` calls them."""

_SHARED = ("max_tokens", "structured_outputs", "stop_token_ids", "ignore_eos", "logprobs", "skip_special_tokens")
_IDLE = ("n", "seed")
_PUBLIC = {"num_beams": "best_of", "num_return_sequences": "n"}


def read_beams(
    given: Mapping[str, Any], params: SamplingParams, *, best_of: int, stream: bool, echo: bool
) -> BeamParams | None:
    """The search that a body asks for, if any. params: what it says of sampling. Raises ParameterError."""
    if not read_switch(given, SWITCH):
        for name in FIELDS_OF_BEAMS:
            if name in given:
                raise ParameterError(name, f"{name} needs {SWITCH} to be true")
        return None
    if stream:
        raise ParameterError("stream", "stream must be false in a beam search: no token is certain before its end")
    if echo and params.logprobs is not None:
        raise ParameterError("logprobs", "logprobs of a prompt (with echo) are not told of a beam search")
    for name in FIELDS:
        if name in given and name not in (*_SHARED, *_IDLE) and not _says_nothing(name, getattr(params, name)):
            raise ParameterError(name, f"a beam search draws nothing: leave out {name}, got {shown(given[name])}")
    said = {field: given[name] for name, field in FIELDS_OF_BEAMS.items() if name in given}
    shared = {name: getattr(params, name) for name in _SHARED}
    try:
        return BeamParams(num_beams=best_of, num_return_sequences=params.n, **said, **shared)
    except ParameterError as error:
        name = _PUBLIC.get(error.field, error.field)
        raise ParameterError(name, str(error).replace(error.field, name, 1)) from None


def _says_nothing(name: str, value: Any) -> bool:
    return value == FIELDS[name].default or (name == "temperature" and value == 0)
