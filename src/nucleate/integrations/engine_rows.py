"""Requests of another engine as rows of a Sampler, for engines that call a logits processor for a whole batch.

The engine owns the tokens: before each step, the history of a row is made equal to what the engine has kept, so chunked
prefill, preemption, rejected drafts and forced tokens need no call. A step then allows the sampled token alone.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from nucleate.jit.native_library import warn_once
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.pipeline_format import COMBINING
from nucleate.sampling.sampler import Sampler
from nucleate.sampling_params import ENGINE_ONLY, SamplingParams

logger = logging.getLogger("nucleate")

FIELD = "nucleate"
"""The name of the parameters among those that an engine passes on."""

FOLLOWING = ("temperature", "top_k", "top_p", "min_p", "seed")
"""Parameters of engines that nucleate takes over: engines apply them to the one token that is left."""

NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Values of these that count as not given: engines fill them in."""

PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
"""Parameters that engines apply before or after nucleate, with their neutral values."""

MAX_PARKED = 256
"""Rows kept after their request has left the batch, in case it was preempted."""


def request_params(given: Any, engine: Mapping[str, Any], where: str) -> SamplingParams:
    """The parameters of a request in another engine.

    given: fields of SamplingParams, a mapping or JSON. engine: the engine's own parameters; of these, values of
    FOLLOWING that are neither None nor neutral count as given, and PENALTIES must be neutral. where: what messages call
    ``given``.
    Raises ParameterError for unknown fields and values, for fields that the engine has itself, for guidance and
    contrastive decoding, and for a value that is given twice.
    """
    if isinstance(given, str | bytes):
        try:
            given = json.loads(given)
        except ValueError:
            raise ParameterError(FIELD, f"{where} must be JSON, got {shown(given)}") from None
    if not isinstance(given, Mapping):
        raise ParameterError(FIELD, f"{where} must be an object with fields of SamplingParams, got {shown(given)}")
    for name, neutral in PENALTIES.items():
        if engine.get(name) not in (None, neutral):
            message = f"the engine's {name} must be {neutral:g}, also if the model recommends another value"
            raise ParameterError(name, f"{message}: set it in {where}; got {engine[name]:g}")
    own = {name: engine[name] for name in FOLLOWING if engine.get(name) not in (None, NEUTRAL.get(name))}
    for name, value in given.items():
        if name in ENGINE_ONLY and name != "structured_outputs":
            raise ParameterError(name, f"{name} cannot be in {where}: set the engine's own parameter")
        if name in (*COMBINING, "structured_outputs", "logprobs", "logprob_token_ids", "logprobs_mode"):
            need = "a second sequence" if name in COMBINING else "the engine"
            raise ParameterError(name, f"{name} cannot be in {where}: it needs {need}; use LLM, or leave it out")
        if name in own and own[name] != value:
            both = f"{shown(own[name])} as the engine's parameter and {shown(value)} in {where}"
            raise ParameterError(name, f"{name} is {both}: set only one")
    return SamplingParams(**{**own, **given})


