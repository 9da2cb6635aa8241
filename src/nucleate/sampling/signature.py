"""Describes the pipelines of rows for a device, or gives the reason why the CPU must run one.

A pipeline signature is what rows must have in common to be sampled together as tensors. It is derived from the rules of
the stages. A ``DeviceRowSpec`` is a row: its leading Shifts, and the fused parameters or the signature of the others.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nucleate.sampling import maths
from nucleate.sampling.history import History
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.pipeline import FusedParams, has_constant_listing, to_fused_params
from nucleate.sampling.rules import (
    LINEAR,
    MAX_INTEGER,
    NUMERIC_TYPES,
    RuleInputs,
    StageStandIn,
    TracedNumber,
    bans_tokens,
    rule_inputs,
    rules_of_stage,
)
from nucleate.sampling.stage import (
    Ceiling,
    Draw,
    Pipeline,
    RowStats,
    SampledToken,
    Shift,
    Stage,
    Tap,
    min_keep_of,
    shape_of,
)
from nucleate.sampling.stages.constraints.bad_words import BadWords
from nucleate.sampling.stages.constraints.min_tokens import MinTokens
from nucleate.sampling.stages.penalties.dry import Dry
from nucleate.sampling.stages.penalties.no_repeat_ngram import NoRepeatNgram
from nucleate.sampling.stages.selection import Greedy, Gumbel
from nucleate.sampling.stages.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.stages.truncation.top_k import TopK
from nucleate.sampling.stages.truncation.top_n_sigma import TopNSigma
from nucleate.sampling.stages.truncation.top_p import TopP

FUSED_STAGES: Pipeline = (Temperature(0.5), TopNSigma(1.0), TopK(5), MinP(0.5), TopP(0.5), MinP(0.5), Temperature(0.5))
"""One stage for each field of FusedParams, in order."""
KEEP_ALL = 1.0, 1e30, 2.0**62, 0.0, float("inf"), 0.0, 1.0
"""Parameters with which each stage keeps all tokens: for rows without a stage that other rows of the batch have."""
NO_EFFECT, GREEDY = FusedParams(), FusedParams(k=1)
"""Parameters without an effect, and those of all greedy rows."""


class UnsupportedError(Exception):
    """A device cannot run a pipeline; the message is the reason."""


class RuleSignature(NamedTuple):
    """A rule of a stage, and what backends may assume about it."""

    name: str
    row: frozenset[str]  #: the row statistics that it reads
    is_one: bool  #: it returns 1 for every score
    is_softmax_weight: bool  #: it returns exp(x - row.top)
    is_linear: bool  #: it is linear and increasing in x; a Scale also maps the maximum to 0 and reads only ``top``
    below_top: bool  #: it returns a threshold that is not above the maximum score, and reads only ``top``


class StageSignature(NamedTuple):
    """The part of a stage that rows of a batch share. The values of its numeric parameters differ per row."""

    kind: type[Stage]
    shape: str
    rules: tuple[RuleSignature, ...]
    greedy: bool  #: see ``Stage.greedy``
    ties: bool  #: see ``Prefix.ties``
    switches: tuple[tuple[str, Any], ...]  #: attributes that are bool or None, with their values
    param_names: tuple[str, ...]  #: the numeric attributes that its rules read
    state_names: tuple[str, ...]  #: those of them that ``Stage.update`` changes
    logprobs_read: frozenset[str] = frozenset()  #: the fields of SampledToken that ``Stage.update`` reads


class PipelineSignature(NamedTuple):
    """The signature of a pipeline, with the parameters of one row."""

    signatures: tuple[StageSignature, ...]  #: one per stage; the last one is a Draw
    params: tuple[float, ...]  #: the numeric parameters of all stages, in order
    exempt_ids: tuple[tuple[int, ...], ...] = ()  #: of each Ceiling
    mask_before_tap: bool = False  #: whether a Tap that is the first stage reports the masked distribution
    request: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.request``; None without a Tap

    @property
    def stateful(self) -> bool:
        """Whether some stage has a state."""
        return any(signature.state_names for signature in self.signatures)

    def params_of(self, stages: Pipeline) -> tuple[float, ...]:
        """The parameters of the last stages of a pipeline, which have this signature."""
        return _params_of(stages[-len(self.signatures) :], self.signatures)


def _params_of(stages: Pipeline, signatures: tuple[StageSignature, ...]) -> tuple[float, ...]:
    pairs = zip(stages, signatures, strict=True)
    return tuple(float(getattr(stage, name)) for stage, signature in pairs for name in signature.param_names)


def pipeline_signature(stages: Pipeline, mask_before_tap: bool = False) -> PipelineSignature:
    """The signature of stages without Shifts. Raises UnsupportedError if tensors cannot run them."""
    signatures = tuple(map(_stage_signature, stages))
    exempt_ids = tuple(stage.exempt_ids for stage in stages if isinstance(stage, Ceiling))
    request = next((stage.request for stage in stages if isinstance(stage, Tap)), None)
    return PipelineSignature(signatures, _params_of(stages, signatures), exempt_ids, mask_before_tap, request)


def fused_signatures(rows: Sequence[Sequence[float]]) -> list[PipelineSignature]:
    """Signatures for rows of fused pipelines, equal but for the parameters: with all stages that any row uses.

    rows: FusedParams of each.
    """
    rows = [GREEDY if row[0] == 0 or row[2] == 1 else row for row in rows]
    if all(row is GREEDY for row in rows):
        return [PipelineSignature((_stage_signature(Greedy()),), ())] * len(rows)
    used = [i for i, unused in enumerate(NO_EFFECT) if any(row[i] != unused for row in rows)]
    signatures = tuple(_stage_signature(stage) for stage in (*(FUSED_STAGES[i] for i in used), Gumbel(0)))
    return [
        PipelineSignature(signatures, tuple(row[i] if row[i] != NO_EFFECT[i] else KEEP_ALL[i] for i in used))
        for row in rows
    ]


def with_state(stages: Pipeline, signatures: tuple[StageSignature, ...], params: list[float]) -> Pipeline:
    """The pipeline of a row with updated state. params: of the last stages, whose signatures are given."""
    found, values = list(stages), iter(params)
    for i, signature in enumerate(signatures, len(stages) - len(signatures)):
        own = {name: next(values) for name in signature.param_names}
        if any(getattr(found[i], name) != own[name] for name in signature.state_names):
            found[i] = dataclasses.replace(found[i], **{name: own[name] for name in signature.state_names})  # type: ignore[type-var]
    return tuple(found)


def _stage_signature(stage: Stage) -> StageSignature:
    kind, shape = type(stage), shape_of(stage)
    if shape == "Shift":
        raise UnsupportedError(f"{stage!r} comes after a stage that uses the whole row")
    if shape == "Transform":
        raise UnsupportedError(f"{stage!r} is computed on the CPU")
    has_state = kind.update is not Stage.update and not stage.neutral
    read, state_names, logprobs_read = _state_inputs(stage) if has_state else ((), (), frozenset[str]())
    rules = {} if stage.greedy and shape != "Draw" else rules_of_stage(stage)
    names = dict.fromkeys((*read, *(name for rule, one in rules.items() for name in _attributes_of(kind, rule, one))))
    if shape == "Ceiling":
        names["act_probability"] = None
    if min_keep_of(stage) > 1:
        names["min_keep"] = None
    switches, params = _attributes(stage, names)
    rule_signatures = tuple(_rule_signature(stage, shape, rule, inputs) for rule, inputs in rules.items())
    ties = bool(getattr(stage, "ties", False))
    shared = kind, shape, rule_signatures, stage.greedy, ties, switches, tuple(params), state_names
    return StageSignature(*shared, logprobs_read)


def _attributes_of(kind: type[Stage], rule: str, inputs: RuleInputs) -> tuple[str, ...]:
    """The names of the numeric attributes that a rule reads. Raises UnsupportedError."""
    why = unsupported_reason(getattr(kind, rule))
    if why or inputs.attributes is None:
        raise UnsupportedError(f"{kind.__name__}.{rule} {why or 'is not one expression of numbers'}")
    return inputs.attributes


def _attributes(stage: Stage, names: Iterable[str]) -> tuple[tuple[tuple[str, Any], ...], dict[str, float]]:
    """The named attributes that are bool or None, which rows of a batch share, and the numbers, which they do not."""
    values = {name: getattr(stage, name) for name in names}
    switches = {name: value for name, value in values.items() if isinstance(value, bool | None)}
    params = {name: value for name, value in values.items() if name not in switches}
    if any(isinstance(one, int) and abs(one) > MAX_INTEGER for one in params.values()):
        raise UnsupportedError(f"an integer of {stage.name} is too large")
    return tuple(switches.items()), params


def _rule_signature(stage: Stage, shape: str, name: str, inputs: RuleInputs) -> RuleSignature:
    row = RowStats(*(1.0,) * len(RowStats._fields))._replace(top=0.0)
    is_linear, alone = False, inputs.row <= {"top"}
    if (shape == "Draw" and name == "score") or (shape == "Scale" and alone and stage.monotone):  # type: ignore[attr-defined]
        second = 0.5 if shape == "Draw" else row  # the second argument of ``score`` is a uniform number
        if inputs.form == LINEAR:
            with np.errstate(all="ignore"):
                top, below = getattr(stage, name)(np.array([0.0, -1.0]), second).tolist()
            is_linear = below < top and (shape == "Draw" or top == 0)
    below_top = name == "floor" and alone and inputs.attributes is not None and bool(stage.floor(row) <= 0)  # type: ignore[attr-defined]
    return RuleSignature(name, inputs.row, inputs.is_one, inputs.is_softmax_weight, is_linear, below_top)


def _state_inputs(stage: Stage) -> tuple[tuple[str, ...], tuple[str, ...], frozenset[str]]:
    """The attributes that ``Stage.update`` reads or changes, those that it changes, and the token fields it reads.

    Raises UnsupportedError if tensors cannot run it.
    """
    function: Any = type(stage).update
    rule_name = f"{type(stage).__name__}.update"
    why = unsupported_reason(function, dataclasses.replace)
    if why:
        raise UnsupportedError(f"{rule_name} {why}")
    stand_in = StageStandIn(stage)
    try:
        changes = function(stand_in, SampledToken(*[TracedNumber(frozenset((name,))) for name in SampledToken._fields]))  # type: ignore[arg-type]
        read = {**dict.fromkeys(stand_in._attributes_read), **dict.fromkeys(changes)}  # noqa: SLF001
    except Exception:  # noqa: BLE001  # a rule may do anything
        raise UnsupportedError(f"{rule_name} is not one expression of numbers") from None
    fixed = any(getattr(type(stage), name) is not getattr(Stage, name) for name in ("greedy", "neutral"))
    if fixed or shape_of(stage) == "Ceiling" or any(type(getattr(stage, name)) is not float for name in changes):
        raise UnsupportedError(f"{rule_name} may change more than numbers")
    logprobs_read = frozenset[str]().union(*(one.row for one in changes.values() if isinstance(one, TracedNumber)))
    return tuple(read), tuple(changes), logprobs_read


def unsupported_reason(function: Any, *known: Any) -> str:
    """Why tensors cannot run a rule; "" if they can. The rule may use numbers, ``maths`` and other rules."""
    for name, value in _global_names(function):
        if (
            isinstance(value, NUMERIC_TYPES)
            or value in (abs, *known)
            or getattr(value, "__module__", "") == maths.__name__
        ):
            continue
        if not isinstance(value, types.FunctionType):
            return f"names {name}, which is not in nucleate.sampling.maths"
        if why := unsupported_reason(value, *known, function):
            return why
    return ""


def _global_names(function: Any) -> Iterator[tuple[str, Any]]:
    """The global and closure names that a function loads: (name, value)."""
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        for name in dict.fromkeys(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"):
            yield name, function.__globals__.get(name, getattr(builtins, name, None))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name, cell.cell_contents


COUNTS = {"prompt_count", "output_count"}

CONSTANT, MIN_TOKENS, BAD_WORDS, NGRAM, DRY = "constant", "min_tokens", "bad_words", "ngram", "dry"
"""How a device computes the list of a Shift. CONSTANT: it is the same in every step. MIN_TOKENS: ids that are banned
until the output has a minimum length. BAD_WORDS: last tokens of words whose other tokens end the output. NGRAM: tokens
that would complete an earlier n-gram. DRY: tokens that would extend a repetition."""


class DeviceShift(NamedTuple):
    """A Shift for a device. Rows whose Shifts have the same ``group_key`` are computed together."""

    kind: type[Shift]
    touches: str  #: "seen", "output" or "listed"
    window: int | None
    uses_counts: bool  #: whether it reads token counts
    source: str  #: of its list, see CONSTANT; "" if it has none
    switches: tuple[tuple[str, Any], ...]  #: attributes that are bool or None, with their values
    param_names: tuple[str, ...]  #: the numeric attributes that its rule reads
    params: tuple[float, ...] = ()  #: their values
    list_params: tuple[float, ...] = ()  #: the parameters that its list depends on
    listing: Mapping[int, float] = {}  #: CONSTANT: its list; MIN_TOKENS: the banned ids
    words: tuple[tuple[int, ...], ...] = ()  #: BAD_WORDS: the words; DRY: the sequence breakers

    @property
    def group_key(self) -> tuple[Any, ...]:
        """The fields before ``params``."""
        return self[: self._fields.index("params")]

    @property
    def tracks_repeats(self) -> bool:
        """Whether it depends on repetitions of earlier tokens."""
        return self.source in (NGRAM, DRY)

    @property
    def history_length(self) -> float:
        """The number of last tokens that it reads; inf for all."""
        spans: list[float] = [len(word) for word in self.words]
        if self.uses_counts:
            spans.append(math.inf if self.window is None or self.window < 0 else self.window)
        if self.tracks_repeats:
            last_n = self.list_params[-1] if self.source == DRY else -1.0
            spans.append(math.inf if last_n < 0 else last_n)
        return max(spans, default=0)


class DeviceRowSpec(NamedTuple):
    """The pipeline of a row on a device."""

    params: Sequence[float]  #: see ``fused_pipeline.FusedParams``
    shifts: tuple[DeviceShift, ...] = ()  #: the leading Shifts, in order
    allowed_ids: frozenset[int] | None = None  #: the only tokens that may be sampled; None: all
    request: tuple[int, tuple[int, ...]] | None = None  #: see ``Tap.request``, for raw logprobs; None: not reported
    signature: PipelineSignature | None = None  #: of the stages after the Shifts; None: ``params`` describe them

    @property
    def history_length(self) -> float:
        """The number of last tokens that its Shifts read; inf for all."""
        return max((shift.history_length for shift in self.shifts), default=0)


def device_row_spec(stages: Pipeline, vocab_size: int | None) -> DeviceRowSpec | str:
    """Describe a row with these stages for a device; or return the reason why the CPU must run it.

    vocab_size: V; None if it is not known.
    """
    try:
        return _row_spec(stages, vocab_size)
    except UnsupportedError as error:
        return str(error)


def _row_spec(stages: Pipeline, vocab_size: int | None) -> DeviceRowSpec:
    if isinstance(stages[-1], Draw) and stages[-1].keyed:
        raise UnsupportedError(f"the noise of {stages[-1]!r} depends on the history")
    tap = stages[0] if isinstance(stages[0], Tap) else None
    start = int(tap is not None)
    end = next(i for i, stage in enumerate(stages) if i >= start and not isinstance(stage, Shift))
    shifts = [stage for stage in stages[start:end] if isinstance(stage, Shift)]
    if tap is not None and not shifts and isinstance(stages[start], Tap):
        raise UnsupportedError(f"{stages[start]!r} is the second of its kind")
    row = shifts_spec(shifts)._replace(request=tap.request if tap else None)
    ids = [*(row.allowed_ids or ()), *(token for shift in row.shifts for token in _token_ids(shift))]
    if vocab_size is not None and not 0 <= (largest_id := max(ids, default=0)) < vocab_size:
        raise UnsupportedError(f"it names token {largest_id}")
    params = to_fused_params(stages[end:])
    if isinstance(params, FusedParams):
        return row._replace(params=params._replace(k=min(params.k, vocab_size or params.k)))
    mask_before_tap = any(shift.touches == "masked" for shift in shifts)
    return row._replace(signature=pipeline_signature(stages[end:], mask_before_tap))


def shifts_spec(shifts: Sequence[Shift]) -> DeviceRowSpec:
    """Describe a row with these Shifts only. Raises UnsupportedError."""
    row = DeviceRowSpec(FusedParams())
    for shift in shifts:
        if shift.touches == "masked" and bans_tokens(shift):  # the step's bitmask is applied after all Shifts
            continue
        if shift.touches == "unlisted" and bans_tokens(shift) and has_constant_listing(shift):
            listed = frozenset(shift.listing(History()))
            row = row._replace(allowed_ids=listed if row.allowed_ids is None else row.allowed_ids & listed)
            continue
        if isinstance(shift, Dry) and any(issubclass(one.kind, Dry) for one in row.shifts):
            raise UnsupportedError(f"{shift!r} is the second of its kind")
        row = row._replace(shifts=(*row.shifts, _convert_shift(shift)))
    return row


def _convert_shift(shift: Shift) -> DeviceShift:
    match shift:
        case MinTokens(n, ends):
            return _device_shift(shift, MIN_TOKENS, (n,), dict.fromkeys(ends, -INFINITY))
        case NoRepeatNgram(n):
            return _device_shift(shift, NGRAM, (n,))
        case BadWords(words):  # text has been encoded; otherwise reading the list raises
            return _device_shift(shift, BAD_WORDS, words=words)
        case Dry(multiplier, base, allowed_length, breakers, last_n):
            list_params = multiplier, base, shift.max_exponent, allowed_length, last_n
            return _device_shift(shift, DRY, list_params, words=breakers or ())
    if shift.touches in ("seen", "output"):
        return _device_shift(shift)
    if shift.touches != "listed":
        raise UnsupportedError(f"{shift!r} has a rule that cannot run on a device")
    if not has_constant_listing(shift):
        raise UnsupportedError(f"{shift!r} depends on the history")
    listing = shift.listing(History())
    if any(math.isnan(value) or value == INFINITY for value in listing.values()):
        raise UnsupportedError(f"{shift!r} adds NaN or +inf")
    return _device_shift(shift, CONSTANT, listing=listing)


def _token_ids(shift: DeviceShift) -> list[int]:
    """The token ids in the parameters of a Shift."""
    return [*shift.listing, *(word[-1] for word in shift.words if shift.source == BAD_WORDS)]


def _device_shift(
    shift: Shift,
    source: str = "",
    list_params: Sequence[float] = (),
    listing: Mapping[int, float] | None = None,
    words: Sequence[str | tuple[int, ...]] = (),
) -> DeviceShift:
    kind = type(shift)
    switches, params = _attributes(shift, _attributes_of(kind, "apply", rule_inputs(shift, "apply")))
    uses_counts = shift.touches != "listed" or bool(COUNTS & {*kind.apply.__code__.co_names})
    window = shift.window if shift.window is None else max(-1, min(shift.window, MAX_INTEGER))
    group_key = kind, shift.touches, window, uses_counts, source, switches, tuple(params)
    given = tuple(map(float, params.values())), tuple(map(float, list_params))
    return DeviceShift(*group_key, *given, listing or {}, tuple(word for word in words if isinstance(word, tuple)))
