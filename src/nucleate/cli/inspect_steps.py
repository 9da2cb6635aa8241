"""Generates the tokens that ``generate`` gives, one by one, with a trace of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nucleate.engine.companions import Companion, admit_companion
from nucleate.engine.request import admit, stages_of
from nucleate.llm import LLM
from nucleate.outputs import Finish
from nucleate.sampling import noise, reference
from nucleate.sampling.companion import combined_rows, split_combine
from nucleate.sampling.distributions import is_stateful
from nucleate.sampling.history import History
from nucleate.sampling.presets import with_mask, without_mask
from nucleate.sampling.stage import Combine, Pipeline
from nucleate.sampling.trace import Trace, trace
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import CompiledGrammar, GrammarCompiler, Guide, compile_grammar
from nucleate.tokenization.detokenizer import Detokenizer


class InspectedToken(NamedTuple):
    """The trace of one token. output_ids: the tokens before it. text: that it completed. finish: of the last token."""

    trace: Trace
    output_ids: tuple[int, ...]
    text: str
    finish: Finish | None


class Row(NamedTuple):
    """What a token is sampled from: logits [V], those of the companion sequence, and the bitmask of the grammar [W]."""

    logits: NDArray[np.float32]
    companion: NDArray[np.float32] | None
    mask: NDArray[np.int32] | None


def inspected(llm: LLM, prompt_ids: list[int], params: SamplingParams, steps: int) -> Iterator[InspectedToken]:
    """Generate up to ``steps`` tokens, at least one, with their traces.

    Arguments are validated now; the model runs lazily. Raises ParameterError.
    """
    model = llm.model
    rules = admit(model, llm.tokenizer, prompt_ids, params)
    stages = stages_of(params, model.vocab_size, llm.tokenizer)
    grammar = compile_grammar(params.structured_outputs, lambda: GrammarCompiler(llm.tokenizer, model.vocab_size))
    companion = None
    if (stage := split_combine(stages)[0]) is not None:
        companion, rules = admit_companion(stage, prompt_ids, rules, model, llm.companion_model)
    rules = dataclasses.replace(rules, max_tokens=min(steps, rules.max_tokens or steps))
    return _run(llm, prompt_ids, params, stages, rules, grammar, companion)


def _run(
    llm: LLM,
    prompt_ids: list[int],
    params: SamplingParams,
    stages: Pipeline,
    rules: StopRules,
    grammar: CompiledGrammar | None,
    companion: Companion | None,
) -> Iterator[InspectedToken]:
    """The loop of ``generation/loop.py``, with ``trace`` instead of a ``Sampler``."""
    seed = params.seed
    seed = noise.fresh_seed() if seed is None else seed
    detokenizer = Detokenizer(llm.tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens)
    matcher, guide = StopMatcher(rules), None if grammar is None else Guide(grammar, ignore_eos=params.ignore_eos)
    context, output_ids, next_ids, other_ids = llm.model.begin(), list[int](), prompt_ids, list[int]()
    if companion is not None:
        model = llm.companion_model if companion.stage.companion_model and llm.companion_model else llm.model
        other, other_ids = model.begin(), [*companion.prompt_ids]
    while True:
        logits_V, other_V = context.forward(next_ids), other.forward(other_ids) if other_ids else None
        row = Row(logits_V, other_V, None if guide is None else guide.mask()[0])
        result = _trace(row, stages, prompt_ids, output_ids, seed)
        token, before = result.token_id, tuple(output_ids)
        if token is None:
            text = matcher.close(detokenizer.close())
            yield InspectedToken(result, before, text, Finish("error", result.error))
            return
        text = matcher.push(token, "" if matcher.is_stop_token(token) else detokenizer.push(token))
        if guide is not None and guide.accept_token(token):
            matcher.complete()
        if matcher.finish is not None:
            text += matcher.close(detokenizer.close())
        yield InspectedToken(result, before, text, matcher.finish)
        if matcher.finish is not None:
            return
        stages = _updated(row, stages, prompt_ids, output_ids, seed)
        output_ids.append(token)
        next_ids = [token]
        other_ids = next_ids if companion is not None else []


def _trace(row: Row, stages: Pipeline, prompt_ids: list[int], output_ids: list[int], seed: int) -> Trace:
    """The trace of the next token."""
    found: Trace = trace(
        row.logits,
        stages,
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        step=len(output_ids),
        mask=row.mask,
        companion=row.companion,
        seed=seed,
    )
    return found


def _updated(row: Row, stages: Pipeline, prompt_ids: list[int], output_ids: list[int], seed: int) -> Pipeline:
    """The stages after the next token: stateful ones, such as mirostat, learn from it."""
    if not any(map(is_stateful, stages)):
        return stages
    combine, own = split_combine(stages)
    other = None if row.companion is None else row.companion[None]
    logits_V = combined_rows([combine], row.logits[None], other)[0]
    masked = own if row.mask is None else with_mask(own)
    past = History(prompt_ids, output_ids, row.mask)
    updated = reference.run(logits_V, masked, seed, len(output_ids), past).stages
    first = stages[:1] if isinstance(stages[0], Combine) else ()
    return (*first, *(updated if masked is own else without_mask(updated)))
