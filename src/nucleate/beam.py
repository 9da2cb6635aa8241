"""Beam search, slowly: the meaning that a fast one must equal. Scores, ends and stops as in Transformers 5.

Knows neither stages nor text nor a cache: the logits after some tokens come from a function, asked for every beam. The
groups are those of Vijayakumar et al., Diverse Beam Search (arXiv 1610.02424).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError, declared, param
from nucleate.core.values import shown

LogitsOf = Callable[[tuple[int, ...]], NDArray[Any]]
"""The logits [V] of the next token, given all tokens so far, those of the prompt included."""

AllowedAfter = Callable[[tuple[int, ...]], Collection[int]]
"""The tokens that may follow an answer so far, without the prompt: none if it is whole, and ends there."""

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Beam:
    """A finished answer."""

    token_ids: tuple[int, ...]  #: without the prompt, with the EOS that ended it
    score: float  #: logprob / number of token_ids ** length_penalty
    logprob: float  #: natural logarithm of the probability of all token_ids
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class _Open:
    """An answer that goes on."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


class _Ranges:
    """The parameters that can be declared."""

    prompt_ids: tuple[int, ...] = param("what the answer follows", low=0, public=False)
    width: int = param("beams per step", low=1, public=False)
    max_tokens: int = param("longest answer", low=1, public=False)
    eos_token_ids: tuple[int, ...] = param("what ends an answer", low=0, public=False)
    length_penalty: float = param("exponent of the length; above 0 favours long answers", public=False)
    returned: int | None = param("how many of the best to return", low=1, public=False)
    groups: int = param("groups that share the width, each a search of its own", low=1, public=False)
    diversity_penalty: float = param(
        "what a token loses for each beam of an earlier group that goes on with it", low=0.0, high=1e6, public=False
    )


_RANGES = declared(_Ranges)


