"""The values that rules and other methods of stages receive, see ``stage``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

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
