"""Checks the properties that every stage should have, on random rows: what ``nucleate stages --check`` runs.

The checked examples of a stage are generated from its declared parameters.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.parameters.converters import one_line, shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, ParameterError
from nucleate.sampling import reference
from nucleate.sampling.companion import combine
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Ceiling, Combine, Draw, Floor, History, Pipeline, Prefix, Scale, Shift, Stage
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.stages.temperature import Temperature
from nucleate.sampling.stages.truncation.min_p import MinP
from nucleate.sampling.watermark_key import WatermarkKey

SEED = 99
STEPS = range(3)
PROMPT, OUTPUT = (0, 1, 1, 5, 7), (7, 7, 2, 1)
HISTORY = History(PROMPT, OUTPUT)
USES_ZERO = {"encoder_repetition", "repetition"}
"""Stages that depend on the sign of a score, as in other engines: for them a constant matters."""
SURROUNDINGS: tuple[tuple[Pipeline, Pipeline], ...] = (
    ((), ()),
    ((), (Temperature(1.5), MinP(0.02))),
    ((Temperature(0.7),), (MinP(0.02),)),
    ((MinP(0.05),), (Temperature(3.0),)),
)
"""Stages before and after the checked one."""


class Property(NamedTuple):
    """The result of a check. holds: None if it does not apply. detail: the first case in which it does not hold."""

    name: str
    holds: bool | None
    detail: str = ""


@with_suggestions
def check_stage(kind: type[Stage], names: Iterable[str] | None = None) -> list[Property]:
    """Check properties of a stage. kind: its class. names: keys of CHECKS; None: all. Takes a few seconds."""
    return [_checked(name, CHECKS[name], kind) for name in (CHECKS if names is None else names)]


def _checked(name: str, check: Callable[[type[Stage]], Iterator[str | None]], kind: type[Stage]) -> Property:
    """Run a check, which yields None per case that holds, and otherwise what does not."""
    applies = False
    try:
        for problem in check(kind):
            if problem is not None:
                return Property(name, holds=False, detail=problem)
            applies = True
    except Exception as error:  # noqa: BLE001 - the rule is not ours
        return Property(name, holds=False, detail=f"{type(error).__name__}: {one_line(error)}")
    return Property(name, True if applies else None)


def _pipelines(stages: Iterable[Stage]) -> Iterator[tuple[Stage, Pipeline]]:
    """Each stage, and it among others, with a draw at the end."""
    for stage, (before, after) in itertools.product(stages, SURROUNDINGS):
        # a Combine is first; GPUs run a Shift only before stages that read the whole row
        if not before or not isinstance(stage, Combine | Shift):
            yield stage, (*before, stage) if isinstance(stage, Draw) else (*before, stage, *after, Gumbel(SEED))


def _probabilities(logits: NDArray[np.float32], pipeline: Pipeline) -> NDArray[np.float64] | str:
    """The distribution of a row by the reference, without simplifying the pipeline; or the error of the row."""
    stage, *others = pipeline
    if isinstance(stage, Combine) and not stage.neutral:
        logits, pipeline = combine(stage, logits, _companions(logits[None])[0]), tuple(others)
    try:
        return reference.probabilities(logits, pipeline, HISTORY)
    except reference.RowError as error:
        return str(error)


def _companions(logits_BV: NDArray[np.float32]) -> NDArray[np.float32]:
    """The logits of companions, for a Combine."""
    return np.asarray(logits_BV[:, ::-1] / 2, np.float32)


def _neutral(kind: type[Stage]) -> Iterator[str | None]:
    stages = neutrals(kind) if any(p.is_neutral(p.default) for p in kind.parameters.values()) else ()
    for (stage, pipeline), logits in itertools.product(_pipelines(stages), rows()):
        without = tuple(one for one in pipeline if one is not stage)
        same = _equal(_probabilities(logits, pipeline), _probabilities(logits, without), 0.0)
        yield None if same else f"{stage!r} changes probabilities"


def _distribution(kind: type[Stage]) -> Iterator[str | None]:
    for (stage, pipeline), logits in itertools.product(_pipelines(examples(kind)), rows()):
        p_V = _probabilities(logits, pipeline)
        if isinstance(p_V, str):
            yield None if issubclass(kind, Combine | Shift) else f"{stage!r}: {p_V}"
        else:
            valid = abs(p_V.sum() - 1) < 1e-9 and (p_V >= 0).all() and not p_V[np.isneginf(logits)].any()
            yield None if valid else f"{stage!r}: {shown(p_V.tolist())}"


def _truncation(kind: type[Stage]) -> Iterator[str | None]:
    stages = examples(kind) if issubclass(kind, Floor | Prefix | Ceiling) else ()
    for stage, logits in itertools.product(stages, rows()):
        before = reference.survivors(logits, (), HISTORY).ids_N.tolist()
        kept = reference.survivors(logits, (stage,), HISTORY, u=0.3).ids_N.tolist()
        yield None if kept and set(kept) <= set(before) else f"{stage!r} keeps {kept}"


def _order(kind: type[Stage]) -> Iterator[str | None]:
    stages = examples(kind) if issubclass(kind, Scale) and kind.monotone else ()
    for stage, logits in itertools.product(stages, rows()):
        order = reference.survivors(logits, (), HISTORY).ids_N
        kept, x_N = reference.survivors(logits, (stage,), HISTORY)[:2]
        ordered = (kept == order[: len(kept)]).all() and (np.diff(x_N) <= 0).all()
        yield None if ordered else f"{stage!r} changes the order of tokens; set monotone = False"


def _constant(kind: type[Stage]) -> Iterator[str | None]:
    rounds = issubclass(kind, Shift) and kind.touches == "all"  # to float32
    tolerance = 1e-4 if issubclass(kind, Combine) else 1e-5 if rounds else 1e-12  # a Combine has float32
    for stage, logits in itertools.product(examples(kind) if kind.name not in USES_ZERO else (), rows()):
        pipeline = (stage,) if isinstance(stage, Draw) else (stage, Gumbel(SEED))
        one, other = _probabilities(logits, pipeline), _probabilities(logits + np.float32(17), pipeline)
        yield None if _equal(one, other, tolerance) else f"{stage!r} depends on a constant added to all logits"


def _equal(one: NDArray[np.float64] | str, other: NDArray[np.float64] | str, tolerance: float) -> bool:
    """Whether two distributions, or the errors of their rows, are equal."""
    texts = isinstance(one, str) or isinstance(other, str)
    return one == other if texts else bool(np.allclose(one, other, 0, tolerance))


def _batch(kind: type[Stage]) -> Iterator[str | None]:
    logits_BV = rows(count=4)
    for stage, pipeline in _pipelines(examples(kind, most=4)):
        alone = [_tokens(logits_V[None], pipeline, "auto")[0] for logits_V in logits_BV]
        together = _tokens(logits_BV[::-1], pipeline, "auto")
        yield None if together == alone[::-1] else f"{stage!r} gives other tokens in a batch"


def _backends(backend: str) -> Callable[[type[Stage]], Iterator[str | None]]:
    def check(kind: type[Stage]) -> Iterator[str | None]:
        logits_BV = rows(count=6)
        for stage, pipeline in _pipelines(examples(kind)):
            one, other = _tokens(logits_BV, pipeline, "reference"), _tokens(logits_BV, pipeline, backend)
            yield None if one == other else f"{stage!r}: {shown(other)} instead of {shown(one)}"

    return check


def _tokens(logits_BV: NDArray[np.float32], pipeline: Pipeline, backend: str) -> list[list[int | str]]:
    """The tokens of some steps of each row, with the state of stages updated; or the error of the row."""
    sampler = Sampler(SIZE, backend)
    numbers = [sampler.add(pipeline, PROMPT, output_ids=OUTPUT, seed=SEED) for _ in logits_BV]
    found: list[list[int | str]] = [[] for _ in numbers]
    for step in STEPS:
        rolled_BV = np.roll(logits_BV, step, axis=1)
        output = sampler(rolled_BV, companion=_companions(rolled_BV))
        for row, token in enumerate(output.token_ids.tolist()):
            found[row].append(output.errors.get(row, token))
    return found


CHECKS: dict[str, Callable[[type[Stage]], Iterator[str | None]]] = {
    "a neutral stage changes nothing, bit for bit": _neutral,
    "the result is a distribution, and masked tokens stay masked": _distribution,
    "a truncation keeps a part of the tokens, at least one": _truncation,
    "a monotone scale keeps the order of the tokens": _order,
    "a constant added to all logits changes nothing": _constant,
    "a row does not depend on the other rows of its batch": _batch,
    "the CPU backend gives the tokens of the reference": _backends("cpu"),
}
"""The properties by name."""
if importlib.util.find_spec("torch"):
    CHECKS["the torch backend gives the tokens of the reference"] = _backends("torch")


SIZE = 40
"""The vocabulary size of the examples: the token ids in them are below it."""

FAR = 1000.0
"""Bounds farther away than this are examples of their own: those between them would all be large."""


def inside(parameter: Parameter, text: bool = False) -> list[Any]:
    """Valid values of a parameter, with its bounds. text: include text values, which need a tokenizer."""
    if parameter.choices:
        names = list(parameter.choices)
        return names if parameter.kind == "str" else [*names, (), ("top_p", "temperature"), ["xtc"]]
    if parameter.kind == "float":
        low = -3.0 if parameter.low is None or parameter.low < -FAR else parameter.low
        high = low + 4.0 if parameter.high is None or parameter.high > FAR else parameter.high
        values = [low + (high - low) * part for part in (0.0, 0.001, 0.05, 0.3, 0.5, 0.9, 0.999, 1.0)]
        values += [bound for bound in (parameter.low, parameter.high) if bound is not None and abs(bound) > FAR]
        return values[1:] if parameter.open_low else values
    if parameter.kind == "int":
        low = 0 if parameter.low is None else int(parameter.low)
        return [low, low + 1, low + 2, low + 5, low + SIZE, 10**6 if parameter.high is None else int(parameter.high)]
    words = [(), ((1,),), ((7, 2, 1), (2, 1, 5)), ((1, 1), (7,), (1, 0), (1, 1)), ((SIZE - 1,) * 70,)]
    examples: dict[str, list[Any]] = {
        "bool": [False, True],
        "tuple[int, ...]": [(), (0,), (3, 1, 3), tuple(range(0, SIZE, 2))],
        "str | tuple[int, ...]": [(), (3,), (0, 7, 7), *(["a b"] if text else [])],
        "tuple[str, ...]": [(), ("a",), ("a", "bc")],
        "tuple[str | tuple[int, ...], ...]": [*words, *([("a", (3, 1)), ("b c",)] if text else [])],
        "Mapping[int, float]": [{}, {0: 1.5}, {3: -2.0, 7: 0.25, SIZE - 1: 30.0}],
        "StructuredOutputs": [{"regex": "a"}, {"json_schema": {"b": {}, "a": 1}, "on_unsupported": "ignore"}],
        "WatermarkKey": [WatermarkKey(b"a key for examples")],
        "tuple[Stage, ...]": [[{"stage": "temperature", "t": 0.5}], "top_k(3) | greedy"],
    }
    return examples[parameter.kind]


def every(parameter: Parameter, text: bool = False) -> list[Any]:
    """The same, with None and the values that disable the stage."""
    return [*inside(parameter, text), *parameter.off, *([None] if parameter.optional else [])]


@functools.cache
def examples(kind: type[Stage], most: int = 10, text: bool = False) -> tuple[Stage, ...]:
    """Distinct stages of a kind: every valid value of each parameter, in many combinations."""
    numbers = random.Random(kind.name)
    decks: dict[str, list[Any]] = {attribute: [] for attribute in kind.parameters}
    made: dict[Stage, None] = {}
    for _ in range(4 * most):
        for attribute, deck in decks.items():
            if not deck:  # each value once per round
                deck += every(kind.parameters[attribute], text)
                numbers.shuffle(deck)
        made.update(dict.fromkeys(valid(kind, {attribute: deck.pop() for attribute, deck in decks.items()})))
        if len(made) == most:
            break
    return tuple(made)


def valid(kind: type[Stage], values: Mapping[str, Any]) -> list[Stage]:
    """A list with the stage of these values; empty if they are contradictory."""
    try:
        return [kind(**values)]
    except ParameterError:
        return []


@functools.cache
def neutrals(kind: type[Stage]) -> tuple[Stage, ...]:
    """Disabled stages of a kind, with all neutral values and many values of the other parameters."""
    switches = {a: p for a, p in kind.parameters.items() if p.neutral is not MISSING}
    others = {a: p for a, p in kind.parameters.items() if a not in switches}
    values = itertools.product(*([p.neutral, *p.off] for p in switches.values()))
    offs = [dict(zip(switches, one, strict=True)) for one in values]
    rest: list[dict[str, Any]] = [{}, *({a: value} for a, p in others.items() for value in every(p))]
    return tuple(stage for off in offs for more in rest for stage in valid(kind, {**off, **more}))


def rows(seed: int = 0, count: int = 3, size: int = SIZE) -> NDArray[np.float32]:
    """Logits on a grid of eighths (so that sums with whole numbers are exact), with ties, some with holes at -inf."""
    numbers = np.random.default_rng(seed)
    x = np.round(numbers.normal(size=(count, size)) * 24) / 8
    x[1::3] = np.round(x[1::3])
    x[2::3][numbers.random(x[2::3].shape) < 0.3] = -np.inf
    x[:, 1] = 2.0
    return x.astype(np.float32)
