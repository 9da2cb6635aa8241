"""The base classes of stages (logits processors, filters and samplers). To write a stage, subclass one of them.

========  ====================================  =======================================  =======================
Class     Transformers / vLLM term              Methods to define                        Built-in examples
========  ====================================  =======================================  =======================
Shift     logits processor, token by token      ``apply(x, token) -> x``                 penalties, bias, bans
Scale     logits processor for the whole row    ``apply(x, row) -> x``                   temperature
Floor     threshold filter                      ``floor(row) -> threshold``              min-p, epsilon
Prefix    cumulative filter in rank order       ``weight(x, row)``, ``target(row)``      top-k, top-p, typical-p
Ceiling   filter that removes the top tokens    ``ceiling(row) -> threshold``            XTC
Tap       logprobs at this position             the property ``request``                 logprobs
Draw      sampler, always the last stage        ``score(x, u)``, or weight and target    greedy, Gumbel-max
========  ====================================  =======================================  =======================

A stage is an immutable dataclass. Its methods are called rules. A rule is one expression of the stage's parameters, the
arguments and the functions of ``maths``; it does not branch on numbers. It is written for one token and runs on every
backend: NumPy arrays, torch tensors and compiled CPU kernels. Pass stages to a sampler in the order in which they run::

    nucleate.sample(logits, (Temperature(0.7), MinP(0.1), Gumbel(seed=1)))

Suffixes of array names give their dimensions: B rows of a batch, V vocabulary ids, N surviving tokens, K listed tokens.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, Self, dataclass_transform

from nucleate.parameters.parameter import Parameter, declared
from nucleate.parameters.parameter import param as param  # noqa: PLC0414
from nucleate.sampling.history import History as History  # noqa: PLC0414  # stages import these from here
from nucleate.sampling.rule_inputs import IncrementalListing as IncrementalListing  # noqa: PLC0414
from nucleate.sampling.rule_inputs import RowStats as RowStats  # noqa: PLC0414
from nucleate.sampling.rule_inputs import SampledToken as SampledToken  # noqa: PLC0414
from nucleate.sampling.rule_inputs import Scores
from nucleate.sampling.rule_inputs import TextEncoder as TextEncoder  # noqa: PLC0414
from nucleate.sampling.rule_inputs import TokenInfo as TokenInfo  # noqa: PLC0414


@dataclass_transform(frozen_default=True, field_specifiers=(param,))
class Stage(ABC):  # noqa: B024  # the rules are declared by the subclasses
    """One step of a pipeline. Subclass Shift, Scale, Floor, Prefix, Ceiling, Tap or Draw instead of this class.

    In the subclass, set ``rank``, declare the parameters with ``param``, and define the rule. Parameters become
    dataclass fields. The first line of the docstring is the stage's help text. Override the methods below if needed.
    """

    rank: ClassVar[int] = 0  #: the position in the default order, in which ``SamplingParams`` sorts stages
    name: ClassVar[str] = ""  #: in traces and messages; by default the class name in snake case
    parameters: ClassVar[Mapping[str, Parameter]] = {}  #: the declared parameters by attribute name
    _switches: ClassVar[list[tuple[str, Parameter]]] = []  # the parameters with a no-op value

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


class Shift(Stage):
    """Changes the scores of some tokens, by token counts or by a list: penalties, bias, bans.

    Set ``touches`` and define ``apply``. Override ``listing`` if ``touches`` is "listed" or "unlisted", and ``window``
    to limit which tokens are counted. For example::

        class Frequency(Shift):
            touches = "output"
            f: float = param("Penalty per occurrence in the output", neutral=0.0)
            def apply(self, x, token):
                return x - self.f * token.output_count
    """

    touches: ClassVar[Literal["seen", "output", "listed", "unlisted", "masked"]]
    """The tokens that ``apply`` changes: "seen", those in prompt or output; "output", those in the output; "listed" and
    "unlisted", those that ``listing`` contains or does not contain; "masked", those that the step's bitmask forbids."""

    @abstractmethod
    def apply(self, x: Scores, token: TokenInfo) -> Scores:
        """Return the new score of a token with the score x. A result of -inf bans the token."""

    @property
    def window(self) -> int | None:
        """The number of last tokens of prompt and output that are counted, all of them as output; -1: all.

        None, the default, counts prompt and output separately.
        """
        return None

    def listing(self, history: History) -> Mapping[int, float]:
        """The list of this step, ``{token id: value}``; the values are ``TokenInfo.listed``. Computed on the CPU."""
        return {}

    def incremental_listing(self, history: History) -> IncrementalListing | None:
        """Override if the cost of ``listing`` grows with the history: return an object that updates it per token."""
        return None


class Scale(Stage):
    """Transforms the scores of all tokens: temperature and similar.

    Define ``apply``. For example::

        class Temperature(Scale):
            t: float = param("Temperature", neutral=1.0, low=0.0, open_low=True)
            def apply(self, x, row):
                return (x - row.top) / self.t
    """

    monotone: ClassVar[bool] = True
    """Whether higher scores have higher results. If so, the rank order is kept, also where results are equal."""

    @abstractmethod
    def apply(self, x: Scores, row: RowStats) -> Scores:
        """Return the new score of a token with the score x."""


