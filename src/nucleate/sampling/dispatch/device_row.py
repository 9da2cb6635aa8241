"""Describes a row for a device: its leading Shifts and the stages after them. Or the reason why the CPU must run it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.sampling.dispatch.fused_pipeline import FusedParams, has_constant_listing, to_fused_params
from nucleate.sampling.dispatch.rules import MAX_INTEGER, bans_tokens, rule_inputs
from nucleate.sampling.dispatch.signature import PipelineSignature, pipeline_signature, unsupported_reason
from nucleate.sampling.history import History
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import Draw, Pipeline, Shift, Tap
from nucleate.sampling.stages.constraints.bad_words import BadWords
from nucleate.sampling.stages.constraints.min_tokens import MinTokens
from nucleate.sampling.stages.penalties.dry import Dry
from nucleate.sampling.stages.penalties.no_repeat_ngram import NoRepeatNgram

TokenSequences = tuple[tuple[int, ...], ...]
"""Sequences of token ids."""

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
    words: TokenSequences = ()  #: BAD_WORDS: the words; DRY: the sequence breakers

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

    @property
    def tracks_repeats(self) -> bool:
        """Whether it depends on repetitions of earlier tokens."""
        return any(shift.tracks_repeats for shift in self.shifts)


def device_row_spec(stages: Pipeline, vocab_size: int | None) -> DeviceRowSpec | str:
    """Describe a row with these stages for a device; or return the reason why the CPU must run it.

    vocab_size: V; None if it is not known.
    """
    if isinstance(stages[-1], Draw) and stages[-1].keyed:
        return f"the noise of {stages[-1]!r} depends on the history"
    tap = stages[0] if isinstance(stages[0], Tap) else None
    start = int(tap is not None)
    end = next(i for i, stage in enumerate(stages) if i >= start and not isinstance(stage, Shift))
    shifts = [stage for stage in stages[start:end] if isinstance(stage, Shift)]
    if tap is not None and not shifts and isinstance(stages[start], Tap):
        return f"{stages[start]!r} is the second of its kind"
    row = shifts_spec(shifts)
    if isinstance(row, str):
        return row
    largest_id = max(
        (*(row.allowed_ids or ()), *(max(_token_ids(shift), default=0) for shift in row.shifts)), default=0
    )
    if vocab_size is not None and not 0 <= largest_id < vocab_size:
        return f"it names token {largest_id}"
    row = row._replace(request=tap.request if tap else None)
    params = to_fused_params(stages[end:])
    if isinstance(params, FusedParams):
        return row._replace(params=params._replace(k=min(params.k, vocab_size or params.k)))
    signature = pipeline_signature(stages[end:], mask_before_tap=any(shift.touches == "masked" for shift in shifts))
    return signature if isinstance(signature, str) else row._replace(signature=signature)


def shifts_spec(shifts: Sequence[Shift]) -> DeviceRowSpec | str:
    """Describe a row with these Shifts only; or return the reason why the CPU must run it."""
    row = DeviceRowSpec(FusedParams())
    for shift in shifts:
        if shift.touches == "masked" and bans_tokens(shift):  # the step's bitmask is applied after all Shifts
            continue
        if shift.touches == "unlisted" and bans_tokens(shift) and has_constant_listing(shift):
            listed = frozenset(shift.listing(History()))
            row = row._replace(allowed_ids=listed if row.allowed_ids is None else row.allowed_ids & listed)
            continue
        if isinstance(shift, Dry) and any(issubclass(one.kind, Dry) for one in row.shifts):
            return f"{shift!r} is the second of its kind"
        one = _convert_shift(shift)
        if isinstance(one, str):
            return one
        row = row._replace(shifts=(*row.shifts, one))
    return row


def _convert_shift(shift: Shift) -> DeviceShift | str:
    """Convert a Shift for a device; or return why that is not possible."""
    converted: DeviceShift | str = f"{shift!r} has a rule that cannot run on a device"
    match shift:
        case MinTokens(n, ends):
            converted = make_device_shift(shift, MIN_TOKENS, (n,), dict.fromkeys(ends, -INFINITY))
        case NoRepeatNgram(n):
            converted = make_device_shift(shift, NGRAM, (n,))
        case BadWords(words):  # text has been encoded; otherwise reading the list raises
            converted = make_device_shift(shift, BAD_WORDS, words=words)
        case Dry(multiplier, base, allowed_length, breakers, last_n):
            list_params = multiplier, base, shift.max_exponent, allowed_length, last_n
            converted = make_device_shift(shift, DRY, list_params, words=breakers or ())
        case _ if shift.touches in ("seen", "output"):
            converted = make_device_shift(shift)
        case _ if shift.touches == "listed":
            converted = _constant_list_shift(shift)
    return converted


def _constant_list_shift(shift: Shift) -> DeviceShift | str:
    """Convert a Shift whose list does not depend on the history."""
    if not has_constant_listing(shift):
        return f"{shift!r} depends on the history"
    listing = shift.listing(History())
    if any(math.isnan(value) or value == INFINITY for value in listing.values()):
        return f"{shift!r} adds NaN or +inf"
    return make_device_shift(shift, CONSTANT, listing=listing)


def _token_ids(shift: DeviceShift) -> list[int]:
    """The token ids in the parameters of a Shift."""
    return [*shift.listing, *(word[-1] for word in shift.words if shift.source == BAD_WORDS)]


def make_device_shift(
    shift: Shift,
    source: str = "",
    list_params: Sequence[float] = (),
    listing: Mapping[int, float] | None = None,
    words: Sequence[str | tuple[int, ...]] = (),
) -> DeviceShift | str:
    """Build the DeviceShift of a Shift; or return why that is not possible."""
    kind, inputs = type(shift), rule_inputs(shift, "apply")
    why = unsupported_reason(kind.apply)
    if why or inputs.attributes is None:
        return f"{kind.__name__}.apply {why or 'is not one expression of numbers'}"
    values = {name: getattr(shift, name) for name in inputs.attributes}
    switches = {name: value for name, value in values.items() if isinstance(value, bool | None)}
    params = {name: value for name, value in values.items() if name not in switches}
    if any(isinstance(one, int) and abs(one) > MAX_INTEGER for one in params.values()):
        return f"{shift!r} has an integer that is too large"
    uses_counts = shift.touches != "listed" or bool(COUNTS & {*kind.apply.__code__.co_names})
    window = shift.window if shift.window is None else max(-1, min(shift.window, MAX_INTEGER))
    group_key = kind, shift.touches, window, uses_counts, source, tuple(switches.items()), tuple(params)
    given = tuple(map(float, params.values())), tuple(map(float, list_params))
    return DeviceShift(*group_key, *given, listing or {}, tuple(word for word in words if isinstance(word, tuple)))
