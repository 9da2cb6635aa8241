"""Reference implementation of beam search, a test oracle. Scores and end conditions are those of Transformers 5.

It calls a function of the tokens for the logits of every beam, without stages, text or KV cache. Groups implement
diverse beam search (Vijayakumar et al., arXiv 1610.02424).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.beam_params import BeamParams

LogitsOf = Callable[[tuple[int, ...]], NDArray[Any]]
"""The logits [V] of the next token, given all tokens so far, including the prompt."""

AllowedAfter = Callable[[tuple[int, ...]], Collection[int]]
"""The tokens that a constraint allows, given the output so far (without the prompt); none if it is complete."""


@dataclass(frozen=True)
class Beam:
    """A finished beam."""

    token_ids: tuple[int, ...]  #: without the prompt, with the EOS that ended it
    score: float  #: logprob / number of token_ids ** length_penalty
    logprob: float  #: natural logarithm of the probability of all token_ids
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class _OpenBeam:
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

    num_beam_groups: in each step, that many searches of ``num_beams / num_beam_groups`` beams take turns. When a group
    chooses tokens, a token is penalized by ``diversity_penalty`` for each beam of the earlier groups that chose it in
    this step. Scores do not include the penalty. An output found by two groups is returned once.

    allowed: the tokens that a constraint allows; other tokens are masked, and logprobs stay those of the model. Raises
    ParameterError, and ValueError for logits that are NaN or +inf, or -inf for all allowed tokens.
    """
    params = BeamParams(max_tokens=max_tokens, **values)
    prompt, eos_ids = tuple(map(int, prompt_ids)), frozenset(map(int, eos_token_ids))
    search = _Search(logits_of, prompt, eos_ids, params, max_tokens, allowed)
    groups = [_Group(search, params.num_beams // params.num_beam_groups) for _ in range(params.num_beam_groups)]
    for length in range(1, max_tokens + 1):
        token_counts = Counter[int]()
        for group in groups:
            token_counts.update(group.step(length, token_counts))
    found = sorted((beam for group in groups for beam in group.finished), key=_by_score)
    return list(dict.fromkeys(found))[: params.num_return_sequences]


def _by_score(beam: Beam) -> float:
    """Sort key, best first. Sorting is stable: among equal scores the earlier one comes first."""
    return -beam.score


@dataclass(frozen=True)
class _Search:
    """The arguments of a search."""

    logits_of: LogitsOf
    prompt_ids: tuple[int, ...]
    eos_ids: frozenset[int]
    params: BeamParams
    max_tokens: int
    allowed: AllowedAfter | None

    def score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.params.length_penalty)


@dataclass
class _Group:
    """The beams of one group. The group is finished when no beam is open."""

    search: _Search
    size: int
    open: list[_OpenBeam] = field(default_factory=lambda: [_OpenBeam()])
    finished: list[Beam] = field(default_factory=list)

    def step(self, length: int, token_counts: Counter[int]) -> list[int]:
        """Extend every open beam by one token. Returns the tokens of the continuing beams.

        token_counts: how many beams of the earlier groups chose each token.
        """
        before, self.open = self.open, []
        last, tokens = length == self.search.max_tokens, []
        for rank, (parent, token, logprob) in enumerate(self._candidates(before, token_counts)):
            if rank >= self.size and (last or len(self.open) == self.size):
                break
            ids = (*before[parent].token_ids, token)
            ended = self._ended(ids)
            if not ended:
                tokens.append(token)
            if not ended and not last:
                self.open.append(_OpenBeam(ids, logprob))
            elif rank < self.size:  # a finished beam below the top ``size`` candidates is dropped
                score = self.search.score(logprob, length)
                self.finished.append(Beam(ids, score, logprob, "stop" if ended else "length"))
        self.finished.sort(key=_by_score)
        del self.finished[self.size :]
        if self._is_done(length):
            self.open, tokens = [], []
        return tokens

    def _candidates(self, beams: list[_OpenBeam], token_counts: Counter[int]) -> list[tuple[int, int, float]]:
        """The continuations of all beams by one token, best first: index of the beam, token, logprob."""
        search, found = self.search, []
        for parent, beam in enumerate(beams):
            logprobs_V = _logprobs(search.logits_of(search.prompt_ids + beam.token_ids))
            tokens = set(np.flatnonzero(logprobs_V > -np.inf).tolist())
            if search.allowed is not None:
                tokens &= set(search.allowed(beam.token_ids))
            if not tokens:
                raise ValueError("no token that is allowed has a finite score")
            for token in tokens:
                logprob = beam.logprob + float(logprobs_V[token])
                found.append((search.params.diversity_penalty * token_counts[token] - logprob, parent, token, logprob))
        return [(parent, token, logprob) for _, parent, token, logprob in sorted(found)]  # ties: parent, then token

    def _ended(self, token_ids: tuple[int, ...]) -> bool:
        search = self.search
        return token_ids[-1] in search.eos_ids or (search.allowed is not None and not search.allowed(token_ids))

    def _is_done(self, length: int) -> bool:
        """Whether no open beam can still improve the result, see ``BeamParams.early_stopping``."""
        search, params = self.search, self.search.params
        if len(self.finished) < self.size or not self.open:
            return False
        longest = search.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        best = max(beam.logprob for beam in self.open)
        return params.early_stopping is True or search.score(best, longest) <= self.finished[-1].score


def _logprobs(logits: Any) -> NDArray[np.float64]:
    """Round logits [V] to float32, as everywhere, and return logprobs [V] in float64."""
    x_V = np.asarray(logits)
    if x_V.ndim != 1 or x_V.dtype.kind != "f":
        raise ValueError(f"logits_of must return an array of floats [V], got {x_V.dtype} {list(x_V.shape)}")
    with np.errstate(over="ignore"):  # values beyond float32 become inf
        x_V = x_V.astype(np.float32).astype(np.float64)
    if not math.isfinite(top := x_V.max(initial=-np.inf)):
        raise ValueError(f"logits hold a NaN, a +inf or no finite score: the highest is {top}")
    x_V -= top
    return np.asarray(x_V - np.log(np.exp(x_V).sum()))
