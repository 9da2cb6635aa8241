"""Parsing of single fields of request bodies, and their errors.

``use_beam_search`` and its fields are those of vLLM: ``best_of`` (or ``n``) is the number of beams, and the ``n``
highest-scoring ones are returned. Sampling fields and other stop criteria are rejected; temperature may be 0 or 1, and
a seed has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from nucleate.engine.beam_params import BeamParams
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError, unknown
from nucleate.sampling_params import FIELDS, SamplingParams

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def reject_deep_nesting(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Decorate a parser: it raises ParameterError instead of RecursionError for a deeply nested body."""

    @wraps(read)
    def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            raise ParameterError("body", "the body is nested too deeply") from None

    return wrapper


def read_bool(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Read a boolean field."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise invalid_value(name, "true or false", value)
    return value


def read_int(given: Mapping[str, Any], name: str, low: int, default: int = 0) -> int:
    """Read an integer field of 64 bits."""
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        least = "-2**63" if low == -(2**63) else low
        raise invalid_value(name, f"an integer >= {least} and < 2**63", value)
    return value


def read_model(given: Mapping[str, Any]) -> str | None:
    """Read the model name."""
    model = given.get("model")
    if model is not None and (not isinstance(model, str) or not model):
        raise invalid_value("model", "a non-empty string", model)
    return model


def are_token_ids(value: Sequence[Any]) -> bool:
    """Return whether all entries are integers."""
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def json_equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, 1 and true differ."""
    return type(value) is type(other) and value == other


def invalid_value(name: str, allowed: str, value: object, field: str = "") -> ParameterError:
    """Return the error for an invalid value. name: its place in the body. field: the top-level field, if different."""
    return ParameterError(field or name, f"{name} must be {allowed}, got {shown(value)}")


def unknown_field(name: str, known: Iterable[str], of: str = "") -> ParameterError:
    """Return the error for an unknown field, whose name is cut to a bounded length."""
    return unknown(name[:100], known, f"field of {of}" if of else "field")


USE_BEAM_SEARCH = "use_beam_search"
BEAM_PARAMETER_FIELDS = ("length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty")
"""Body fields that need ``use_beam_search``: fields of ``BeamParams``."""
BEAM_FIELDS = (USE_BEAM_SEARCH, *BEAM_PARAMETER_FIELDS)

_SHARED_FIELDS = ("max_tokens", "structured_outputs", "stop_token_ids", "ignore_eos", "logprobs", "skip_special_tokens")
_OTHER_FIELDS = ("n", "seed")
_FIELD_NAMES = {"num_beams": "best_of", "num_return_sequences": "n"}


def read_beams(
    given: Mapping[str, Any], params: SamplingParams, *, best_of: int, stream: bool, echo: bool
) -> BeamParams | None:
    """Return the beam search parameters of a body, or None. params: its sampling parameters. Raises ParameterError."""
    if not read_bool(given, USE_BEAM_SEARCH):
        for name in BEAM_PARAMETER_FIELDS:
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
    own = {name: given[name] for name in BEAM_PARAMETER_FIELDS if name in given}
    shared = {name: getattr(params, name) for name in _SHARED_FIELDS}
    try:
        return BeamParams(num_beams=best_of, num_return_sequences=params.n, **own, **shared)
    except ParameterError as error:
        name = _FIELD_NAMES.get(error.field, error.field)
        raise ParameterError(name, str(error).replace(error.field, name, 1)) from None


def _is_no_op(name: str, value: Any) -> bool:
    return value == FIELDS[name].default or (name == "temperature" and value == 0)


TRUNCATE, SIDE = "truncate_prompt_tokens", "truncation_side"


@dataclass(frozen=True)
class Truncation:
    """How many tokens of a prompt to keep: the first or the last ones. count: -1 for as many as fit the context."""

    count: int
    keeps_end: bool = True

    def apply(self, prompt_ids: list[int], max_prompt_tokens: int) -> list[int]:
        """Return the tokens that are kept. max_prompt_tokens: those that fit the context before the output."""
        count = max(1, max_prompt_tokens) if self.count == -1 else self.count
        return prompt_ids[-count:] if self.keeps_end else prompt_ids[:count]


def read_truncation(given: Mapping[str, Any], *, echo: bool, suffix: str | None) -> Truncation | None:
    """Read ``truncate_prompt_tokens`` and ``truncation_side``. echo: of a completion. Raises ParameterError."""
    side = given.get(SIDE, "left")
    if side not in ("left", "right"):
        raise invalid_value(SIDE, "left or right", side)
    if TRUNCATE not in given:
        return None
    count = read_int(given, TRUNCATE, -1)
    if not count:
        raise invalid_value(TRUNCATE, "-1 or an integer >= 1", count)
    for other, is_set in (("echo", echo), ("suffix", suffix is not None)):
        if is_set:
            raise ParameterError(TRUNCATE, f"{TRUNCATE} cannot be combined with {other}")
    return Truncation(count, keeps_end=side == "left")  # the side on which tokens are removed


def read_suffix(given: Mapping[str, Any], prompts: Sequence[str | tuple[int, ...]], *, echo: bool) -> str | None:
    """Read the text after the output; None for an empty one. Raises ParameterError."""
    suffix = given.get("suffix", "")
    if not isinstance(suffix, str):
        raise invalid_value("suffix", "a string", suffix)
    if not suffix:
        return None
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise ParameterError("suffix", "suffix needs prompts of text, not of token ids")
    for name, is_set in (("echo", echo), (USE_BEAM_SEARCH, given.get(USE_BEAM_SEARCH))):
        if is_set:
            raise ParameterError("suffix", f"suffix cannot be combined with {name}")
    return suffix
