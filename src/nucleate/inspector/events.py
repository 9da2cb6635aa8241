"""The events of an inspected output: its start, its tokens with their place in the model's distribution, its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from nucleate.engine.request import SamplingInputs
from nucleate.inspector.store import Run
from nucleate.jit.readiness import compiled
from nucleate.outputs import CompletionChunk, Usage
from nucleate.sampling.backends import reference
from nucleate.sampling.cpu_paths import survivors
from nucleate.sampling.history import History
from nucleate.sampling.presets import with_mask

Event = dict[str, Any]
TokenText = Callable[[int], str]


class TokenStatistics(NamedTuple):
    """Where a token is in the distributions of its step; see the fields of the same names in the event."""

    probability: float  #: in the distribution from which it was sampled
    model_probability: float  #: in the model's distribution, before all stages
    surprisal: float  #: -log(model_probability), in nats
    entropy: float  #: of the model's distribution, in nats
    rank: int  #: in the model's distribution, from 1
    kept: int  #: the tokens that survived all stages


def token_statistics(run: Run, position: int, token: int, inputs: SamplingInputs) -> TokenStatistics:
    """The statistics of a sampled token."""
    x_V = inputs.logits
    top = float(x_V.max())
    d_V = (x_V - np.float32(top)).astype(np.float32, copy=False)
    e_V = np.exp(d_V)
    mass = float(e_V.sum(dtype=np.float64))
    finite = d_V > -np.inf
    moment = float((e_V * np.where(finite, d_V, np.float32(0))).sum(dtype=np.float64))
    log_p = float(x_V[token]) - top - float(np.log(mass))
    rank = 1 + int(np.count_nonzero(x_V > x_V[token])) + int(np.count_nonzero(x_V[:token] == x_V[token]))
    kept, probability = _sampled_from(run, position, token, inputs)
    entropy = max(0.0, float(np.log(mass)) - moment / mass)
    return TokenStatistics(probability, float(np.exp(log_p)), -log_p, entropy, rank, kept)


def _sampled_from(run: Run, position: int, token: int, inputs: SamplingInputs) -> tuple[int, float]:
    """The number of tokens that survived all stages, and the probability of the sampled one among them."""
    output_ids = np.array(run.token_ids[:position], np.int64)
    past = History(np.array(run.prompt_ids, np.int64), output_ids, inputs.mask)
    stages = inputs.stages if inputs.mask is None else with_mask(inputs.stages)
    u = reference.xtc_uniform(stages, run.seed, position)
    ids_N, x_N, _ = survivors(compiled("auto", len(inputs.logits)))(inputs.logits, stages, past, u)
    place = np.flatnonzero(ids_N == token)
    e_N = np.exp(x_N - x_N.max())
    return len(ids_N), float(e_N[place[0]] / e_N.sum()) if len(place) else 0.0


def tokens_event(run: Run, chunks: Iterable[CompletionChunk], first: int, text: TokenText) -> Event:
    """The event of new chunks. first: the position of their first token."""
    tokens: list[Event] = []
    for chunk in chunks:
        for token in chunk.token_ids:
            position = first + len(tokens)
            tokens.append(_token(run, position, token, chunk.text, text))
    return {"type": "tokens", "tokens": tokens}


def _token(run: Run, position: int, token: int, released: str, text: TokenText) -> Event:
    step = run.steps[position]
    found: dict[str, Any] = dict.fromkeys(TokenStatistics._fields)
    if step.inputs is not None:
        found = token_statistics(run, position, token, step.inputs)._asdict()
    return {
        "step": position,
        "id": token,
        "text": text(token),
        "released": released,
        "origin": "draft" if position in run.drafted else step.origin,
        **found,
        "rejected": [{"id": each, "text": text(each)} for each in run.rejected.get(position, ())],
    }


def end_event(last: CompletionChunk, text: str, usage: Usage | None) -> Event:
    """The event of the last chunk. text: the whole output."""
    counts = (
        None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        }
    )
    reason = last.finish_reason
    return {"type": "end", "finish_reason": reason, "stop_reason": last.stop_reason, "text": text, "usage": counts}


def prompt_tokens(ids: Iterable[int], text: TokenText) -> list[dict[str, Any]]:
    """Token ids with their text."""
    return [{"id": token, "text": text(token)} for token in ids]