def seed_of_text(*parts: object) -> int:
    """A seed of 64 bits from what all ranks of a model know alike, for requests without a seed."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class EngineRows:
    """The requests of an engine that nucleate samples, by the engine's keys, such as slots or request ids."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self._rows: dict[Hashable, int] = {}
        self._parked: OrderedDict[int, tuple[SamplingParams, tuple[int, ...]]] = OrderedDict()
        self._requests: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def start(
        self, key: Hashable, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int
    ) -> None:
        """Begin a request, or continue one that was preempted. seed: if the parameters have none.

        Another request with this key is left, see ``leave``.
        """
        self.leave(key)
        request, row = (params, tuple(prompt)), None
        if output:
            for parked, known in self._parked.items():
                tokens = self.sampler.output_ids(parked)
                if known == request and tokens[: len(output)] == tuple(output):
                    row = parked
                    del self._parked[parked]
                    self.sampler.rollback(row, len(tokens) - len(output))
                    break
        if row is None:
            given = None if params.seed is not None else seed
            row = self.sampler.add(params, prompt, output_ids=output, seed=given)
            if output and any(map(is_stateful, self.sampler.stages(row))):
                warn_once("a preempted request with mirostat or adaptive_p continues in the initial state of the stage")
        self._rows[key], self._requests[row] = row, request

    def leave(self, key: Hashable) -> None:
        """A request has left the batch. It may have been preempted: its row is kept for a while."""
        row = self._rows.pop(key, None)
        if row is None:
            return
        self._parked[row] = self._requests.pop(row)
        if len(self._parked) > MAX_PARKED:
            self.sampler.remove(self._parked.popitem(last=False)[0])

    def drop(self, key: Hashable) -> None:
        """Forget a request that has ended."""
        row = self._rows.pop(key, None)
        if row is not None:
            del self._requests[row]
            self.sampler.remove(row)

    def move(self, moves: Mapping[Hashable, Hashable]) -> None:
        """Give requests other keys. moves: {new key: old key}; a request whose key is taken is left."""
        found = {new: self._rows.get(old) for new, old in moves.items()}
        for key in {*moves, *moves.values()}:
            if self._rows.get(key) in found.values():
                self._rows.pop(key, None)
            else:
                self.leave(key)
        self._rows |= {new: row for new, row in found.items() if row is not None}

    def length(self, key: Hashable) -> int:
        """The number of output tokens of a request."""
        return len(self.sampler.history(self._rows[key]).output)

    def follow(self, key: Hashable, length: int, tokens: Sequence[int], start: int = 0) -> None:
        """Make the output of a request equal to what the engine has kept of it, before a step.

        length: the number of output tokens that the engine has. tokens: those from position ``start`` on that the
        engine knows already; -1 for one that it does not. Tokens that are not ours are taken over as forced ones.
        """
        row = self._rows[key]
        output = self.sampler.history(row).output
        same = min(len(output), length)
        for place, token in enumerate(tokens[: max(length - start, 0)], start):
            if place < same and token >= 0 and output[place] != token:
                same = place
        if len(output) > same:
            self.sampler.rollback(row, len(output) - same)
        for place in range(same, length):
            token = tokens[place - start] if start <= place < start + len(tokens) else -1
            if token < 0:
                raise RuntimeError(f"the engine has {length} output tokens for {key!r}, but nucleate has seen {place}")
            self.sampler.accept(row, int(token))

    def sample(
        self,
        logits_RV: Any,
        places: Mapping[Hashable, Sequence[int]],
        drafts: Mapping[Hashable, Sequence[int]] | None = None,
    ) -> dict[int, int]:
        """Sample: {row of logits: token}.

        logits_RV: float [R, V], NumPy or torch. places: the rows of logits of each request: one, and one after each
        draft token. drafts: the draft tokens of all requests; sampling stops after the first one that differs from the
        sampled token. Without them, requests are sampled at all their rows, as if each draft was the sampled token: if
        it is not, the engine rejects what follows. A row that cannot be sampled is left to the engine, and logged.
        """
        found: dict[int, int] = {}
        active, depth = list(places), 0
        while active:
            at = [places[key][depth] for key in active]
            part_RV = logits_RV if at == [*range(len(logits_RV))] else logits_RV[at]
            out = self.sampler(part_RV, [self._rows[key] for key in active])
            tokens = out.token_ids.tolist()
            for position, message in out.errors.items():
                logger.error("request %r is left to the engine: %s", active[position], message)
            found |= {row: token for row, token in zip(at, tokens, strict=True) if token >= 0}
            depth += 1
            active = [
                key
                for key, token in zip(active, tokens, strict=True)
                if token >= 0 and depth < len(places[key]) and (drafts is None or drafts[key][depth - 1] == token)
            ]
        return found


def allow_only(logits_RV: Any, found: Mapping[int, int]) -> None:
    """Change rows of a tensor of logits in place: the score of the sampled token is 0, all others -inf."""
    if found:
        rows = [*found]
        logits_RV[rows if len(rows) < len(logits_RV) else slice(None)] = -float("inf")
        logits_RV[rows, [*found.values()]] = 0.0
