"""Reference implementation of beam search, a test oracle. Scores and end conditions are those of Transformers 5.

It has no stages, text or cache: a function gives the logits after some tokens, and is called for every beam. Groups are
those of Vijayakumar et al., Diverse Beam Search (arXiv 1610.02424).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.beam.params import BeamParams

LogitsOf = Callable[[tuple[int, ...]], NDArray[Any]]
"""The logits [V] of the next token, given all tokens so far, those of the prompt included."""

AllowedAfter = Callable[[tuple[int, ...]], Collection[int]]
"""The tokens that a constraint allows after the output so far, without the prompt; none if it is complete."""


@dataclass(frozen=True)
class Beam:
    """A finished beam."""

    token_ids: tuple[int, ...]  #: without the prompt, with the EOS that ended it
    score: float  #: logprob / number of token_ids ** length_penalty
    logprob: float  #: natural logarithm of the probability of all token_ids
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class _Open:
    """An unfinished beam."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


def beam_search(
    logits_of: LogitsOf,
    prompt_ids: Iterable[int],
    *,
    max_tokens: int,
    eos_token_ids: Iterable[int] = (),
    allowed: AllowedAfter | None = None,
    **values: Any,
) -> list[Beam]:
    """The highest-scoring outputs, best first: ``num_return_sequences`` of them, or fewer if no more exist.

    values: fields of ``BeamParams``.

    num_beam_groups: that many searches of ``num_beams / num_beam_groups`` beams take turns in each step. When a group
    chooses tokens, each token is penalized by ``diversity_penalty`` per beam of the earlier groups that chose it in
    this step; the score is not. An output found by two groups is returned once.

    allowed: the tokens that a constraint allows; other tokens are masked, and logprobs stay those of the model. Raises
    ParameterError, and ValueError for logits that are NaN, +inf, or -inf for all that is allowed.
    """
    params = BeamParams(max_tokens=max_tokens, **values)
    prompt, ends = tuple(map(int, prompt_ids)), frozenset(map(int, eos_token_ids))
    search = _Search(logits_of, prompt, ends, params, max_tokens, allowed)
    groups = [_Group(search, params.num_beams // params.num_beam_groups) for _ in range(params.num_beam_groups)]
    for length in range(1, max_tokens + 1):
        chosen = Counter[int]()
        for group in groups:
            chosen.update(group.step(length, chosen))
    found = sorted((beam for group in groups for beam in group.finished), key=_by_score)
    return list(dict.fromkeys(found))[: params.num_return_sequences]


def _by_score(beam: Beam) -> float:
    """Sorting is stable: of equal ones the earlier stays."""
    return -beam.score


@dataclass(frozen=True)
class _Search:
    """The arguments of a search."""

    logits_of: LogitsOf
    prompt_ids: tuple[int, ...]
    ends: frozenset[int]
    params: BeamParams
    max_tokens: int
    allowed: AllowedAfter | None

    def score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)


@dataclass
class _Group:
    """The beams of one group. It is over when none is open."""

    search: _Search
    size: int
    open: list[_Open] = field(default_factory=lambda: [_Open()])
    finished: list[Beam] = field(default_factory=list)

    def step(self, length: int, chosen: Counter[int]) -> list[int]:
        """Every open beam gets its next token. Returns those with which beams go on; ``chosen``: of groups before."""
        before, self.open = self.open, []
        last, chosen_here = length == self.search.max_tokens, []
        for rank, (place, token, logprob) in enumerate(self._candidates(before, chosen)):
            if rank >= self.size and (last or len(self.open) == self.size):
                break
            ids = (*before[place].token_ids, token)
            ended = self._ended(ids)
            if not ended:
                chosen_here.append(token)
            if not ended and not last:
                self.open.append(_Open(ids, logprob))
            elif rank < self.size:  # an end further down loses its place to the open ones before it
                score = self.search.score(logprob, length)
                self.finished.append(Beam(ids, score, logprob, "stop" if ended else "length"))
        self.finished.sort(key=_by_score)
        del self.finished[self.size :]
        if self._enough(length):
            self.open, chosen_here = [], []
        return chosen_here

    def _candidates(self, beams: list[_Open], chosen: Counter[int]) -> list[tuple[int, int, float]]:
        """The continuations of all beams by one token, the best first: place of the beam, token, logprob."""
        search, found = self.search, []
        for place, beam in enumerate(beams):
            logprobs_V = _logprobs(search.logits_of(search.prompt_ids + beam.token_ids))
            tokens = set(np.flatnonzero(logprobs_V > -np.inf).tolist())
            if search.allowed is not None:
                tokens &= set(search.allowed(beam.token_ids))
            if not tokens:
                raise ValueError("no token that is allowed has a finite score")
            for token in tokens:
                logprob = beam.logprob + float(logprobs_V[token])
                found.append((search.params.diversity_penalty * chosen[token] - logprob, place, token, logprob))
        return [(place, token, logprob) for _, place, token, logprob in sorted(found)]  # ties: place, then token

    def _ended(self, token_ids: tuple[int, ...]) -> bool:
        search = self.search
        return token_ids[-1] in search.ends or (search.allowed is not None and not search.allowed(token_ids))

    def _enough(self, length: int) -> bool:
        """Whether nothing that is open is worth waiting for."""
        search, params = self.search, self.search.params
        if len(self.finished) < self.size or not self.open:
            return False
        longest = search.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best = max(beam.logprob for beam in self.open)
        return params.early_stopping is True or search.score(best, longest) <= self.finished[-1].score


def _logprobs(logits: Any) -> NDArray[np.float64]:
    """Logits [V] to float32, as everywhere, to logprobs [V] in float64."""
    x_V = np.asarray(logits)
    if x_V.ndim != 1 or x_V.dtype.kind != "f":
        raise ValueError(f"logits_of must return an array of floats [V], got {x_V.dtype} {list(x_V.shape)}")
    with np.errstate(over="ignore"):  # beyond float32 is inf
        x_V = x_V.astype(np.float32).astype(np.float64)
    if not math.isfinite(top := x_V.max(initial=-np.inf)):
        raise ValueError(f"logits hold a NaN, a +inf or no finite score: the highest is {top}")
    x_V -= top
    return np.asarray(x_V - np.log(np.exp(x_V).sum()))
