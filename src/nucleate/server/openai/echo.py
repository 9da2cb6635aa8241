"""A prompt as the answers to it repeat it, text and logprobs. Knows no answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nucleate.outputs import PromptLogprobs
from nucleate.server.openai.logprobs import JSON, columns
from nucleate.server.openai.requests import ParsedRequest, Prompt
from nucleate.tokenization.detokenizer import Detokenizer
from nucleate.tokenization.tokenizer import Tokenizer


class Echo:
    """What stands before each answer to a prompt: nothing, unless the request asks for echo.

    A prompt that came as text is shown as it came, and token ids as their text. Characters that a prompt begins and an
    answer completes are the answer's. Making one reads the whole prompt.
    """

    def __init__(self, asked: ParsedRequest, place: int, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self._asked, self._prompt_ids, self._tokenizer = asked, prompt_ids, tokenizer
        prompt = asked.prompts[place] if asked.echo else ""
        self.text = prompt if isinstance(prompt, str) else _text(asked, prompt, tokenizer)
        self._offsets = list(self._places(prompt)) if asked.echo and asked.tells_logprobs else []
        self._columns: JSON | None = None

    def before(self, own: JSON, told: PromptLogprobs | None) -> JSON:
        """The columns of an answer after those of its prompt. told: what is known of it, the same in all calls."""
        if not self._offsets:
            return own
        if self._columns is None:
            steps = (None,) * len(self._prompt_ids) if told is None else told
            self._columns = columns(self._asked, self._prompt_ids, steps, self._offsets, self._tokenizer)
        return {name: [*column, *own[name]] for name, column in self._columns.items()}

    def _places(self, prompt: Prompt) -> Iterator[int]:
        """Where each token of the prompt begins. A special token that the text does not have there has no length."""
        tokenizer, length = self._tokenizer, 0
        shows_special = isinstance(prompt, str) or not self._asked.params.skip_special_tokens
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        for token in self._prompt_ids:
            yield min(length, len(self.text))
            if token in tokenizer.special_ids:
                spelled = tokenizer.pieces.as_bytes(token).decode(errors="replace")
                if not (shows_special and self.text.startswith(spelled, length)):
                    continue
            length += sum(map(len, detokenizer.push(token)))


def _text(asked: ParsedRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of token ids: if an answer follows, without an incomplete character at the end, which that completes."""
    skip = asked.params.skip_special_tokens
    text = tokenizer.decode(prompt, skip)
    tail = "" if asked.silent else "".join(Detokenizer(tokenizer, prompt, skip).close())
    return text.removesuffix(tail)
