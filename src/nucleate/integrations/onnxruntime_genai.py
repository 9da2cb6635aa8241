"""nucleate inside onnxruntime-genai: it computes the logits, and takes the tokens that nucleate samples."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from nucleate.llm.model_loading import given_tokenizer
from nucleate.models.model_files import read_config
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.functional import LogitsError
from nucleate.sampling.pipeline import Params
from nucleate.sampling.sampler import Sampler
from nucleate.sampling_params import SamplingParams

CONFIG = "genai_config.json"
SAMPLING = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
ALWAYS = {"repetition_penalty": "repetition_penalty", "no_repeat_ngram_size": "no_repeat_ngram_size"}
"""Search options of a model that are defaults, and the fields of SamplingParams; the former only with do_sample."""


def model_sampler(folder: str | os.PathLike[str]) -> Sampler:
    """A ``Sampler`` for a model, with the search options in its genai_config.json as defaults.

    folder: of the model, with its tokenizer.json. EOS ids and the tokenizer are the model's, too. Where you have the
    folder that it was exported from, ``nucleate.load_sampler`` on that one has the defaults of ``LLM``. Raises
    ModelError.
    """
    config = read_config(Path(folder) / CONFIG)
    model, search = config.get("model", {}), config.get("search", {})
    size, eos = model.get("vocab_size"), model.get("eos_token_id", ())
    if not isinstance(size, int):
        raise ModelError(f"{Path(folder) / CONFIG} has no vocab_size")
    names = {**ALWAYS, **(SAMPLING if search.get("do_sample") else {})}
    values = {field: search[name] for name, field in names.items() if search.get(name) is not None}
    ends = sorted(token for token in (eos if isinstance(eos, list) else [eos]) if token < size)
    return Sampler(size, defaults=SamplingParams(**values), eos_token_ids=ends, tokenizer=given_tokenizer(folder))


def append_next(generator: Any, sampler: Sampler, row: int) -> int:
    """Sample the next token from the logits of a generator, and append it to the generator. Returns the token.

    generator: an ``onnxruntime_genai.Generator`` of one sequence, to which the prompt has been appended. sampler, row:
    from ``model_sampler``, and ``sampler.add(params, prompt_ids)``. The generator's own search options have no effect,
    except ``max_length``. Raises LogitsError for a row that cannot be sampled, ValueError for several sequences.
    """
    logits = generator.get_logits()
    if logits.size // logits.shape[-1] != 1:
        raise ValueError(f"the generator must have one sequence, got logits of the shape {list(logits.shape)}")
    out = sampler(np.asarray(logits, np.float32).reshape(1, -1), [row])
    if out.errors:
        raise LogitsError(out.errors)
    token = int(out.token_ids[0])
    generator.append_tokens(np.array([token], np.int32))
    return token


def generate_tokens(
    model: Any, prompt_ids: Sequence[int], params: Params | None, sampler: Sampler, max_length: int
) -> Iterator[int]:
    """Generate tokens until the model ends the output, or prompt and output have ``max_length`` tokens.

    model: an ``onnxruntime_genai.Model``. prompt_ids: at least one token. params: a SamplingParams or a pipeline; None:
    the sampler's defaults. sampler: from ``model_sampler``. The last token may be an end. Raises ParameterError for
    parameters that the sampler cannot apply, such as ``stop``; LogitsError.
    """
    if not len(prompt_ids) or max_length <= len(prompt_ids):
        got = f"got {max_length} for a prompt of {len(prompt_ids)} tokens"
        raise ParameterError(
            "max_length", f"max_length must be greater than the length of a prompt, which is not empty; {got}"
        )
    row, options = sampler.add(params, prompt_ids), og.GeneratorParams(model)
    options.set_search_options(max_length=max_length, batch_size=1, do_sample=False)
    try:
        generator = og.Generator(model, options)
        generator.append_tokens(np.asarray(prompt_ids, np.int32))
        for _ in range(max_length - len(prompt_ids)):
            token = append_next(generator, sampler, row)
            yield token
            if token in sampler.eos_token_ids:
                return
    finally:
        sampler.remove(row)
