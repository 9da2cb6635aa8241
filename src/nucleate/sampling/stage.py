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

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from nucleate.parameters.parameter import param as param  # noqa: PLC0414
from nucleate.sampling.history import History as History  # noqa: PLC0414  # stages import these from here
from nucleate.sampling.history import HistoryView as HistoryView  # noqa: PLC0414
from nucleate.sampling.stage_base import IncrementalListing as IncrementalListing  # noqa: PLC0414
from nucleate.sampling.stage_base import RowStats as RowStats  # noqa: PLC0414
from nucleate.sampling.stage_base import SampledToken as SampledToken  # noqa: PLC0414
from nucleate.sampling.stage_base import Scores
from nucleate.sampling.stage_base import Stage as Stage  # noqa: PLC0414
from nucleate.sampling.stage_base import TextEncoder as TextEncoder  # noqa: PLC0414
from nucleate.sampling.stage_base import TokenInfo as TokenInfo  # noqa: PLC0414

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
