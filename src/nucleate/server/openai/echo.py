"""The text and logprobs of a prompt that ``echo`` puts before its completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nucleate.outputs import PromptLogprobs
from nucleate.server.openai.logprobs import JSON, columns
from nucleate.server.openai.requests import ParsedRequest, Prompt
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


class Echo:
    """The text before each completion of a prompt, for a request with ``echo``.

    A text prompt is repeated as it is, token ids as their text. A character that the prompt begins and the completion
    ends belongs to the completion. Creating one tokenizes the whole prompt.
    """

    def __init__(self, request: ParsedRequest, index: int, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._request, self._prompt_ids, self._tokenizer = request, prompt_ids, tokenizer
        prompt = request.prompts[index]
        self.text = prompt if isinstance(prompt, str) else _text(request, prompt, tokenizer)
        self._offsets = list(self._token_offsets(prompt)) if request.returns_logprobs else []
        self._columns: JSON | None = None

    def prepend_logprobs(self, own: JSON, logprobs: PromptLogprobs | None) -> JSON:
        """Return the logprobs of a completion after those of its prompt."""
        if not self._offsets:
            return own
        if self._columns is None:
            steps = (None,) * len(self._prompt_ids) if logprobs is None else logprobs
            self._columns = columns(self._request, self._prompt_ids, steps, self._offsets, self._tokenizer)
        return {name: [*column, *own[name]] for name, column in self._columns.items()}

    def _token_offsets(self, prompt: Prompt) -> Iterator[int]:
        """Yield the offset of each token of the prompt. A special token that is not in the text has no length."""
        tokenizer, length = self._tokenizer, 0
        shows_special = isinstance(prompt, str) or not self._request.params.skip_special_tokens
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        for token in self._prompt_ids:
            yield min(length, len(self.text))
            if token in tokenizer.special_ids:
                special = tokenizer.pieces.as_bytes(token).decode(errors="replace")
                if not (shows_special and self.text.startswith(special, length)):
                    continue
            length += len(detokenizer.push(token))


def _text(request: ParsedRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the text of token ids, without an incomplete character that the completion may end."""
    skip = request.params.skip_special_tokens
    text = tokenizer.decode(prompt, skip)
    tail = "" if request.prompt_only else Detokenizer(tokenizer, prompt, skip).close()
    return text.removesuffix(tail)
