"""Fields that request logprobs. -1 requests those of all tokens, if the server allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import Endpoint
from nucleate.server.openai.fields import invalid_value, json_equal


def read_logprobs(endpoint: Endpoint, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``logprobs`` and ``prompt_logprobs``, as far as a body sets them.

    In a chat, ``logprobs`` is a boolean and ``top_logprobs`` the number. Raises ParameterError.
    """
    names = ["logprobs", "prompt_logprobs", "top_logprobs"]
    numbers = {name: _number(name, given[name], endpoint.vocab_size) for name in names if name in given}
    if "top_logprobs" not in endpoint.supported:
        return numbers
    enabled, top = numbers.pop("logprobs", None), numbers.pop("top_logprobs", None)
    if enabled is not None and not isinstance(enabled, bool):
        raise invalid_value("logprobs", "true or false (top_logprobs is the number)", enabled)
    if top is not None:
        top = replace(FIELDS["logprobs"], name="top_logprobs", optional=False).check(top)
        if not enabled:
            raise ParameterError("top_logprobs", "top_logprobs needs logprobs to be true")
    return numbers if enabled is None else {**numbers, "logprobs": (top or 0) if enabled else None}


def _number(name: str, value: Any, vocab_size: int) -> Any:
    if not json_equal(value, -1):
        return value
    if not vocab_size:
        raise ParameterError(name, f"{name} must be an integer >= 0; -1, for all tokens, needs --max-logprobs -1")
    return vocab_size
