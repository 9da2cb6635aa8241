"""One answer of a request on its way out: tokens in, pieces out. Knows no model, no sampler and no other answer."""

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
    """The text and the end of one answer to a prompt."""

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
        self.prompt_logprobs: PromptLogprobs | None = None  #: to be told with the next piece
        self._matcher = StopMatcher(rules)
        self._shows_stop = rules.include_stop_str_in_output
        self._open = partial(Detokenizer, tokenizer, prompt_ids, params.skip_special_tokens)
        self._detokenizer: Detokenizer | None = None  # from the first token on: it reads all of the prompt

    def push(self, token: int, told: StepLogprobs | None, *, done: bool = False) -> CompletionChunk:
        """One more token, and its logprobs if they were asked for. done: nothing can follow it."""
        matcher, detokenizer = self._matcher, self._detokenizer
        if detokenizer is None:
            detokenizer = self._detokenizer = self._open()
        hidden = not self._shows_stop and matcher.is_stop_token(token)
        shown = matcher.push(token, "" if hidden else "".join(detokenizer.push(token)))
        if done:
            matcher.complete()
        if matcher.finish is not None:
            shown = (*shown, *matcher.close("".join(detokenizer.close())))
        return self._piece("".join(shown), (token,), matcher.finish, None if told is None else (told,))

    def end(self, finish: Finish) -> CompletionChunk:
        """It ends without a token: an abort, an error. What was held back is shown."""
        tail = "".join(self._detokenizer.close()) if self._detokenizer is not None else ""
        return self._piece("".join(self._matcher.close(tail)), (), finish, None)

    def _piece(
        self, text: str, tokens: tuple[int, ...], finish: Finish | None, told: tuple[StepLogprobs, ...] | None
    ) -> CompletionChunk:
        reason, detail = finish or (None, None)
        of_prompt, self.prompt_logprobs = self.prompt_logprobs, None
        validation = None if self.guide is None else self.guide.read(text, finish)
        return CompletionChunk(text, tokens, self.index, self.seed, reason, detail, told, of_prompt, validation)
