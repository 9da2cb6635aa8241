"""Stage: the base class of the shapes in ``stage``."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, Self, dataclass_transform

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, declared, param
from nucleate.sampling.rule_inputs import SampledToken, TextEncoder


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
