"""The base classes of stages (logits processors, filters and samplers). To write a stage, subclass one of them.

========  ====================================  =======================================  =======================
Class     Transformers / vLLM term              Methods to define                        Built-in examples
========  ====================================  =======================================  =======================
Combine   classifier-free guidance              ``apply(x, other) -> x``                 guidance, contrastive
Shift     logits processor, token by token      ``apply(x, token) -> x``                 penalties, bias, bans
Scale     logits processor for the whole row    ``apply(x, row) -> x``                   temperature
Floor     threshold filter                      ``floor(row) -> threshold``              min-p, epsilon
Prefix    cumulative filter in rank order       ``weight(x, row)``, ``target(row)``      top-k, top-p, typical-p
Ceiling   filter that removes the top tokens    ``ceiling(row) -> threshold``            XTC
Transform logits processor, any function        ``apply(ids, x, history) -> x``          SynthID
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, dataclass_transform

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import Parameter, declared
from nucleate.parameters.parameter import param as param  # noqa: PLC0414
from nucleate.sampling.history import History as History  # noqa: PLC0414  # stages import these from here
from nucleate.sampling.history import HistoryView as HistoryView  # noqa: PLC0414

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
    sorted_scores: Scores = None  #: the highest ``Stage.sorted_count`` scores, descending; -inf where n is less


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


MAX_WEIGHT = 1e6
"""Maximum weight of a difference of log-probabilities, so that combined scores are finite in float32."""


class Combine(Stage):
    """Combines the logits of a sequence with those of its companion: guidance, contrastive decoding.

    The companion is a second sequence with the same output, after another prompt or on another model. A pipeline has at
    most one Combine, its first stage. It runs before all backends. Define ``apply``, and ``companion_prompt`` or
    ``companion_model``. For example::

        class Guidance(Combine):
            scale: float = param("Guidance scale", neutral=1.0)
            def companion_prompt(self, prompt_ids):
                return prompt_ids[-1:]
            def apply(self, x, other):
                return other + self.scale * (x - other)
    """

    rank: ClassVar[float] = -1
    companion_model: ClassVar[bool] = False
    """Whether the companion runs on the companion model (``LLM(companion_model=...)``), not on the same model."""
    prompt_field: ClassVar[str] = "prompt"
    """The field that sets the companion's prompt, for error messages."""

    @abstractmethod
    def apply(self, x: Scores, other: Scores) -> Scores:
        """Return the new scores [V] of all tokens. x, other: the log-probabilities [V] of both, NumPy or torch."""

    def companion_prompt(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Return the token ids of the companion's prompt, by default the same."""
        return prompt_ids


class Shift(Stage):
    """Changes the scores of tokens, by token counts, by a list or by a value per token: penalties, bias, bans.

    Set ``touches`` and define ``apply``. Override ``listing`` if ``touches`` is "listed" or "unlisted", ``values`` if
    it is "all", and ``window`` to limit which tokens are counted. For example::

        class Frequency(Shift):
            touches = "output"
            f: float = param("Penalty per occurrence in the output", neutral=0.0)
            def apply(self, x, token):
                return x - self.f * token.output_count
    """

    touches: ClassVar[Literal["seen", "output", "listed", "unlisted", "masked", "all"]]
    """The tokens that ``apply`` changes: "seen", those in prompt or output; "output", those in the output; "listed" and
    "unlisted", those that ``listing`` contains or does not contain; "masked", those that the step's bitmask forbids;
    "all", every token. With "all", the new scores are rounded to float32, the precision of logits."""

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

    def values(self, history: HistoryView, size: int) -> Any:
        """The values of all tokens in this step, for "all": an array [size], or one number; see ``TokenInfo.value``.

        history: of the row. size: the vocabulary size.
        """
        return 0.0

    @property
    def context(self) -> int | None:
        """The number of last output tokens that ``values`` depends on; None, the default: the whole history.

        The values are computed again when these tokens change; with 0, once per row.
        """
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
            p: float = param("Cumulative probability to keep", neutral=1.0, low=0.0, high=1.0)
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


class Transform(Stage):
    """Computes the scores of all surviving tokens at once, on the CPU: for rules that the other shapes cannot express.

    Define ``apply``. For example::

        class Squared(Transform):
            def apply(self, ids, x, history):
                p = np.exp(x) / np.exp(x).sum()
                return 2 * np.log(p)
    """

    @abstractmethod
    def apply(self, ids: Any, x: Any, history: HistoryView) -> Any:
        """Return the new scores, float64 [N]. ids, x: the tokens in rank order, and their scores minus the maximum.

        A result of -inf bans the token. The cost grows with N: place the stage after truncation.
        """


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

    def noise_key(self, history: HistoryView) -> tuple[int, int] | None:
        """Override to make the random numbers of a step depend on the history: return two integers, 0 to 2**64 - 1.

        They take the place of the row's seed and step in ``noise.uniform``, for this draw only. None, the default,
        leaves the row's own. ``history.context(n)`` has the last n output tokens. Return the pseudo-random values of a
        secret key, such as ``WatermarkKey.numbers``, for a watermark.
        """
        return None

    @property
    def keyed(self) -> bool:
        """Whether ``noise_key`` is overridden."""
        return type(self).noise_key is not Draw.noise_key

    def score(self, x: Scores, u: Scores) -> Scores:
        """Return the value to maximise for a token with the score x. For "none" and "each"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def weight(self, x: Scores, row: RowStats) -> Scores:
        """Return the weight of a token with the score x, from the statistics of the row. For "one"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")

    def target(self, row: RowStats, u: Scores) -> Scores:
        """Return the cumulative weight to reach, from the statistics of the row and one uniform number u. For "one"."""
        raise NotImplementedError(f"{type(self).__name__} has uniforms = {self.uniforms!r}, and no rule for it")


Pipeline = tuple[Stage, ...]
"""Stages in the order in which they run. The last one of a complete pipeline is a Draw."""
SHAPES: tuple[type[Stage], ...] = (Combine, Shift, Scale, Floor, Prefix, Ceiling, Transform, Draw, Tap)


def shape_of(stage: Stage | type[Stage]) -> str:
    """The name of the base class of a stage, one of ``SHAPES``: "Shift", "Scale", ..."""
    kind = stage if isinstance(stage, type) else type(stage)
    for shape in SHAPES:
        if issubclass(kind, shape):
            return shape.__name__
    raise TypeError(f"{kind.__name__} has none of the shapes {', '.join(s.__name__ for s in SHAPES)}")


def min_keep_parameter() -> Any:
    """Declare ``min_keep`` in the body of a Floor, Prefix or Ceiling; backends then keep that many tokens.

    A Floor keeps the first ones in rank order, a Prefix those in its own order. A Ceiling removes nothing if it would
    leave fewer.
    """
    return param(
        "Minimum number of tokens that every truncation except top_k keeps; 0 or 1: one",
        default=0,
        low=0,
        high=2**31 - 1,
        name="min_keep",
    )


def min_keep_of(stage: Stage) -> int:
    """The number of tokens that a truncation keeps in any case."""
    return max(1, getattr(stage, "min_keep", 0))
