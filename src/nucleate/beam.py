"""Beam search, slowly: the meaning that a fast one must equal. Scores, ends and stops as in Transformers 5.

Knows neither stages nor text nor a cache: the logits after some tokens come from a function, asked for every beam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nucleate.core.parameter import ParameterError, declared, param
from nucleate.core.values import shown

LogitsOf = Callable[[tuple[int, ...]], NDArray[Any]]
"""The logits [V] of the next token, given all tokens so far, those of the prompt included."""


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


class _Allowed:
    """The parameters that can be declared."""

    prompt_ids: tuple[int, ...] = param("what the answer follows", low=0, public=False)
    width: int = param("beams per step", low=1, public=False)
    max_tokens: int = param("longest answer", low=1, public=False)
    eos_token_ids: tuple[int, ...] = param("what ends an answer", low=0, public=False)
    length_penalty: float = param("exponent of the length; above 0 favours long answers", public=False)
    returned: int | None = param("how many of the best to return", low=1, public=False)


_ALLOWED = declared(_Allowed)


def beam_search(
    logits_of: LogitsOf,
    prompt_ids: Iterable[int],
    *,
    width: int,
    max_tokens: int,
    eos_token_ids: Iterable[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    returned: int | None = None,
) -> list[Beam]:
    """The best answers, the best first: ``width`` of them, or ``returned``; fewer only if the model allows no more.

    early_stopping says when ``width`` finished answers are enough: True, at once; False, when the best open one, had it
    ended here, would not beat the worst of them; "never", when it would not even at the best length it can still have.
    Raises ParameterError, and ValueError for logits that are NaN, +inf, or all -inf.
    """
    prompt = _ALLOWED["prompt_ids"].check(prompt_ids)
    width, max_tokens = _ALLOWED["width"].check(width), _ALLOWED["max_tokens"].check(max_tokens)
    ends = frozenset(_ALLOWED["eos_token_ids"].check(eos_token_ids))
    penalty: float = _ALLOWED["length_penalty"].check(length_penalty)
    returned = _ALLOWED["returned"].check(returned)
    _check_together(width, max_tokens, penalty, early_stopping, returned)

    def score(logprob: float, length: int) -> float:
        return float(logprob / length**penalty)

    open_beams, finished = [_Open()], list[Beam]()
    for length in range(1, max_tokens + 1):
        candidates = _candidates(logits_of, prompt, open_beams, ends, width)
        open_beams = []
        for rank, (beam, ended) in enumerate(candidates):
            if not ended and length < max_tokens:
                open_beams.append(beam)
            elif rank < width:  # an end further down loses its place to the open ones before it
                reason: Literal["stop", "length"] = "stop" if ended else "length"
                finished.append(Beam(beam.token_ids, score(beam.logprob, length), beam.logprob, reason))
        del open_beams[width:]
        finished.sort(key=lambda beam: -beam.score)  # stable: of equal ones the earlier stays
        del finished[width:]
        if not open_beams:
            break
        if len(finished) == width:
            longest = max_tokens if early_stopping == "never" and penalty > 0 else length
            if early_stopping is True or score(open_beams[0].logprob, longest) <= finished[-1].score:
                break
    return finished[:returned]


def _candidates(
    logits_of: LogitsOf, prompt: tuple[int, ...], beams: list[_Open], ends: frozenset[int], width: int
) -> list[tuple[_Open, bool]]:
    """The continuations of all beams by one token, as far down the order as any can matter, and whether EOS ended them.

    At most one per beam and EOS is an end, so that ``width`` that are none are there, if so many exist.
    """
    found = []
    for place, beam in enumerate(beams):
        logprobs_V = _logprobs(logits_of(prompt + beam.token_ids), ends)
        for token in np.flatnonzero(logprobs_V > -np.inf).tolist():
            found.append((-(beam.logprob + float(logprobs_V[token])), place, token))
    best = sorted(found)[: (1 + len(ends)) * width]  # by logprob, then place of the beam, then token id
    return [
        (_Open((*beams[place].token_ids, token), -minus_logprob), token in ends) for minus_logprob, place, token in best
    ]


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


def _check_together(width: int, max_tokens: int, penalty: float, early_stopping: Any, returned: int | None) -> None:
    """What one parameter alone does not say."""
    if not isinstance(early_stopping, bool) and not (isinstance(early_stopping, str) and early_stopping == "never"):
        message = f"early_stopping must be true, false or 'never', got {shown(early_stopping)}"
        raise ParameterError("early_stopping", message)
    if abs(penalty) * math.log(max_tokens) > 700:  # else the power would not be a number, or zero
        message = f"length_penalty must leave max_tokens ** length_penalty within e**-700..e**700, got {shown(penalty)}"
        raise ParameterError("length_penalty", message)
    if returned is not None and returned > width:
        raise ParameterError("returned", f"returned must be at most width ({width}), got {returned}")
