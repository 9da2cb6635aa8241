"""What the front end of the inspector gets and asks for, as JSON: settings for its controls, and bodies of requests.

The settings describe the model and all sampling parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Final

from nucleate.inspector.draws import MAX_DRAWS
from nucleate.inspector.store import InspectorError, Run
from nucleate.inspector.trace_view import MAX_TOKENS
from nucleate.parameters.parameter import Parameter, ParameterError, entries, invalid_value
from nucleate.sampling.presets import REQUESTABLE
from nucleate.sampling.stage import Combine, shape_of
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS, SamplingParams
from nucleate.tokenization.tokenizer import Tokenizer


def describe_stages(vocab_size: int) -> list[dict[str, Any]]:
    """The stages that requests can set, with their parameters, as JSON values."""
    stages = [STAGES[stage] for stage in REQUESTABLE if not issubclass(STAGES[stage], Combine)]
    return [
        {
            "name": stage.name,
            "shape": shape_of(stage).lower(),
            "help": (stage.__doc__ or "").strip().splitlines()[0],
            "parameters": [_parameter(each, vocab_size) for each in stage.parameters.values() if each.public],
        }
        for stage in stages
    ]


OTHERS: Final = (
    *("stop_token_ids", "stop_regex", "stop_json", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens"),
    *("structured_outputs", "max_reasoning_tokens", "guidance_scale", "negative_prompt"),
)
CONTRASTIVE: Final = ("contrastive_beta", "contrastive_alpha", "contrastive_temperature")
"""Parameters that belong to none of these stages, besides seed, draw, order, max_tokens and stop, which have their own
controls; and those that need a companion model."""


def describe_others(vocab_size: int, *, companion: bool) -> list[dict[str, Any]]:
    """The parameters that belong to none of these stages, as JSON values.

    companion: whether the model has a companion model.
    """
    return [_parameter(FIELDS[name], vocab_size) for name in (*OTHERS, *(CONTRASTIVE if companion else ()))]


def _parameter(parameter: Parameter, vocab_size: int) -> dict[str, Any]:
    names = "name", "kind", "help", "allowed", "default", "neutral", "low", "high", "open_low", "optional", "choices"
    return {name: _json(getattr(parameter, name)) for name in names} | {"slider": slider(parameter, vocab_size)}


def slider(parameter: Parameter, vocab_size: int) -> dict[str, Any] | None:
    """The range of a slider for a number; None for other kinds. A parameter without bounds gets plausible ones."""
    if parameter.kind not in ("float", "int") or parameter.choices:
        return None
    if parameter.kind == "int":
        first = 0 if parameter.low is None else int(parameter.low)
        last = min(vocab_size, 1000) if parameter.high is None else int(min(parameter.high, vocab_size))
        return {"min": min(first, last), "max": max(first, last), "step": 1, "log": last - first > 100}
    neutral = parameter.neutral if isinstance(parameter.neutral, int | float) else 0.0
    around = 2.0 * abs(neutral) or 10.0
    low = -around if parameter.low is None else float(parameter.low)
    high = max(around, low + 1) if parameter.high is None else float(parameter.high)
    return {"min": low, "max": high, "step": 0.001 if high - low <= 1 else 0.01, "log": False}


def _json(value: Any) -> Any:
    if value is MISSING or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if isinstance(value, tuple | list):
        return [_json(each) for each in value]
    return dict(value) if hasattr(value, "items") else value


UNUSABLE: Final = ("n", "logprobs", "logprob_token_ids", "prompt_logprobs")
"""Parameters that an inspected request cannot set: it has one output, and its page shows all probabilities."""


@dataclass(frozen=True)
class Parent:
    """Where a branch starts: after ``step`` tokens of a run, and the tokens that follow."""

    run: str
    step: int
    token: int | None
    text: str | None


@dataclass(frozen=True)
class GenerateBody:
    """A prompt, a conversation or a parent, and sampling parameters. A prompt is text or token ids."""

    prompt: str | list[int] | None
    messages: list[Any] | None
    parent: Parent | None
    params: dict[str, Any]


@dataclass(frozen=True)
class StepBody:
    """A step of a run, under other parameters if ``params`` is not None."""

    run: str
    step: int
    params: dict[str, Any] | None
    top: int
    include: tuple[int, ...]
    count: int


def read_generate(body: Any) -> GenerateBody:
    """Read the body of ``generate``. Raises ParameterError."""
    given = entries(body, ("prompt", "messages", "parent", "params"))
    inputs = [name for name in ("prompt", "messages", "parent") if name in given]
    if len(inputs) != 1:
        raise ParameterError("prompt", f"give one of prompt, messages and parent, got {' and '.join(inputs) or 'none'}")
    prompt = _check("prompt", given.get("prompt"), str | list | None, "a text or a list of token ids")
    if isinstance(prompt, list) and not all(map(_is_count, prompt)):
        raise ParameterError("prompt", "prompt must be a text or a list of token ids")
    messages = _check("messages", given.get("messages"), list | None, "a list")
    parent = _parent(given["parent"]) if "parent" in given else None
    return GenerateBody(prompt, messages, parent, _params(given) or {})


def read_step(body: Any, default_top: int) -> StepBody:
    """Read the body of ``trace`` or ``draws``. Raises ParameterError."""
    given = entries(body, ("run", "step", "params", "top", "include", "count"))
    run, include = _check("run", given.get("run"), str, "the id of a run"), given.get("include", [])
    if not isinstance(include, list) or len(include) > MAX_TOKENS or not all(_is_count(each) for each in include):
        raise ParameterError("include", f"include must be a list of at most {MAX_TOKENS} token ids")
    return StepBody(
        run,
        _integer(given, "step", 0, 2**31 - 1),
        _params(given),
        _integer(given, "top", 1, MAX_TOKENS, default_top),
        tuple(include),
        _integer(given, "count", 1, MAX_DRAWS, 1000),
    )


def run_params(
    values: Mapping[str, Any], defaults: SamplingParams, max_tokens: int, default_max_tokens: int
) -> SamplingParams:
    """The parameters of an inspected request. Raises ParameterError."""
    why = "the inspector shows one output with all probabilities"
    for name in UNUSABLE:
        if values.get(name) not in (None, (), [], 1):
            raise ParameterError(name, f"{name} cannot be set here: {why}")
    values = {name: value for name, value in values.items() if name not in UNUSABLE}
    unwanted = {name: FIELDS[name].default for name in UNUSABLE if name in defaults.fields_set}
    params = defaults.override(**values, **unwanted)
    given = default_max_tokens if params.max_tokens is None else params.max_tokens
    if given > max_tokens:
        raise ParameterError("max_tokens", f"max_tokens must be at most {max_tokens} here, got {given}")
    return params.replace(max_tokens=given)


def branch_tokens(parent: Parent, run: Run, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens with which the output of a branch begins. Raises ParameterError, InspectorError."""
    kept = run.token_ids[: parent.step]
    if len(kept) < parent.step:
        raise InspectorError("step_not_stored", f"the run has {len(kept)} tokens, not {parent.step}")
    more = tokenizer.encode(parent.text or "", False) if parent.token is None else [parent.token]
    return (*kept, *more)


def _parent(value: Any) -> Parent:
    given = entries(value, ("run", "step", "token", "text"), "parent")
    _check("parent.run", given.get("run"), str, "the id of a run")
    token, text = given.get("token"), given.get("text")
    if (token is None) == (text is None):
        raise ParameterError("parent.token", "parent needs a token or a text, and not both")
    if token is not None and not _is_count(token):
        raise invalid_value("parent.token", "a token id", token)
    _check("parent.text", text, str | None, "a text")
    return Parent(given["run"], _integer(given, "step", 0, 2**31 - 1), token, text)


def _check(name: str, value: Any, kind: Any, words: str) -> Any:
    if not isinstance(value, kind):
        raise invalid_value(name, words, value)
    return value


def _params(given: Mapping[str, Any]) -> Any:
    return _check("params", given.get("params"), dict | None, "an object of sampling parameters")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _integer(given: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise invalid_value(name, f"an integer from {low} to {high}", value)
    return value
