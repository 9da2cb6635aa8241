"""The rows of a generation loop that belongs to another library: sampling, stop criteria and outputs of each row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nucleate.engine.request import stop_rules
from nucleate.engine.running_request import OutputProcessor
from nucleate.outputs import Completion, CompletionChunk, Finish, FinishReason, StepLogprobs
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.functional import LogitsError
from nucleate.sampling.inputs import check_ids
from nucleate.sampling.pipeline_format import is_pipeline
from nucleate.sampling.sampler import Sampler
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import Guide, error_message
from nucleate.structured_output.grammar_manager import GrammarManager
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer

NEED_TEXT = ("stop", "stop_regex", "stop_json", "structured_outputs")
"""Fields that need a tokenizer."""


def params_of_rows(given: Any, count: int, copies: int, defaults: SamplingParams | None = None) -> list[SamplingParams]:
    """The parameters of each row: ``given`` for all, or a list with one entry per prompt, each with ``copies`` rows.

    An entry is a SamplingParams or a pipeline. defaults: for fields that an entry does not set. Raises ParameterError.
    """
    is_list = isinstance(given, list | tuple) and not is_pipeline(given)
    entries, prompts = (list(given) if is_list else [given] * (count // copies)), count // copies
    if len(entries) != prompts:
        got = f"got {len(entries)} of them for {prompts} prompts"
        raise ParameterError("sampling_params", f"a list of sampling_params must have one per prompt; {got}")
    return [_params(one, defaults) for one in entries for _ in range(copies)]


def _params(given: Any, defaults: SamplingParams | None) -> SamplingParams:
    params = (
        SamplingParams(pipeline=given) if isinstance(given, tuple) else SamplingParams() if given is None else given
    )
    if not isinstance(params, SamplingParams):
        allowed = "a SamplingParams, a tuple of stages, or a list with one of these per prompt"
        raise ParameterError("sampling_params", f"sampling_params must be {allowed}, got {shown(given)}")
    if params.n != 1:
        raise ParameterError("n", f"n must be 1: num_return_sequences sets the outputs per prompt, got {params.n}")
    if params.prompt_logprobs is not None:
        raise ParameterError("prompt_logprobs", "prompt_logprobs needs LLM: the logits of the prompt are not available")
    return params if defaults is None else params.with_defaults(defaults)


class DecodingRows:
    """Samples a batch of rows, each until its own stop criteria end it.

    params, prompts: one per row. copies: rows per prompt; the seed of row i is that of its parameters plus i modulo
    copies. tokenizer: needed for NEED_TEXT and for text in other fields. Raises ParameterError.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        copies: int = 1,
        eos_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._sampler, self.tokens = Sampler(vocab_size), [-1] * len(params)
        self._grammars = None if tokenizer is None else GrammarManager(tokenizer, vocab_size, None)
        self._prompts, self._copies = prompts, copies
        ends = tuple(sorted(token for token in eos_token_ids if token < vocab_size))  # others cannot be sampled
        self.rows: list[_Row] = []
        for place, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
            if tokenizer is None and (names := [name for name in NEED_TEXT if getattr(one, name)]):
                raise ParameterError(names[0], f"{names[0]} needs the tokenizer of the model")
            stages = one.build_pipeline(ends, tokenizer)
            check_ids(stages, vocab_size)
            number = self._sampler.add(stages, prompt, seed=one.seed, index=place % copies)
            rules = stop_rules(one, eos_token_ids, one.max_tokens, tokenizer=tokenizer)
            seed = self._sampler.seed(number)
            grammar = None if self._grammars is None else self._grammars.compile(one.structured_outputs)
            guide = None if grammar is None else Guide(grammar, ignore_eos=one.ignore_eos)
            self.rows.append(_Row(place % copies, seed, tokenizer, prompt, one, rules, guide))

    @property
    def unfinished(self) -> list[int]:
        """The rows that have not finished."""
        return [place for place, row in enumerate(self.rows) if not row.finished]

    def distributions(self, logits_RV: Any) -> list[Any]:
        """The distribution from which the next token of each row is sampled, float64 [V]; None for finished rows."""
        found: list[Any] = [None] * len(self.rows)
        for place in self.unfinished:
            guide = self.rows[place].guide
            masks = None if guide is None else [guide.mask()[0]]
            found[place] = np.asarray(self._sampler.distributions(place, logits_RV[place][None], masks=masks)[0])
        return found

    def sample(self, logits_RV: Any) -> list[int]:
        """Sample the next token of each unfinished row; the others keep their last token. Raises LogitsError."""
        active = self.unfinished
        if not active:
            return self.tokens
        guides = [self.rows[place].guide for place in active]
        mask = None if self._grammars is None else self._grammars.mask(guides)
        out = self._sampler(logits_RV[active], active, mask=mask)
        if out.errors:
            raise LogitsError({active[i]: error_message(text, guides[i]) for i, text in out.errors.items()})
        logprobs = out.logprobs or [None] * len(active)
        for place, token, step in zip(active, out.token_ids.tolist(), logprobs, strict=True):
            self.tokens[place] = token
            self.rows[place].push(token, step)
        return self.tokens

    def completions(self) -> list[Completion]:
        """A completion per prompt, with the text if there is a tokenizer. Ends all rows."""
        for row in self.rows:
            row.end("length")
        starts = range(0, len(self.rows), self._copies)
        return [
            Completion.from_chunks(
                self._prompts[start], [chunk for row in self.rows[start : start + self._copies] for chunk in row.chunks]
            )
            for start in starts
        ]


class _Row:
    """The output of one row."""

    def __init__(
        self,
        index: int,
        seed: int,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        guide: Guide | None,
    ) -> None:
        self.guide, self.finished, self._index, self._seed = guide, False, index, seed
        self._matcher = StopMatcher(rules)  # of a row without a tokenizer
        self._processor = None
        if tokenizer is not None:
            new_detokenizer = partial(Detokenizer, tokenizer, prompt, params.skip_special_tokens)
            self._processor = OutputProcessor(index, seed, new_detokenizer, rules, guide)
        self.chunks: list[CompletionChunk] = []

    def push(self, token: int, logprobs: StepLogprobs | None) -> None:
        """Append a sampled token."""
        complete = self.guide is not None and self.guide.accept_token(token)
        if self._processor is not None:
            chunk = self._processor.push(token, logprobs, complete=complete)
        else:
            self._matcher.push(token, "")
            steps = None if logprobs is None else (logprobs,)
            chunk = self._chunk((token,), self._matcher.finish, steps)
        self.chunks.append(chunk)
        self.finished = chunk.finish_reason is not None

    def end(self, reason: FinishReason, *, drop: bool = False) -> None:
        """End the row, unless it has ended. drop: without its last token."""
        if not self.finished:
            if drop:
                self.chunks.pop()
            finish, self.finished = Finish(reason), True
            self.chunks.append(self._chunk((), finish) if self._processor is None else self._processor.end(finish))

    def _chunk(
        self, tokens: tuple[int, ...], finish: Finish | None, logprobs: tuple[StepLogprobs, ...] | None = None
    ) -> CompletionChunk:
        reason, detail = finish or (None, None)
        return CompletionChunk("", tokens, self._index, self._seed, reason, detail, logprobs, None, None)
