"""The shapes a stage can have. A stage is a frozen value; its rule is one expression over the names in ``maths``.

Refuses to know any backend: a rule sees its own parameters, a score, a token and the statistics of its row, no more.

Shape suffixes of arrays, everywhere: B rows of a batch, V vocabulary ids, N tokens that are still in, K listed tokens.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, dataclass_transform

from nucleate.parameters.parameter import Parameter, declared
from nucleate.parameters.parameter import param as param  # noqa: PLC0414
from nucleate.sampling.history import History as History  # noqa: PLC0414  # stages have it from here, as the next one

Scores = Any
"""Scores or numbers as the backend holds them: NumPy arrays in the reference, scalars or blocks in a kernel."""


class RowStats(NamedTuple):
    """Statistics of the tokens of one row that are still in."""

    n: Scores  #: how many
    top: Scores  #: the highest score
    mass: Scores  #: sum of exp(x - top)
    square: Scores  #: sum of exp(x - top) ** 2
    entropy: Scores  #: -sum of p log p, in nats
    mean: Scores  #: mean score
    var: Scores  #: population variance of the scores
    whole: Scores  #: sum of exp(x - top) before the first cut since the last Shift or Scale: at least ``mass``


class TokenInfo(NamedTuple):
    """What a Shift may know of a token."""

    id: Scores
    prompt_count: Scores  #: occurrences in the prompt
    output_count: Scores  #: occurrences in the output so far
    listed: Scores  #: the value the stage's own list gives it (0 where it is not listed)


class DrawnToken(NamedTuple):
    """The token of a step, for a stage that learns from it: its log-probability as the stage found and left it."""

    id: int
    before: float
    after: float


class TextEncoder(Protocol):
    """What turns text in a stage's parameters into token ids: a tokenizer."""

    def spellings(self, word: str) -> Iterable[tuple[int, ...]]:
        """The token ids of a word, as it begins a text and as it follows a space."""

    def containing(self, text: str) -> Iterable[int]:
        """Every token whose own text has this text in it."""


class IncrementalListing(Protocol):
    """A stage's list, kept up to date token by token."""

    def push(self, token: int) -> None:
        """The row goes on with this token."""

    def listing(self) -> Mapping[int, float]:
        """What ``Shift.listing`` says of everything pushed so far."""


@dataclass_transform(frozen_default=True, field_specifiers=(param,))
class Stage(ABC):  # noqa: B024  # its rule is of its shape
    """A step of the pipeline. Subclass a shape, declare parameters with ``param``, write the rule.

    ``rank`` gives the place in the canonical order; the docstring's first line is the help text everywhere.
    """

    rank: ClassVar[int] = 0
    name: ClassVar[str] = ""
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    _switches: ClassVar[list[tuple[str, Parameter]]] = []  # those that turn it on

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
        """Raise ParameterError where parameters that are valid alone contradict each other."""

    def spell(self, speller: TextEncoder) -> Self:
        """The same stage with any text in its parameters as token ids."""
        return self

    def after(self, drawn: DrawnToken) -> Self:
        """The same stage as of the next step: for those with a state, which is one of their parameters."""
        return self

    @property
    def neutral(self) -> bool:
        """True when the stage does nothing, so that it may be left out of a pipeline."""
        switches = self._switches
        return bool(switches) and all(p.is_neutral(getattr(self, a)) for a, p in switches)

    @property
    def greedy(self) -> bool:
        """True when the stage leaves only the first token of the order, whatever its rule would say."""
        return False

    def __repr__(self) -> str:
        values = {a: getattr(self, a) for a, p in self.parameters.items() if getattr(self, a) != p.default}
        if values and list(values) == list(self.parameters)[:1]:
            shown = repr(*values.values())
        else:
            shown = ", ".join(f"{attribute}={value!r}" for attribute, value in values.items())
        return f"{type(self).__name__}({shown})"


class Shift(Stage):
    """apply(self, x, token) -> x: changes the scores of some tokens, before anything else looks at them."""

    touches: ClassVar[Literal["seen", "output", "listed", "unlisted", "masked"]]
    """Which tokens the rule is applied to: those in prompt or output, in the output, in the stage's list, not in it, or
    those the step's bitmask forbids."""

    @abstractmethod
    def apply(self, x: Scores, token: TokenInfo) -> Scores: ...

    @property
    def window(self) -> int | None:
        """None, or n: the stage sees the last n tokens of prompt and output (-1: all), and takes them all as output."""
        return None

    def listing(self, history: History) -> Mapping[int, float]:
        """The stage's list for this step, ``{token id: value}``. Computed on the host; only for (un)listed."""
        return {}

    def follow(self, history: History) -> IncrementalListing | None:
        """The list from here on, at a cost per token that does not grow with the history.

        None: ``listing`` itself is like that.
        """
        return None


class Scale(Stage):
    """apply(self, x, row) -> x. If monotone in x, the order stays, even of tokens that rounding makes equal."""

    monotone: ClassVar[bool] = True

    @abstractmethod
    def apply(self, x: Scores, row: RowStats) -> Scores: ...


class Floor(Stage):
    """floor(self, row) -> cut: keeps every score at or above it."""

    @abstractmethod
    def floor(self, row: RowStats) -> Scores: ...


class Prefix(Stage):
    """weight(self, x, row), target(self, row): keeps the fewest first tokens whose weights reach the target.

    The first are the best, unless ``order(self, x, row)`` says otherwise: ascending, equal ones as they are.
    """

    reaches: ClassVar[bool] = True
    """Whether the token that reaches the target stays. If not, those stay whose weights together do not exceed it."""

    @property
    def ties(self) -> bool:
        """True when tokens equal to the last one kept stay too."""
        return False

    @abstractmethod
    def weight(self, x: Scores, row: RowStats) -> Scores: ...

    @abstractmethod
    def target(self, row: RowStats) -> Scores: ...

    def order(self, x: Scores, row: RowStats) -> Scores:
        return -x


class Ceiling(Stage):
    """ceiling(self, row) -> cut: of the tokens at or above it only the last stays, in steps where a coin says so."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The probability, per step, that the ceiling is there. One coin per step, which all ceilings share."""

    @property
    def spared(self) -> tuple[int, ...]:
        """Token ids that are never dropped."""
        return ()

    @abstractmethod
    def ceiling(self, row: RowStats) -> Scores: ...


class Tap(Stage):
    """Changes nothing: reports the distribution as of its place. A pipeline has one at most."""

    @property
    @abstractmethod
    def wanted(self) -> tuple[int, tuple[int, ...]]:
        """What to report beside the token drawn: how many of the best ones, and which ids."""


class Draw(Stage):
    """The last stage: picks one of the tokens that are still in.

    ``uniforms`` says how many random numbers the rule takes: "none" and "each" race with ``score(self, x, u)`` and the
    highest wins ("each" in two levels: first groups of 256 ids by their mass, then the tokens of the winner); "one"
    walks down the order to the first token at which ``weight(self, x, row)`` has summed up to ``target(self, row, u)``.
    A draw defines the rules of its own kind only; the others are never called.
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
