"""Pipelines that users write: as JSON (``[{"stage": "temperature", "t": 0.8}, ...]``), as text, and as a field.

The text is ``temperature(0.8) | top_p(0.9)``. A pipeline in SamplingParams replaces other fields; defaults give way to
what a request sets.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, replace
from types import MappingProxyType
from typing import Any, TypeGuard

from nucleate.parameters import converters
from nucleate.parameters.converters import TokenTable, shown
from nucleate.parameters.parameter import Parameter, ParameterError, read_json, unknown
from nucleate.sampling.presets import PIPELINE_PARAMETERS, REQUESTABLE, stages_in
from nucleate.sampling.stage import Combine, Draw, Floor, Pipeline, Prefix, Stage, Tap, shape_of
from nucleate.sampling.stages import STAGES, Mask, MinTokens, Mirostat, MirostatV1
from nucleate.sampling.watermark_key import WatermarkKey

FIELD = "pipeline"
MAX_STAGES = 64
"""Maximum number of stages in a pipeline."""
_NOUN = "a tuple of stages, a list of objects with a stage and its parameters, or text such as 'temperature(0.8) | top_p(0.9)'"  # noqa: E501


def is_pipeline(value: object) -> TypeGuard[Pipeline]:
    """Whether a value is a tuple of stages."""
    return isinstance(value, tuple) and bool(value) and all(isinstance(stage, Stage) for stage in value)


def pipeline_to_json(stages: Pipeline) -> list[dict[str, Any]]:
    """Return plain JSON values: the name of each stage, and its parameters that differ from their defaults.

    Watermark keys are left out.
    """
    return [{"stage": stage.name, **_changed(stage)} for stage in stages]


def _changed(stage: Stage) -> dict[str, Any]:
    values = {attribute: getattr(stage, attribute) for attribute in stage.parameters}
    return {
        attribute: {str(token): number for token, number in value.items()} if isinstance(value, Mapping) else value
        for attribute, value in values.items()
        if value != stage.parameters[attribute].default and not isinstance(value, WatermarkKey)
    }


def read_pipeline(value: Any) -> Pipeline:
    """Return the pipeline of a tuple of stages, of JSON or of text. Raises ParameterError, or TypeError for others."""
    if isinstance(value, str):
        stages = tuple(_made(index, *call) for index, call in enumerate(parse_calls(value)))
    elif isinstance(value, Sequence):
        stages = tuple(_stage(index, entry) for index, entry in enumerate(value))
    else:
        raise TypeError
    _check(stages)
    return stages


def _check(stages: Pipeline) -> None:
    if not stages:
        raise _error("has no stage")
    if len(stages) > MAX_STAGES:
        raise _error(f"has {len(stages)} stages; at most {MAX_STAGES} are allowed")
    for index, stage in enumerate(stages):
        try:
            shape_of(stage)
        except TypeError as error:
            raise _error(str(error), index) from None
        if isinstance(stage, Mask):
            raise _error("mask comes with each step, from structured output", index)
        if isinstance(stage, Draw) and index < len(stages) - 1:
            raise _error(f"{stage.name} is a draw, which must be the last stage", index)
        if isinstance(stage, Combine) and index:
            raise _error(f"{stage.name} combines the logits of two sequences, which must be the first stage", index)
    if sum(isinstance(stage, Tap) for stage in stages) > 1:
        raise _error("has more than one Tap")


def _stage(index: int, entry: Any) -> Stage:
    """Return a stage, also from its JSON."""
    if isinstance(entry, Stage):
        return entry
    if not isinstance(entry, Mapping) or not isinstance(entry.get("stage"), str):
        raise _error(f"must be a stage, or an object with the name of a stage, got {shown(entry)}", index)
    given = {name: value for name, value in entry.items() if name != "stage"}
    return _made(index, entry["stage"], [], given)


def _made(index: int, name: str, positional: Sequence[Any], named: Mapping[str, Any]) -> Stage:
    """Return a new stage. Parameters may have the name of the attribute or of the field of SamplingParams."""
    if name not in STAGES:
        raise _error(str(unknown(name, STAGES, "stage")), index)
    kind = STAGES[name]
    attributes = list(kind.parameters)
    if len(positional) > len(attributes):
        raise _error(f"{name} takes at most {len(attributes)} parameters, got {len(positional)}", index)
    fields = {parameter.name: attribute for attribute, parameter in kind.parameters.items()}
    values = dict(zip(attributes, positional, strict=False))
    for key, value in named.items():
        attribute = key if key in attributes else fields.get(key)
        if attribute is None:
            raise _error(str(unknown(str(key), attributes, f"parameter of {name}")), index)
        if attribute in values:
            raise _error(f"{name} has {attribute} twice", index)
        values[attribute] = value
    missing = [a for a, p in kind.parameters.items() if a not in values and p.default is MISSING]
    if missing:
        raise _error(f"{name} needs {', '.join(missing)}", index)
    try:
        return kind(**values)
    except ParameterError as error:
        raise _error(f"{name}: {error}", index) from None


Call = tuple[str, list[Any], dict[str, Any]]
"""The name of a stage, its positional parameters, and its named ones."""


def parse_calls(text: str, field: str = FIELD) -> Iterator[Call]:
    """Yield the stages of ``name(value, name=value) | name | ...``; values are Python literals."""
    try:
        tree = ast.parse(" ".join(text.splitlines()).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        form = f"is not of the form 'temperature(0.8) | top_p(0.9)': {converters.one_line(error)}"
        raise _error(form, field=field) from None
    parts: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        parts.append(tree.right)
        tree = tree.left
    for index, part in enumerate([tree, *reversed(parts)]):
        call = part if isinstance(part, ast.Call) else ast.Call(part, [], [])
        if not isinstance(call.func, ast.Name):
            raise _error(f"must be the name of a stage, got {shown(ast.unparse(part))}", index, field)
        try:
            positional = [ast.literal_eval(value) for value in call.args]
            named = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords}
        except ValueError:
            raise _error(f"{call.func.id} has a parameter that is not a literal value", index, field) from None
        yield call.func.id, positional, named


def _error(message: str, index: int | None = None, field: str = FIELD) -> ParameterError:
    return ParameterError(field, f"{field}{'' if index is None else f'[{index}]'} {message}")


KIND = "tuple[Stage, ...]"
"""The kind of a parameter that is a pipeline."""
converters.CONVERT[KIND] = lambda value, _: read_pipeline(value)
converters.NOUNS[KIND] = "", _NOUN


MAX_CACHED_SIZE = 1024
"""Token ids and characters in parameters that caches keep: a client must not be able to fill the memory."""


def is_cacheable(values: Mapping[str, Any]) -> bool:
    """Whether caches may keep the fields of SamplingParams: they are small, and have no grammar."""
    large = list(values.values())
    for stage in values["pipeline"] or ():
        large += [getattr(stage, attribute) for attribute in stage.parameters]
    sizes = [_size(value) for value in large if value.__class__ in (tuple, TokenTable, str) and value]
    return values["structured_outputs"] is None and sum(sizes) <= MAX_CACHED_SIZE


def _size(values: tuple[Any, ...] | Mapping[int, float] | str) -> int:
    """The number of token ids and characters."""
    return len(values) + sum([len(value) for value in values if isinstance(value, str | tuple)])


def replaced_fields() -> list[str]:
    """The fields of SamplingParams that a pipeline replaces."""
    return [name for name in PIPELINE_PARAMETERS if name != "min_tokens"]


def check_given(values: dict[str, Any], fields: Mapping[str, Parameter]) -> None:
    """Check that no other field sets a stage, and move the seed of the draw to its field. Raises ParameterError."""
    for name in replaced_fields():
        if values[name] != fields[name].default:
            message = f"{name} cannot be set with pipeline, which replaces it: add the stage to the pipeline"
            raise ParameterError(name, f"{message}, got {shown(values[name])}")
    has_logprobs = values["logprobs"] is not None or values["logprob_token_ids"]
    if has_logprobs and any(isinstance(stage, Tap) for stage in values["pipeline"]):
        raise ParameterError("logprobs", "logprobs is set, and the pipeline has a logprobs stage: set only one")
    values["pipeline"], seed = _without_seed(values["pipeline"])
    if seed is not None and values["seed"] not in (None, seed):
        raise ParameterError("seed", f"seed is {values['seed']}, but the pipeline has {seed}: set only one")
    values["seed"] = values["seed"] if seed is None else seed


def given_stages(pipeline: Pipeline, min_tokens: int, end_ids: tuple[int, ...]) -> Pipeline:
    """Return the stages of a pipeline without its draw, after a ban of the ends until ``min_tokens``."""
    stages = pipeline[:-1] if isinstance(pipeline[-1], Draw) else pipeline
    start = int(bool(stages) and isinstance(stages[0], Combine))
    stages = (*stages[:start], MinTokens(min_tokens), *stages[start:])
    stages = tuple(stage for stage in stages if isinstance(stage, Tap) or not stage.neutral)
    return tuple(_replaced(stage, ends=end_ids) if getattr(stage, "ends", None) == () else stage for stage in stages)


def _without_seed(pipeline: Pipeline) -> tuple[Pipeline, int | None]:
    """Return a pipeline whose draw has no seed, and that seed."""
    *before, draw = pipeline
    seed: int | None = getattr(draw, "seed", None) if isinstance(draw, Draw) else None
    return (pipeline, None) if seed is None else ((*before, _replaced(draw, seed=None)), seed)


def _replaced(stage: Stage, **changes: object) -> Stage:
    changed: Stage = replace(stage, **changes)  # type: ignore[type-var]
    return changed


GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0, "top_k": 1, "top_p": 0, "top_h": 0, "draw": "greedy"})
"""Values that make a request greedy: those of a truncation with ``min_keep`` only while that keeps one token."""

MIROSTATS = {"mirostat_tau": Mirostat, "mirostat_v1_tau": MirostatV1}
"""The stages that control truncation alone, by the field that enables them."""

COMBINING: Mapping[str, float] = MappingProxyType({"guidance_scale": 1.0, "contrastive_beta": 0.0})
"""The fields that enable a Combine stage, of which a request has at most one, with their neutral values."""

DECISIVE = (*COMBINING, *MIROSTATS, *(*GREEDY, "min_keep", "order", "min_tokens", "max_tokens", "pipeline"))
"""The fields of a request that defaults can contradict."""


def _truncations() -> set[str]:
    """The fields of all truncation stages except mirostat, and without the one that they share."""
    kinds = [kind for kind in STAGES.values() if issubclass(kind, Floor | Prefix) and kind not in MIROSTATS.values()]
    fields = {parameter.name for kind in kinds for parameter in kind.parameters.values() if parameter.public}
    return fields - {"min_keep"}


def conflicts(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, str]:
    """The names of all defaults that contradict a request, each with what they contradict.

    defaults: all fields. request: the valid values of those fields of DECISIVE that the request sets.
    """
    if request.get("pipeline") is not None:
        return dict.fromkeys(replaced_fields(), "pipeline")
    found: dict[str, str] = {}
    if defaults["pipeline"] is not None and (replaced := request.keys() & {*replaced_fields()}):
        found["pipeline"] = ", ".join(sorted(replaced))
    keeps_more = request.get("min_keep", defaults["min_keep"]) > 1
    decisive = [name for name in GREEDY if not (keeps_more and name in ("top_p", "top_h"))]
    if mirostat := next((name for name in MIROSTATS if request.get(name)), None):
        greedy = {name for name, value in GREEDY.items() if defaults[name] == value}
        found |= dict.fromkeys({*_truncations(), *greedy, *MIROSTATS} - {mirostat}, mirostat)
    elif any(request.get(name) == GREEDY[name] for name in decisive):
        found |= dict.fromkeys(MIROSTATS, "greedy sampling")
    for name, neutral in COMBINING.items():
        if request.get(name, neutral) != neutral:
            found |= dict.fromkeys(COMBINING.keys() - {name}, name)
    if "order" in request:
        missing = set(REQUESTABLE) - set(stages_in(request["order"]))
        fields = [parameter.name for name in missing for parameter in STAGES[name].parameters.values()]
        found |= dict.fromkeys(fields, f"order {request['order']!r}")
    least, most = request.get("min_tokens"), request.get("max_tokens")
    if most is not None and least is None and defaults["min_tokens"] > most:
        found["min_tokens"] = "max_tokens"
    if least is not None and "max_tokens" not in request and (defaults["max_tokens"] or least) < least:
        found["max_tokens"] = "min_tokens"
    return found


ROW_FORMAT = 1
"""Version of the bytes of ``write_row``."""


def write_row(size: int, stages: Pipeline, seed: int, prompt: Any, output: Any) -> bytes:
    """A row of a ``Sampler`` as JSON. Raises ParameterError for stages that cannot be written."""
    for stage in stages:
        if STAGES.get(stage.name) is not type(stage):
            raise _error(f"{stage.name} cannot be saved: it is not registered, see register_stage")
        if any(isinstance(getattr(stage, attribute), WatermarkKey) for attribute in stage.parameters):
            raise _error(
                f"{stage.name} cannot be saved: its key is secret; add the row again, with output_ids and seed"
            )
    row = {"nucleate_row": ROW_FORMAT, "vocab_size": size, "seed": int(seed), "stages": pipeline_to_json(stages)}
    return json.dumps({**row, "prompt": [*map(int, prompt)], "output": [*map(int, output)]}).encode()


def read_row(data: Any, size: int) -> tuple[Pipeline, int, list[int], list[int]]:
    """Stages, seed, prompt and output from ``write_row``. Raises ParameterError."""
    row = read_json(bytes(data).decode("utf-8", "replace") if isinstance(data, bytes | bytearray) else data, "data")
    if not isinstance(row, dict) or row.get("nucleate_row") != ROW_FORMAT:
        raise ParameterError("data", f"data must be the bytes of Sampler.save, got {data!r:.60}")
    if row.get("vocab_size") != size:
        raise ParameterError("data", f"data is a row of a vocabulary of {row.get('vocab_size')} tokens, not of {size}")
    if not isinstance(row.get("stages"), list) or type(row.get("seed")) is not int:
        raise ParameterError("data", "data must be the bytes of Sampler.save: it has no stages, or no seed")
    stages = tuple(_stage(index, entry) for index, entry in enumerate(row["stages"]))
    return stages, row["seed"], row.get("prompt", []), row.get("output", [])
