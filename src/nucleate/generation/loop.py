"""START HERE: the generation loop for one sequence: prefill, sample, detokenize, stop, stream. It does not batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.companions import Companion, admit_companion
from nucleate.engine.request import admit, stages_of
from nucleate.models.protocol import DecodingContext, Model
from nucleate.outputs import CompletionChunk, Finish, PromptLogprobs, StepLogprobs
from nucleate.sampling.companion import split_combine
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Pipeline
from nucleate.sampling.token_logprobs import logprobs as token_logprobs
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, Guide, compile_grammar, error_message
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    index: int = 0,
    grammars: GrammarCompiler | None = None,
    companion_model: Model | None = None,
    *,
    sampler: Sampler | None = None,
    steps: int | None = None,
) -> Iterator[CompletionChunk]:
    """Generate output ``index`` of a prompt, one chunk per token. Arguments are validated now; the model runs lazily.

    grammars: a grammar compiler of the tokenizer; without one, it is created when structured output needs it.
    companion_model: the weaker model of contrastive decoding. sampler: a new ``Sampler``, None: one of the loop's own.
    steps: the maximum number of tokens, besides that of params.
    Raises ParameterError for a prompt that is empty, too long or outside the vocabulary, and for parameters that do not
    fit the model. Invalid logits end the output with finish_reason "error".
    """
    rules = admit(model, tokenizer, prompt_ids, params)
    stages = stages_of(params, model.vocab_size, tokenizer)
    grammar = compile_grammar(
        params.structured_outputs, lambda: grammars or GrammarCompiler(tokenizer, model.vocab_size)
    )
    companion = None
    if (stage := split_combine(stages)[0]) is not None:
        companion, rules = admit_companion(stage, prompt_ids, rules, model, companion_model)
    if steps is not None:
        rules = replace(rules, max_tokens=min(steps, rules.max_tokens or steps))
    models, sampler = (model, companion_model or model), Sampler(model.vocab_size) if sampler is None else sampler
    return run(models, tokenizer, tuple(prompt_ids), params, stages, rules, grammar, companion, index, sampler)


def run(
    models: tuple[Model, Model],
    tokenizer: Tokenizer,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    stages: Pipeline,
    rules: StopRules,
    grammar: CompiledGrammar | None,
    companion: Companion | None,
    index: int,
    sampler: Sampler,
) -> Iterator[CompletionChunk]:
    """The loop of ``generate``, with validated arguments. models: the model and the companion model."""
    model, other_V = models[0], None
    detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
    matcher = StopMatcher(rules)
    guide = Guide(grammar, ignore_eos=params.ignore_eos) if grammar is not None else None
    seed = sampler.seed(sampler.add(stages, prompt_ids, seed=params.seed, index=index))
    context = model.begin()
    prompt_logprobs = None
    if params.prompt_logprobs is None or index:
        logits_V = context.forward(prompt_ids)
    else:
        logits_V, prompt_logprobs = read_prompt(context, prompt_ids, params)
    if companion is not None:
        other = models[companion.stage.companion_model].begin()
        other_V = other.forward(companion.prompt_ids)
    while True:
        mask, others = None if guide is None else guide.mask(), None if other_V is None else other_V[None]
        out = sampler(logits_V[None], mask=mask, companion=others)
        if out.errors:
            text = matcher.close(detokenizer.close())
            finish = Finish("error", error_message(out.errors[0], guide))
            yield CompletionChunk(text, (), index, seed, *finish, None, prompt_logprobs)
            return
        token = int(out.token_ids[0])
        hidden = matcher.is_stop_token(token) and not rules.include_stop_str_in_output
        text = matcher.push(token, "" if hidden else detokenizer.push(token))
        if guide is not None and guide.accept_token(token):
            matcher.complete()
        if matcher.finish is not None:
            text += matcher.close(detokenizer.close())
        validation = None if guide is None else guide.add_text(text, matcher.finish)
        reason, detail = matcher.finish or (None, None)
        logprobs = None if out.logprobs is None or out.logprobs[0] is None else (out.logprobs[0],)
        yield CompletionChunk(text, (token,), index, seed, reason, detail, logprobs, prompt_logprobs, validation)
        prompt_logprobs = None
        if matcher.finish is not None:
            return
        logits_V = context.forward((token,))
        if companion is not None:
            other_V = other.forward((token,))


def read_prompt(
    context: DecodingContext, prompt_ids: tuple[int, ...], params: SamplingParams, max_logits: int = 1 << 26
) -> tuple[NDArray[np.float32], PromptLogprobs]:
    """Compute a prompt with logprobs: the logits after it, and the logprobs of each prompt token (None for the first).

    The prompt is computed in chunks of at most ``max_logits`` logits.
    """
    prompt_logprobs: list[StepLogprobs | None] = [None]
    top, more = params.prompt_logprobs or 0, params.logprob_token_ids
    logits_TV = context.forward_all(prompt_ids[:1])
    ids_V = np.arange(logits_TV.shape[1])
    size = max(1, max_logits // len(ids_V))
    for start in range(1, len(prompt_ids), size):
        part = prompt_ids[start : start + size]
        before_TV, logits_TV = logits_TV[-1:], context.forward_all(part)
        for x_V, token in zip((*before_TV, *logits_TV[:-1]), part, strict=True):
            prompt_logprobs.append(token_logprobs(ids_V, x_V, token, top, more) if np.isfinite(x_V.max()) else None)
    return logits_TV[-1], tuple(prompt_logprobs)
