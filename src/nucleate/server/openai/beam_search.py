"""Parses beam search requests: ``use_beam_search`` and its fields, as in vLLM.

``best_of`` (or ``n``) is the number of beams, and the ``n`` highest-scoring ones are returned. Sampling fields and
other stop criteria are rejected; temperature may be 0 or 1, and a seed has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.engine.beam_params import BeamParams
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.server.openai.fields import read_bool

USE_BEAM_SEARCH = "use_beam_search"
PARAMETER_FIELDS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
"""Body fields that need ``use_beam_search``: fields of ``BeamParams``."""
BODY_FIELDS = (USE_BEAM_SEARCH, *PARAMETER_FIELDS)

_SHARED_FIELDS = ("max_tokens", "structured_outputs", "stop_token_ids", "ignore_eos", "logprobs", "skip_special_tokens")
_OTHER_FIELDS = ("n", "seed")
_FIELD_NAMES = {"num_beams": "best_of", "num_return_sequences": "n"}


def read_beams(
    given: Mapping[str, Any], params: SamplingParams, *, best_of: int, stream: bool, echo: bool
) -> BeamParams | None:
    """Return the beam search parameters of a body, or None. params: its sampling parameters. Raises ParameterError."""
    if not read_bool(given, USE_BEAM_SEARCH):
        for name in PARAMETER_FIELDS:
            if name in given:
                raise ParameterError(name, f"{name} needs {USE_BEAM_SEARCH} to be true")
        return None
    if stream:
        raise ParameterError(
            "stream", "stream must be false with use_beam_search: no token is final before the search ends"
        )
    if echo and params.logprobs is not None:
        raise ParameterError("logprobs", "logprobs with echo are not supported with use_beam_search")
    for name in FIELDS:
        if (
            name in given
            and name not in (*_SHARED_FIELDS, *_OTHER_FIELDS)
            and not _is_no_op(name, getattr(params, name))
        ):
            raise ParameterError(name, f"{name} is not supported with use_beam_search, got {shown(given[name])}")
    own = {name: given[name] for name in PARAMETER_FIELDS if name in given}
    shared = {name: getattr(params, name) for name in _SHARED_FIELDS}
    try:
        return BeamParams(num_beams=best_of, num_return_sequences=params.n, **own, **shared)
    except ParameterError as error:
        name = _FIELD_NAMES.get(error.field, error.field)
        raise ParameterError(name, str(error).replace(error.field, name, 1)) from None


def _is_no_op(name: str, value: Any) -> bool:
    return value == FIELDS[name].default or (name == "temperature" and value == 0)
