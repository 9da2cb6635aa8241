"""nucleate inside mlx-lm: as a logits processor, which takes every parameter, or as a sampler, which is faster.

Both belong to one call of ``mlx_lm.generate`` or ``stream_generate``, or to one prompt of a batch.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.functional import LogitsError
from nucleate.sampling.pipeline import Params, has_constant_listing
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Draw, Shift, Stage, Transform

FIELD = "logits_processors"


def sampled_token(sampler: Sampler, row: int, logits: Any) -> int:
    """Sample the next token of a row. logits: an array of mlx, [1, V] or [V]. Raises LogitsError."""
    out = sampler(np.array(logits.reshape(1, -1).astype(mx.float32)), [row])
    if out.errors:
        raise LogitsError(out.errors)
    return int(out.token_ids[0])


@with_suggestions
class SamplingLogitsProcessor:
    """``mlx_lm.generate(model, tokenizer, prompt, logits_processors=[processor])``: sample with nucleate.

    It leaves the sampled token alone, so that mlx-lm selects it with any ``sampler``. Make a new one for each call, and
    pass it as the last processor. With a prompt cache, the tokens that are cached are no part of the history.

    sampler: from ``nucleate.load_sampler(folder)``, for any number of calls. params: a SamplingParams or a pipeline;
    None: what the model recommends. Raises ParameterError for fields that end outputs, such as ``stop``.
    """

    def __init__(self, sampler: Sampler, params: Params | None = None) -> None:
        sampler.remove(sampler.add(params))  # raises for parameters that it cannot apply
        self._sampler, self._params, self._row, self._begin = sampler, params, -1, 0

    def __call__(self, tokens: Any, logits: Any) -> Any:
        """Sample. tokens: int [T], the tokens so far. logits: float [1, V]. Returns the new logits."""
        ids = np.array(tokens)
        if self._row < 0:
            self._begin, self._row = len(ids), self._sampler.add(self._params, ids.tolist())
        if not np.array_equal(ids[self._begin :], self._sampler.output_ids(self._row)):
            message = (
                "the tokens do not continue with the sampled ones: make a new SamplingLogitsProcessor for each call"
            )
            raise ParameterError(FIELD, f"{message}; speculative decoding of mlx-lm is not supported")
        result = np.full(logits.shape, -np.inf, np.float32)
        result[..., sampled_token(self._sampler, self._row, logits)] = 0.0
        return mx.array(result)


@with_suggestions
class TokenSampler:
    """``mlx_lm.generate(model, tokenizer, prompt, sampler=sampler)``: as above, from log-probabilities.

    A sampler of mlx-lm does not see the tokens so far, so penalties, DRY, bad words and other stages that need them are
    errors that name the field. Make a new one for each call.

    sampler, params: as for ``SamplingLogitsProcessor``. Raises ParameterError.
    """

    def __init__(self, sampler: Sampler, params: Params | None = None) -> None:
        self._sampler, self._row = sampler, sampler.add(params)
        for stage in sampler.stages(self._row):
            if _reads_tokens(stage):
                sampler.remove(self._row)
                fields = [parameter.name for parameter in stage.parameters.values() if parameter.public]
                message = "needs the tokens so far, which a sampler of mlx-lm does not get: use SamplingLogitsProcessor"
                raise ParameterError((fields or [stage.name])[0], f"{(fields or [stage.name])[0]} {message}")

    def __call__(self, logprobs: Any) -> Any:
        """Sample. logprobs: float [1, V]. Returns the token, int [1]."""
        return mx.array([sampled_token(self._sampler, self._row, logprobs)])


def _reads_tokens(stage: Stage) -> bool:
    if isinstance(stage, Shift):
        is_listed = stage.touches in ("listed", "unlisted")
        return stage.touches != "masked" and not (is_listed and has_constant_listing(stage))
    return isinstance(stage, Transform) or (isinstance(stage, Draw) and stage.keyed)
