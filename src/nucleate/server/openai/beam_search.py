"""Parses beam search requests: ``use_beam_search`` and its fields, as in vLLM.

``best_of`` (or ``n``) is the number of beams, and the ``n`` highest-scoring ones are returned. Sampling fields and
other stop criteria are rejected; temperature may be 0 or 1, and a seed has no effect.
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
"""Body fields that need ``use_beam_search``, and the fields of ``BeamParams``."""
BODY_FIELDS = (SWITCH, *FIELDS_OF_BEAMS)

_SHARED = ("max_tokens", "structured_outputs", "stop_token_ids", "ignore_eos", "logprobs", "skip_special_tokens")
_IDLE = ("n", "seed")
_PUBLIC = {"num_beams": "best_of", "num_return_sequences": "n"}


def read_beams(
    given: Mapping[str, Any], params: SamplingParams, *, best_of: int, stream: bool, echo: bool
) -> BeamParams | None:
    """Return the beam search parameters of a body, or None. params: its sampling parameters. Raises ParameterError."""
    if not read_switch(given, SWITCH):
        for name in FIELDS_OF_BEAMS:
            if name in given:
                raise ParameterError(name, f"{name} needs {SWITCH} to be true")
        return None
    if stream:
        raise ParameterError(
            "stream", "stream must be false with use_beam_search: no token is final before the search ends"
        )
    if echo and params.logprobs is not None:
        raise ParameterError("logprobs", "logprobs with echo are not supported with use_beam_search")
    for name in FIELDS:
        if name in given and name not in (*_SHARED, *_IDLE) and not _is_no_op(name, getattr(params, name)):
            raise ParameterError(name, f"{name} is not supported with use_beam_search, got {shown(given[name])}")
    said = {field: given[name] for name, field in FIELDS_OF_BEAMS.items() if name in given}
    shared = {name: getattr(params, name) for name in _SHARED}
    try:
        return BeamParams(num_beams=best_of, num_return_sequences=params.n, **said, **shared)
    except ParameterError as error:
        name = _PUBLIC.get(error.field, error.field)
        raise ParameterError(name, str(error).replace(error.field, name, 1)) from None


def _is_no_op(name: str, value: Any) -> bool:
    return value == FIELDS[name].default or (name == "temperature" and value == 0)