class Floor(Stage):
    """Keeps the tokens whose score is at or above a threshold; always at least the most likely one.

    Define ``floor``. For example::

        class MinP(Floor):
            m: float = param("Minimum probability, relative to the highest", neutral=0.0, low=0.0, high=1.0)
            def floor(self, row):
                return row.top + log(self.m)
    """

    @abstractmethod
    def floor(self, row: RowStats) -> Scores:
        """Return the lowest score that is kept. A probability p is the score ``row.top + log(row.mass) + log(p)``."""


class Prefix(Stage):
    """Keeps the first tokens in rank order until the sum of their weights reaches a target: top-k, top-p.

    Rank order is by score, descending; equal scores by token id, ascending. Define ``weight`` and ``target``; override
    ``order`` to rank differently. At least one token is kept. For example::

        class TopP(Prefix):
            p: float = param("Cumulative probability to keep", neutral=1.0, low=0.0, high=1.0, open_low=True)
            def weight(self, x, row):
                return exp(x - row.top)
            def target(self, row):
                return self.p * row.mass
    """

    inclusive: ClassVar[bool] = True
    """Whether the token whose weight reaches the target is kept. If not, the kept weights do not exceed the target."""

    @property
    def ties(self) -> bool:
        """Whether tokens with the same score as the last kept one are kept as well."""
        return False

    @abstractmethod
    def weight(self, x: Scores, row: RowStats) -> Scores:
        """Return the weight of a token with the score x; 0 or more."""

    @abstractmethod
    def target(self, row: RowStats) -> Scores:
        """Return the target for the sum of weights."""

    def order(self, x: Scores, row: RowStats) -> Scores:
        """Return the sort key of a token with the score x, ascending. Equal keys stay in rank order."""
        return -x


class Ceiling(Stage):
    """In a random part of the steps, removes the tokens at or above a threshold, except the least likely of them (XTC).

    Define ``ceiling``, and the property or parameter ``act_probability``. For example::

        class Xtc(Ceiling):
            act_probability = 0.5  # of all steps
            def ceiling(self, row):
                return row.top + log(row.mass) + log(0.1)  # tokens with a probability of 0.1 or more
    """

    @property
    @abstractmethod
    def act_probability(self) -> float:
        """The probability, per step, that the stage acts. All Ceilings of a row share one random number per step."""

    @property
    def exempt_ids(self) -> tuple[int, ...]:
        """Token ids that are never removed."""
        return ()

    @abstractmethod
    def ceiling(self, row: RowStats) -> Scores:
        """Return the lowest score of the tokens to remove."""


class Tap(Stage):
    """Reports logprobs of the distribution at its position, and changes nothing. A pipeline has at most one.

    Define ``request``. For example::

        class TopFive(Tap):
            request = 5, ()
    """

    @property
    @abstractmethod
    def request(self) -> tuple[int, tuple[int, ...]]:
        """The logprobs to report besides that of the sampled token: of the n most likely tokens, and of given ids."""


class Draw(Stage):
    """Selects one of the surviving tokens. It is the last stage of a pipeline.

    Set ``uniforms``, and define ``score``, or ``weight`` and ``target``. For example, Gumbel-max sampling::

        class Gumbel(Draw):
            uniforms = "each"
            def score(self, x, u):
                return x - log(-log(u))
    """

    rank: ClassVar[int] = 100
    uniforms: ClassVar[Literal["none", "each", "one"]]
    """How many uniform random numbers in (0, 1) the rule uses per step.

    "none": select the highest ``score(x, u)``; u is 0. "each": one per token; select the highest ``score(x, u)``, first
    among groups of 256 consecutive ids, whose x is the logsumexp of their scores, then among the tokens of that group.
    "one": one per row; select the first token in rank order at which the sum of weights reaches the target.
    """

    def score(self, x: Scores, u: Scores) -> Scores:
        """Return the value to maximise for a token with the score x. For "none" and "each"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def weight(self, x: Scores, row: RowStats) -> Scores:
        """Return the weight of a token with the score x. For "one"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def target(self, row: RowStats, u: Scores) -> Scores:
        """Return the cumulative weight to reach. For "one"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")


Pipeline = tuple[Stage, ...]
SHAPES: tuple[type[Stage], ...] = (Shift, Scale, Floor, Prefix, Ceiling, Draw, Tap)


def shape_of(stage: Stage | type[Stage]) -> str:
    """The name of the base class of a stage: "Shift", "Scale", "Floor", "Prefix", "Ceiling", "Draw" or "Tap"."""
    kind = stage if isinstance(stage, type) else type(stage)
    for shape in SHAPES:
        if issubclass(kind, shape):
            return shape.__name__
    raise TypeError(f"{kind.__name__} has none of the shapes {', '.join(s.__name__ for s in SHAPES)}")
