"""Bad words: token sequences that must not occur in the output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from nucleate.parameters.converters import changed_copy
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, IncrementalListing, Shift, TextEncoder, TokenInfo, param


class BadWords(Shift):
    """Ban the last token of a bad word when the output ends with the tokens before it."""

    rank = 31
    touches = "listed"
    words: tuple[str | tuple[int, ...], ...] = param(
        "Words that must not occur in the output: strings (these need a tokenizer) or lists of token ids",
        neutral=(),
        low=0,
        name="bad_words",
    )

    def encode_text(self, tokenizer: TextEncoder) -> Self:
        encoded = [tokenizer.spellings(word) if isinstance(word, str) else [word] for word in self.words]
        return replace(self, words=tuple(dict.fromkeys(ids for spellings in encoded for ids in spellings)))

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        output = [int(token) for token in history.output]
        return _banned(encoded_words(self.words), output)

    def incremental_listing(self, history: History) -> IncrementalListing:
        return IncrementalBadWords(encoded_words(self.words), [int(token) for token in history.output])


def encoded_words(words: Iterable[str | tuple[int, ...]]) -> list[list[int]]:
    """Check that all words are token ids. Raises ParameterError for a word that is text."""
    result = []
    for word in words:
        if isinstance(word, str):
            message = f"bad_words has the text {word!r}, but there is no tokenizer: give lists of token ids"
            raise ParameterError("bad_words", message)
        result.append([*word])
    return result


def _banned(words: Iterable[list[int]], output: list[int]) -> Mapping[int, float]:
    short = (word for word in words if len(word) <= len(output) + 1)
    return {word[-1]: -INFINITY for word in short if output[len(output) - len(word) + 1 :] == word[:-1]}


class IncrementalBadWords:
    """The incremental form of ``BadWords.listing``: looks only at words whose second-to-last token was just added."""

    def __init__(self, words: Iterable[list[int]], output: list[int]) -> None:
        self._output, self._always = output, {}
        self._by_last: dict[int, list[list[int]]] = {}
        for word in words:
            if len(word) == 1:
                self._always[word[0]] = -INFINITY
            else:
                self._by_last.setdefault(word[-2], []).append(word)

    def fork(self) -> Self:
        return changed_copy(self, _output=self._output.copy())

    def push(self, token: int) -> None:
        self._output.append(token)

    def listing(self) -> Mapping[int, float]:
        possible = self._by_last.get(self._output[-1], ()) if self._output else ()
        return {**self._always, **_banned(possible, self._output)}
