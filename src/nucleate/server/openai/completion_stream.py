"""The stream of ``/v1/completions``."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import final

from nucleate.server.openai.echo import Echo
from nucleate.server.openai.logprobs import JSON, TextOffsets, columns
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead
from nucleate.server.openai.stream_chunks import ResponseStream, StreamChoice
from nucleate.tokenization.tokenizer import Tokenizer


@final
class CompletionStream(ResponseStream):
    """The stream of ``/v1/completions``; with echo it starts with the prompt."""

    kind = "text_completion"
    text_prefix, text_suffix, prompt_in_choice = '"text":', "", True

    def __init__(
        self, head: ResponseHead, request: ParsedRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        super().__init__(head, request, prompts, tokenizer)
        self._echoes = [Echo(request, index, ids, tokenizer) for index, ids in enumerate(prompts) if request.echo]

    def _offset_counter(self, prompt_ids: Sequence[int]) -> TextOffsets | None:
        return TextOffsets(self._request, prompt_ids, self._tokenizer) if self._request.returns_logprobs else None

    def _flush(self, choice: StreamChoice) -> Iterator[JSON]:
        last, with_logprobs = choice.finish_reason is not None, self._request.returns_logprobs
        echo = self._echoes[choice.prompt] if self._echoes else None
        prefix = "" if echo is None else echo.text
        text = choice.text if choice.started else prefix + choice.text
        end = choice.sent + len(choice.text)
        # A token beyond the final text may still turn out to start at its end, so it is not sent yet.
        count = bisect_right(choice.text_offsets, end) if with_logprobs and not last else len(choice.token_ids)
        if not (text or last or (with_logprobs and count)):
            return
        logprobs = None
        if with_logprobs and (count or not choice.started):
            offsets = [len(prefix) + min(start, end) for start in choice.text_offsets[:count]]
            logprobs = columns(
                self._request, choice.token_ids[:count], choice.logprobs[:count], offsets, self._tokenizer
            )
            if echo is not None and not choice.started:
                logprobs = echo.prepend_logprobs(logprobs, self._prompt_logprobs[choice.prompt])
        yield self._choice(choice, {"text": text}, count, logprobs, last=last)
        choice.clear(count)