def beam_search(
    logits_of: LogitsOf,
    prompt_ids: Iterable[int],
    *,
    width: int,
    max_tokens: int,
    eos_token_ids: Iterable[int] = (),
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    returned: int | None = None,
    groups: int = 1,
    diversity_penalty: float = 0.0,
    allowed: AllowedAfter | None = None,
) -> list[Beam]:
    """The best answers, the best first: ``width`` of them, or ``returned``; fewer only if there are no more.

    early_stopping says when ``width`` finished answers are enough: True, at once; False, when the best open one, had it
    ended here, would not beat the worst of them; "never", when it would not even at the best length it can still have.

    groups: so many searches of ``width / groups`` beams, one after the other in each step. For the choice of a step,
    though not for its score, a token loses ``diversity_penalty`` for each beam of the groups before that goes on with
    it. What two groups find is there once.

    allowed: logprobs stay those of the model; other tokens are out. Raises ParameterError, and ValueError for logits
    that are NaN, +inf, or -inf for all that is allowed.
    """
    asked = _Asked(
        logits_of,
        _RANGES["prompt_ids"].check(prompt_ids),
        _RANGES["width"].check(width),
        _RANGES["max_tokens"].check(max_tokens),
        frozenset(_RANGES["eos_token_ids"].check(eos_token_ids)),
        _RANGES["length_penalty"].check(length_penalty),
        early_stopping,
        _RANGES["diversity_penalty"].check(diversity_penalty),
        allowed,
    )
    returned, groups = _RANGES["returned"].check(returned), _RANGES["groups"].check(groups)
    check_together(asked.width, asked.max_tokens, asked.length_penalty, early_stopping, returned, groups)

    searches = [_Group(asked, asked.width // groups) for _ in range(groups)]
    for length in range(1, asked.max_tokens + 1):
        chosen = Counter[int]()
        for search in searches:
            chosen.update(search.step(length, chosen))
    found = sorted((beam for search in searches for beam in search.finished), key=_by_score)
    return list(dict.fromkeys(found))[:returned]


def _by_score(beam: Beam) -> float:
    """Sorting is stable: of equal ones the earlier stays."""
    return -beam.score


@dataclass(frozen=True)
class _Asked:
    """The parameters, checked."""

    logits_of: LogitsOf
    prompt_ids: tuple[int, ...]
    width: int
    max_tokens: int
    ends: frozenset[int]
    length_penalty: float
    early_stopping: EarlyStopping
    diversity_penalty: float
    allowed: AllowedAfter | None

    def score(self, logprob: float, length: int) -> float:
        return float(logprob / length**self.length_penalty)


@dataclass
class _Group:
    """The beams of one group. It is over when none is open."""

    asked: _Asked
    size: int
    open: list[_Open] = field(default_factory=lambda: [_Open()])
    finished: list[Beam] = field(default_factory=list)

    def step(self, length: int, chosen: Counter[int]) -> list[int]:
        """Every open beam gets its next token. Returns those with which beams go on; ``chosen``: of groups before."""
        before, self.open = self.open, []
        last, chosen_here = length == self.asked.max_tokens, []
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
                score = self.asked.score(logprob, length)
                self.finished.append(Beam(ids, score, logprob, "stop" if ended else "length"))
        self.finished.sort(key=_by_score)
        del self.finished[self.size :]
        if self._enough(length):
            self.open, chosen_here = [], []
        return chosen_here

    def _candidates(self, beams: list[_Open], chosen: Counter[int]) -> list[tuple[int, int, float]]:
        """The continuations of all beams by one token, the best first: place of the beam, token, logprob."""
        asked, found = self.asked, []
        for place, beam in enumerate(beams):
            logprobs_V = _logprobs(asked.logits_of(asked.prompt_ids + beam.token_ids), asked.ends)
            tokens = set(np.flatnonzero(logprobs_V > -np.inf).tolist())
            if asked.allowed is not None:
                tokens &= set(asked.allowed(beam.token_ids))
            if not tokens:
                raise ValueError("no token that is allowed has a finite score")
            for token in tokens:
                logprob = beam.logprob + float(logprobs_V[token])
                found.append((asked.diversity_penalty * chosen[token] - logprob, place, token, logprob))
        return [(place, token, logprob) for _, place, token, logprob in sorted(found)]  # ties: place, then token

    def _ended(self, token_ids: tuple[int, ...]) -> bool:
        asked = self.asked
        return token_ids[-1] in asked.ends or (asked.allowed is not None and not asked.allowed(token_ids))

    def _enough(self, length: int) -> bool:
        """Whether nothing that is open is worth waiting for."""
        asked = self.asked
        if len(self.finished) < self.size or not self.open:
            return False
        longest = asked.max_tokens if asked.early_stopping == "never" and asked.length_penalty > 0 else length
        best = max(beam.logprob for beam in self.open)
        return asked.early_stopping is True or asked.score(best, longest) <= self.finished[-1].score


def _logprobs(logits: Any, ends: frozenset[int]) -> NDArray[np.float64]:
    """Logits [V] to float32, as everywhere, to logprobs [V] in float64."""
    x_V = np.asarray(logits)
    if x_V.ndim != 1 or x_V.dtype.kind != "f":
        raise ValueError(f"logits_of must return an array of floats [V], got {x_V.dtype} {list(x_V.shape)}")
    if ends and max(ends) >= len(x_V):
        message = f"eos_token_ids names token {max(ends)}, but the vocabulary ends at {len(x_V) - 1}"
        raise ParameterError("eos_token_ids", message)
    with np.errstate(over="ignore"):  # beyond float32 is inf
        x_V = x_V.astype(np.float32).astype(np.float64)
    if not math.isfinite(top := x_V.max(initial=-np.inf)):
        raise ValueError(f"logits hold a NaN, a +inf or no finite score: the highest is {top}")
    x_V -= top
    return np.asarray(x_V - np.log(np.exp(x_V).sum()))


def check_together(
    width: int, max_tokens: int, penalty: float, early_stopping: Any, returned: int | None, groups: int
) -> None:
    """What one parameter alone does not say."""
    if not isinstance(early_stopping, bool) and not (isinstance(early_stopping, str) and early_stopping == "never"):
        message = f"early_stopping must be true, false or 'never', got {shown(early_stopping)}"
        raise ParameterError("early_stopping", message)
    if abs(penalty) * math.log(max_tokens) > 700:  # else the power would not be a number, or zero
        message = f"length_penalty must leave max_tokens ** length_penalty within e**-700..e**700, got {shown(penalty)}"
        raise ParameterError("length_penalty", message)
    if returned is not None and returned > width:
        raise ParameterError("returned", f"returned must be at most width ({width}), got {returned}")
    if width % groups:
        raise ParameterError("groups", f"groups must divide width ({width}), got {groups}")
