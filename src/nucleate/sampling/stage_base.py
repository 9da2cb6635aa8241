"""Stage: the base class of the shapes in ``stage``, and the values that rules and other methods of stages receive."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self, dataclass_transform

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, declared, param

Scores = Any
"""A number, a NumPy array or a torch tensor, as the backend passes it. A score is a logit after the stages so far."""


class RowStats(NamedTuple):
    """Statistics of the surviving tokens of one row. A token survives until a stage bans it or filters it out."""

    n: Scores  #: number of surviving tokens
    top: Scores  #: maximum score
    mass: Scores  #: sum of exp(x - top), the partition function
    square: Scores  #: sum of exp(x - top) ** 2
    entropy: Scores  #: -sum of p log p, in nats
    mean: Scores  #: mean score
    var: Scores  #: population variance of the scores
    full_mass: Scores  #: the mass before the filters since the last Shift or Scale; at least ``mass``
    sorted_scores: Scores = (
        None  #: the highest scores, descending, ``Stage.sorted_count`` of them; -inf where n is less
    )


class TokenInfo(NamedTuple):
    """The inputs of a Shift's rule that depend on the token."""

    id: Scores  #: token id
    prompt_count: Scores  #: occurrences in the prompt
    output_count: Scores  #: occurrences in the output so far
    listed: Scores  #: its value in ``Shift.listing``, 0 if it is not listed
    value: Scores = 0.0  #: its value in ``Shift.values``


class SampledToken(NamedTuple):
    """The sampled token of a step, as ``Stage.update`` receives it."""

    id: int
    logprob_before: float  #: its log-probability in the distribution before this stage
    logprob_after: float  #: the same after this stage


class TextEncoder(Protocol):
    """The part of a tokenizer that ``Stage.encode_text`` uses."""

    def encode(self, text: str) -> Iterable[int]:
        """The token ids of a text, with the special tokens of a prompt."""

    def spellings(self, word: str) -> Iterable[tuple[int, ...]]:
        """The token ids of a word: at the start of a text, and after a space."""

    def containing(self, text: str) -> Iterable[int]:
        """The ids of all tokens whose text contains this text."""


class IncrementalListing(Protocol):
    """Computes ``Shift.listing`` incrementally, one token at a time.

    It may also have a method ``fork() -> IncrementalListing``: a copy that continues on its own, at a lower cost than
    that of the history so far. The n outputs of a request then share what their prompt has in common.
    """

    def push(self, token: int) -> None:
        """Append an output token to the history."""

    def listing(self) -> Mapping[int, float]:
        """Return what ``Shift.listing`` returns for the history so far."""


@dataclass_transform(frozen_default=True, field_specifiers=(param,))
class Stage(ABC):  # noqa: B024  # the rules are declared by the subclasses
    """One step of a pipeline. Subclass Shift, Scale, Floor, Prefix, Ceiling, Transform, Tap or Draw instead.

    In the subclass, set ``rank``, declare the parameters with ``param``, and define the rule. Parameters become
    dataclass fields. The first line of the docstring is the stage's help text. Override the methods below if needed.
    """

    rank: ClassVar[float] = 0  #: the position in the default order, in which ``SamplingParams`` sorts stages
    name: ClassVar[str] = ""  #: in traces and messages; by default the class name in snake case
    parameters: ClassVar[Mapping[str, Parameter]] = {}  #: the declared parameters by attribute name
    sorted_count: ClassVar[int] = 0  #: how many ``row.sorted_scores`` the rules read; of a Scale or a truncation
    _switches: ClassVar[list[tuple[str, Parameter]]] = []  # the parameters with a no-op value

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        cls.parameters = declared(cls, prefix=cls.name)
        cls._switches = [(a, p) for a, p in cls.parameters.items() if p.neutral is not dataclasses.MISSING]
        dataclasses.dataclass(frozen=True, repr=False)(cls)
        cls.__init__ = with_suggestions(cls.__init__, {p.name: a for a, p in cls.parameters.items()})  # type: ignore[method-assign]
        others = {field.name for field in dataclasses.fields(cls)} - cls.parameters.keys()  # type: ignore[arg-type]
        if others:
            raise TypeError(
                f"{cls.__name__}: {', '.join(sorted(others))} must be declared in its own body with param(...), "
                "or be a ClassVar; a stage with parameters is final"
            )

    def __post_init__(self) -> None:
        for attribute, parameter in self.parameters.items():
            value = getattr(self, attribute)
            if (checked := parameter.check(value)) is not value:
                object.__setattr__(self, attribute, checked)
        self.verify()

    def verify(self) -> None:  # noqa: B027  # optional
        """Override to raise ParameterError for parameters that contradict each other. Called at construction."""

    def encode_text(self, tokenizer: TextEncoder) -> Self:
        """Override if parameters may contain text: return a copy with that text encoded as token ids."""
        return self

    def update(self, token: SampledToken) -> Self:
        """Override in a stateful stage, such as mirostat: return the stage for the next step, with its new state.

        The state is a parameter: return ``dataclasses.replace(self, ...)``.
        """
        return self

    @property
    def neutral(self) -> bool:
        """Whether the stage has no effect with these parameters. Pipelines drop such stages."""
        switches = self._switches
        return bool(switches) and all(p.is_neutral(getattr(self, a)) for a, p in switches)

    @property
    def greedy(self) -> bool:
        """Whether the stage keeps only the most likely token, as with temperature 0. The rule is then not called."""
        return False

    def __repr__(self) -> str:
        values = {a: getattr(self, a) for a, p in self.parameters.items() if getattr(self, a) != p.default}
        if values and list(values) == list(self.parameters)[:1]:
            shown = repr(*values.values())
        else:
            shown = ", ".join(f"{attribute}={value!r}" for attribute, value in values.items())
        return f"{type(self).__name__}({shown})"
