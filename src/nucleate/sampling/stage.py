"""The shapes of stages. A stage is an immutable value; its rule is one expression over the functions in ``maths``.

A rule reads only its own parameters, a score, a token and the statistics of its row, so it runs on every backend.

Suffixes of array names give their dimensions: B rows of a batch, V vocabulary ids, N surviving tokens, K listed tokens.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, dataclass_transform

from nucleate.parameters.parameter import Parameter, declared
from nucleate.parameters.parameter import param as param  # noqa: PLC0414
from nucleate.sampling.history import History as History  # noqa: PLC0414  # stages import it from here

Scores = Any
"""Scores or numbers as the backend represents them: NumPy arrays or tensors."""


class RowStats(NamedTuple):
    """Statistics of the surviving tokens of one row."""

    n: Scores  #: number of tokens
    top: Scores  #: maximum score
    mass: Scores  #: sum of exp(x - top), the partition function
    square: Scores  #: sum of exp(x - top) ** 2
    entropy: Scores  #: -sum of p log p, in nats
    mean: Scores  #: mean score
    var: Scores  #: population variance of the scores
    whole: Scores  #: the mass before the first truncation since the last Shift or Scale: at least ``mass``


class TokenInfo(NamedTuple):
    """What the rule of a Shift reads of a token."""

    id: Scores
    prompt_count: Scores  #: occurrences in the prompt
    output_count: Scores  #: occurrences in the output so far
    listed: Scores  #: its value in the stage's own list, 0 if it is not listed


class DrawnToken(NamedTuple):
    """The sampled token of a step, for stateful stages: its log-probability before and after the stage."""

    id: int
    before: float
    after: float


class TextEncoder(Protocol):
    """Encodes text in the parameters of stages: a tokenizer."""

    def spellings(self, word: str) -> Iterable[tuple[int, ...]]:
        """The token ids of a word, at the beginning of a text and after a space."""

    def containing(self, text: str) -> Iterable[int]:
        """All tokens whose text contains this text."""


class IncrementalListing(Protocol):
    """The list of a Shift, updated token by token."""

    def push(self, token: int) -> None:
        """Append a token to the history."""

    def listing(self) -> Mapping[int, float]:
        """The same as ``Shift.listing`` for the history so far."""


@dataclass_transform(frozen_default=True, field_specifiers=(param,))
class Stage(ABC):  # noqa: B024  # its rule is of its shape
    """A step of a pipeline. To define one, subclass a shape, declare parameters with ``param`` and write the rule.

    ``rank`` is the position in the canonical order. The first line of the docstring is the help text.
    """

    rank: ClassVar[int] = 0
    name: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    _switches: ClassVar[list[tuple[str, Parameter]]] = []  # the parameters that enable it

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        cls.parameters = declared(cls, prefix=cls.name)
        cls._switches = [(a, p) for a, p in cls.parameters.items() if p.neutral is not dataclasses.MISSING]
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        others = {field.name for field in dataclasses.fields(cls)} - cls.parameters.keys()  # type: ignore[arg-type]
        if others:
            raise TypeError(
                f"{cls.__name__}: {', '.join(sorted(others))} must be declared in its own body with param(...), "
                "or be a ClassVar; a stage with parameters is final"
            )

    def __post_init__(self) -> None:
        for attribute, parameter in self.parameters.items():
            object.__setattr__(self, attribute, parameter.check(getattr(self, attribute)))
        self.verify()

    def verify(self) -> None:  # noqa: B027  # most have nothing to verify
        """Raise ParameterError for parameters that contradict each other."""

    def spell(self, speller: TextEncoder) -> Self:
        """The same stage with text in its parameters encoded as token ids."""
        return self

    def after(self, drawn: DrawnToken) -> Self:
        """The stage for the next step. The state of a stateful stage is one of its parameters."""
        return self

    @property
    def neutral(self) -> bool:
        """Whether the stage has no effect, so that it can be removed from a pipeline."""
        switches = self._switches
        return bool(switches) and all(p.is_neutral(getattr(self, a)) for a, p in switches)

    @property
    def greedy(self) -> bool:
        """Whether the stage keeps only the first token of the ranking, regardless of its rule."""
        return False

    def __repr__(self) -> str:
        values = {a: getattr(self, a) for a, p in self.parameters.items() if getattr(self, a) != p.default}
        if values and list(values) == list(self.parameters)[:1]:
            shown = repr(*values.values())
        else:
            shown = ", ".join(f"{attribute}={value!r}" for attribute, value in values.items())
        return f"{type(self).__name__}({shown})"


class Shift(Stage):
    """apply(self, x, token) -> x: changes the scores of some tokens."""

    touches: ClassVar[Literal["seen", "output", "listed", "unlisted", "masked"]]
    """The tokens that the rule changes: those in prompt or output ("seen"), in the output, in the stage's list, not in
    its list, or those that the bitmask of the step forbids ("masked")."""

    @abstractmethod
    def apply(self, x: Scores, token: TokenInfo) -> Scores: ...

    @property
    def window(self) -> int | None:
        """None, or n: the stage counts the last n tokens of prompt and output (-1: all), all of them as output."""
        return None

    def listing(self, history: History) -> Mapping[int, float]:
        """The stage's list for this step, ``{token id: value}``. For "listed" and "unlisted"; computed on the host."""
        return {}

    def follow(self, history: History) -> IncrementalListing | None:
        """An incremental form of ``listing``, whose cost per token does not grow with the history.

        None if the cost of ``listing`` itself does not grow.
        """
        return None


