"""Turns the tokens of one sequence into output chunks: detokenization, stop criteria, logprobs, validation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nucleate.outputs import CompletionChunk, Finish, PromptLogprobs, StepLogprobs
from nucleate.sampling_params import SamplingParams
from nucleate.stopping.stop_matcher import StopMatcher, StopRules
from nucleate.structured_output import Guide
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


class OutputProcessor:
    """The output of one sequence."""

    def __init__(
        self,
        index: int,
        seed: int,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        guide: Guide | None = None,
    ) -> None:
        self.index, self.seed, self.guide = index, seed, guide
        self.prompt_logprobs: PromptLogprobs | None = None  #: to be sent with the next chunk
        self._matcher = StopMatcher(rules)
        ends = rules.stop_token_ids if rules.ignore_eos else rules.stop_token_ids | rules.eos_token_ids
        self._hidden = frozenset() if rules.include_stop_str_in_output else ends  # these show no text where they stop
        self._new_detokenizer = partial(Detokenizer, tokenizer, prompt_ids, params.skip_special_tokens)
        self._detokenizer: Detokenizer | None = None  # created with the first token: it decodes the prompt

    def push(self, token: int, logprobs: StepLogprobs | None, *, complete: bool = False) -> CompletionChunk:
        """Process one token and its logprobs, if they were requested. complete: the grammar allows no further token."""
        matcher, detokenizer = self._matcher, self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = self._new_detokenizer()
        hidden = token in self._hidden and matcher.is_stop_token(token)
        texts = matcher.push(token, "" if hidden else "".join(detokenizer.push(token)))
        if complete:
            matcher.complete()
        if matcher.finish is not None:
            texts = (*texts, *matcher.close("".join(detokenizer.close())))
        return self._chunk("".join(texts), (token,), matcher.finish, None if logprobs is None else (logprobs,))

    def end(self, finish: Finish) -> CompletionChunk:
        """End the output without a token (abort, error). Text that was held back is included."""
        tail = "".join(self._detokenizer.close()) if self._detokenizer is not None else ""
        return self._chunk("".join(self._matcher.close(tail)), (), finish, None)

    def _chunk(
        self, text: str, tokens: tuple[int, ...], finish: Finish | None, logprobs: tuple[StepLogprobs, ...] | None
    ) -> CompletionChunk:
        reason, detail = finish or (None, None)
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        validation = None if self.guide is None else self.guide.add_text(text, finish)
        return CompletionChunk(
            text, tokens, self.index, self.seed, reason, detail, logprobs, prompt_logprobs, validation
        )
