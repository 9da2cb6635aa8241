"""START HERE: the whole loop, for one sequence: prefill, sample, detokenize, stop, stream. No batch, no tricks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.logprobs import logprobs
from nucleate.core.event import Finish, Piece, PromptLogprobs, StepLogprobs
from nucleate.core.parameter import ParameterError
from nucleate.core.stage import Pipeline
from nucleate.models.model import Context, Limits, Model
from nucleate.params import SamplingParams
from nucleate.rows import check_ids
from nucleate.sampler import Sampler
from nucleate.text.detokenize import Detokenizer
from nucleate.text.stop import StopMatcher, StopRules
from nucleate.text.structured import Compiled, Grammars, Guide, form_of, why
from nucleate.text.tokenizer import Tokenizer


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    index: int = 0,
    grammars: Grammars | None = None,
) -> Iterator[Piece]:
    """Answer ``index`` to a prompt, a piece per token. Arguments are checked now, the model runs as pieces are taken.

    grammars: those of the tokenizer, if they are there already; params that ask for a form of text need them.
    Raises ParameterError for a prompt that is empty, too long or outside the vocabulary, and for parameters that the
    model or the stop rules refuse. Logits without a token to draw end the answer with finish_reason "error".
    """
    rules = admit(model, tokenizer, prompt_ids, params)
    stages = stages_of(params, model.vocab_size, tokenizer)
    form = form_of(params.structured, lambda: grammars or Grammars(tokenizer, model.vocab_size))
    return run(model, tokenizer, tuple(prompt_ids), params, stages, rules, form, index)


def stages_of(params: SamplingParams, vocab_size: int, tokenizer: Tokenizer) -> Pipeline:
    """The pipeline that parameters mean to a model and its tokenizer."""
    ends = tuple(token for token in tokenizer.eos_token_ids if token < vocab_size)  # others cannot be drawn
    stages = params.pipeline(ends, tokenizer)
    check_ids(stages, vocab_size)
    return stages


def run(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    stages: Pipeline,
    rules: StopRules,
    form: Compiled | None,
    index: int,
) -> Iterator[Piece]:
    """The loop itself."""
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
    matcher = StopMatcher(rules)
    guide = Guide(form, ignore_eos=params.ignore_eos) if form is not None else None
    sampler = Sampler(model.vocab_size)
    seed = sampler.seed(sampler.add(stages, prompt_ids, seed=params.seed, index=index))
    context = model.begin()
    told_of_prompt = None
    if params.prompt_logprobs is None or index:
        logits_V = context.forward(prompt_ids)
    else:
        logits_V, told_of_prompt = read_prompt(context, prompt_ids, params)
    while True:
        out = sampler(logits_V[None], mask=None if guide is None else guide.mask())
        if out.errors:
            text = "".join(matcher.close("".join(detokenizer.close())))
            finish = Finish("error", why(out.errors[0], guide))
            yield Piece(text, (), index, seed, *finish, None, told_of_prompt)
            return
        token = int(out.token_ids[0])
        hidden = matcher.is_stop_token(token) and not rules.include_stop_str_in_output
        text = "".join(matcher.push(token, "" if hidden else "".join(detokenizer.push(token))))
        if guide is not None and guide.push(token):
            matcher.complete()
        if matcher.finish is not None:
            text += "".join(matcher.close("".join(detokenizer.close())))
        validation = None if guide is None else guide.read(text, matcher.finish)
        reason, detail = matcher.finish or (None, None)
        told = None if out.logprobs is None or out.logprobs[0] is None else (out.logprobs[0],)
        yield Piece(text, (token,), index, seed, reason, detail, told, told_of_prompt, validation)
        told_of_prompt = None
        if matcher.finish is not None:
            return
        logits_V = context.forward((token,))


def admit(
    model: Limits, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams, regex_seconds: float = 0.5
) -> StopRules:
    """Check a request against the model before anything runs, and make its stop rules."""
    size, room = model.vocab_size, model.context_length - len(prompt_ids)
    if not len(prompt_ids):
        raise ParameterError("prompt", "the prompt is empty; it must have at least one token")
    if not all(0 <= token < size for token in prompt_ids):
        raise ParameterError("prompt", f"the prompt holds token ids outside the vocabulary (0..{size - 1})")
    if room < 1:
        raise ParameterError(
            "prompt",
            f"the prompt has {len(prompt_ids)} tokens, but the context holds {model.context_length} with the answer",
        )
    if params.min_tokens > room:
        message = f"min_tokens is {params.min_tokens}, but the context has room for {room} tokens after the prompt"
        raise ParameterError("min_tokens", message)
    for token in params.stop_token_ids:
        if token >= size:
            raise ParameterError(
                "stop_token_ids", f"stop_token_ids names token {token}, but the vocabulary ends at {size - 1}"
            )
    return StopRules(
        stop=params.stop,
        stop_token_ids=frozenset(params.stop_token_ids),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        stop_regex=params.stop_regex,
        stop_json=params.stop_json,
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        min_tokens=params.min_tokens,
        regex_seconds=regex_seconds,
    )


def read_prompt(
    context: Context, prompt_ids: tuple[int, ...], params: SamplingParams, most: int = 1 << 26
) -> tuple[NDArray[np.float32], PromptLogprobs]:
    """The logits after the prompt, and the logprobs of each of its tokens after those before it; None for the first.

    Read in parts, so that no more than ``most`` logits are held at a time.
    """
    told: list[StepLogprobs | None] = [None]
    top, asked = params.prompt_logprobs or 0, params.logprob_token_ids
    logits_TV = context.forward_all(prompt_ids[:1])
    ids_V = np.arange(logits_TV.shape[1])
    size = max(1, most // len(ids_V))
    for start in range(1, len(prompt_ids), size):
        part = prompt_ids[start : start + size]
        before_TV, logits_TV = logits_TV[-1:], context.forward_all(part)
        for x_V, token in zip((*before_TV, *logits_TV[:-1]), part, strict=True):
            told.append(logprobs(ids_V, x_V, token, top, asked) if np.isfinite(x_V.max()) else None)
    return logits_TV[-1], tuple(told)