class Scale(Stage):
    """apply(self, x, row) -> x: transforms all scores. If monotone, the ranking stays, even of equal results."""

    monotone: ClassVar[bool] = True

    @abstractmethod
    def apply(self, x: Scores, row: RowStats) -> Scores: ...


class Floor(Stage):
    """floor(self, row) -> threshold: keeps the tokens whose score is at or above it."""

    @abstractmethod
    def floor(self, row: RowStats) -> Scores: ...


class Prefix(Stage):
    """weight(self, x, row), target(self, row): keeps the shortest prefix of the ranking whose weights reach the target.

    The ranking is by score, descending, or by ``order(self, x, row)``, ascending; equal values keep their order.
    """

    reaches: ClassVar[bool] = True
    """Whether to keep the token that reaches the target. If not, the kept weights do not exceed the target."""

    @property
    def ties(self) -> bool:
        """Whether tokens equal to the last kept one are kept as well."""
        return False

    @abstractmethod
    def weight(self, x: Scores, row: RowStats) -> Scores: ...

    @abstractmethod
    def target(self, row: RowStats) -> Scores: ...

    def order(self, x: Scores, row: RowStats) -> Scores:
        return -x


class Ceiling(Stage):
    """ceiling(self, row) -> threshold: in some steps, removes all but the last of the tokens above it."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The probability, per step, that the stage acts; all Ceilings share one random decision."""

    @property
    def spared(self) -> tuple[int, ...]:
        """Token ids that are never removed."""
        return ()

    @abstractmethod
    def ceiling(self, row: RowStats) -> Scores: ...


class Tap(Stage):
    """Reports the distribution at its position and changes nothing. A pipeline has at most one."""

    @property
    @abstractmethod
    def wanted(self) -> tuple[int, tuple[int, ...]]:
        """What to report in addition to the sampled token: the number of most likely tokens, and token ids."""


class Draw(Stage):
    """The last stage: selects one of the surviving tokens.

    ``uniforms`` is the number of random numbers of the rule. "none" and "each" select the highest
    ``score(self, x, u)``; "each" does so in two levels, first among groups of 256 ids by their mass, then among the
    tokens of the group. "one" selects the first token of the ranking at which the sum of ``weight(self, x, row)``
    reaches ``target(self, row, u)``.
    A Draw defines only the rules of its kind.
    """

    rank: ClassVar[int] = 100
    uniforms: ClassVar[Literal["none", "each", "one"]]

    def score(self, x: Scores, u: Scores) -> Scores:
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def weight(self, x: Scores, row: RowStats) -> Scores:
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def target(self, row: RowStats, u: Scores) -> Scores:
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")


Pipeline = tuple[Stage, ...]
SHAPES: tuple[type[Stage], ...] = (Shift, Scale, Floor, Prefix, Ceiling, Draw, Tap)


def shape_of(stage: Stage | type[Stage]) -> str:
    """The name of a stage's shape: "Shift", "Scale", "Floor", "Prefix", "Ceiling", "Draw" or "Tap"."""
    kind = stage if isinstance(stage, type) else type(stage)
    for shape in SHAPES:
        if issubclass(kind, shape):
            return shape.__name__
    raise TypeError(f"{kind.__name__} has none of the shapes {', '.join(s.__name__ for s in SHAPES)}")
