"""nucleate inside llama-cpp-python: as a logits processor of its completions, as a custom sampler, or in a plain loop.

All three sample from the logits that llama.cpp computes. The tokens are those of ``LLM`` with the same GGUF file, apart
from rounding in the forward pass: ``Llama(path, flash_attn=True)`` computes attention as ``LLM`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np

from nucleate.llm.model_loading import load_sampler
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.functional import LogitsError
from nucleate.sampling.pipeline import Params
from nucleate.sampling.sampler import Sampler

logger = logging.getLogger("nucleate")

FIELD = "logits_processor"
RETURNED = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)], align=True)
"""llama.cpp's ``llama_token_data``."""


def model_sampler(llama: Any) -> Sampler:
    """A ``Sampler`` for a model, with the parameters that its file recommends as defaults, its EOS ids and tokenizer.

    llama: a ``llama_cpp.Llama``. Reading the vocabulary takes a second for large ones: keep the sampler for several
    requests, and pass it to the functions below.
    """
    return load_sampler(llama.model_path, vocab_size=llama.n_vocab())


def sampled_token(sampler: Sampler, row: int, logits_V: Any) -> int:
    """Sample the next token of a row. logits_V: float32 [V]. Raises LogitsError for a row that cannot be sampled."""
    out = sampler(logits_V[None], [row])
    if out.errors:
        raise LogitsError(out.errors)
    return int(out.token_ids[0])


@with_suggestions
class SamplingLogitsProcessor:
    """``llama.create_completion(prompt, logits_processor=[processor], temperature=0)``: sample with nucleate.

    It leaves the sampled token alone, so that llama-cpp-python selects it; its own sampling parameters have no effect,
    except ``logit_bias`` and a grammar, which come after it and must not be used. Streams, chats and stop strings of
    llama-cpp-python work as before. Make a new one for each call.

    llama: a ``llama_cpp.Llama``. params: a SamplingParams or a pipeline; None: what the model's file recommends.
    sampler: from ``model_sampler``, by default a new one. Raises ParameterError for fields that end outputs, such as
    ``stop`` and ``max_tokens``: set those of llama-cpp-python.
    """

    def __init__(self, llama: Any, params: Params | None = None, sampler: Sampler | None = None) -> None:
        self._sampler = model_sampler(llama) if sampler is None else sampler
        self._params, self._row, self._begin = params, -1, 0
        self._sampler.remove(self._sampler.add(params))  # raises for parameters that it cannot apply

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Sample. input_ids: int [T], the tokens so far. scores: float32 [V]. Returns the new scores."""
        if self._row < 0:
            self._begin, self._row = len(input_ids), self._sampler.add(self._params, input_ids)
        output = self._sampler.output_ids(self._row)
        if not np.array_equal(input_ids[self._begin : self._begin + len(output)], output):
            message = (
                "the tokens do not continue with the sampled ones: make a new SamplingLogitsProcessor for each call"
            )
            raise ParameterError(FIELD, message)
        token = sampled_token(self._sampler, self._row, np.ascontiguousarray(scores, np.float32))
        result = np.full(len(scores), -np.inf, np.float32)
        result[token] = 0.0
        return result


def custom_sampler(
    llama: Any, params: Params | None = None, prompt_ids: Sequence[int] = (), sampler: Sampler | None = None
) -> Callable[[Any], None]:
    """A function for ``LlamaSampler.add_custom``, the only sampler of a chain of llama.cpp.

    llama, params, sampler: as for ``SamplingLogitsProcessor``. prompt_ids: the tokens of the prompt, for penalties.
    Each call samples a token and leaves it alone in llama.cpp's array, selected. A row that cannot be sampled is
    logged, and ends the output with an EOS token: llama.cpp has no way to return an error. Raises ParameterError.
    """
    own = model_sampler(llama) if sampler is None else sampler
    row = own.add(params, prompt_ids)

    def apply(array: Any) -> None:
        tokens = array.contents
        found = np.ctypeslib.as_array(tokens.data, (tokens.size,)).view(RETURNED).reshape(-1)
        logits_V = np.full(own.vocab_size, -np.inf, np.float32)
        logits_V[found["id"]] = found["logit"]
        try:
            token = sampled_token(own, row, logits_V)
        except LogitsError as error:
            logger.error("the output ends: %s", error)  # noqa: TRY400  # the message says it
            token = own.eos_token_ids[0]
        found[0] = token, 0.0, 1.0
        tokens.size, tokens.selected, tokens.sorted = 1, 0, True

    return apply


def generate_tokens(
    llama: Any, prompt_ids: Sequence[int], params: Params | None = None, sampler: Sampler | None = None
) -> Iterator[int]:
    """Generate tokens in a plain loop, until the model ends the output or the context is full; the last one is the end.

    llama: a ``llama_cpp.Llama``, whose state is reset. prompt_ids: at least one token, from ``llama.tokenize``. params,
    sampler: as for ``SamplingLogitsProcessor``. Take as many tokens as you need. Raises LogitsError, ParameterError.
    """
    own = model_sampler(llama) if sampler is None else sampler
    row, ends = own.add(params, prompt_ids), frozenset(own.eos_token_ids)
    llama.reset()
    tokens = [*prompt_ids]
    try:
        while llama.n_tokens + len(tokens) <= llama.n_ctx():
            llama.eval(tokens)
            logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
            tokens = [sampled_token(own, row, np.ctypeslib.as_array(logits, (own.vocab_size,)))]
            yield tokens[0]
            if tokens[0] in ends:
                return
    finally:
        own.remove(row)
