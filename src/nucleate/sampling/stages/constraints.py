"""Constraints: bias, ban or allow tokens.

The bias has not OpenAI's limit of -100 to 100, which belongs to its API and not to the method. Until an output has its
minimum length, the stop matcher ignores stop strings as well. A mask is the bitmask of a step, as from a grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from nucleate.parameters.converters import changed_copy
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, IncrementalListing, Shift, TextEncoder, TokenInfo, param


class LogitBias(Shift):
    """Add a number to the logits of given tokens."""

    rank = 10
    touches = "listed"
    bias: Mapping[int, float] = param("Map from token id to a number that is added to its logit", neutral={})

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return self.bias


class MinTokens(Shift):
    """Ban EOS and stop token ids until the output has a minimum length."""

    rank = 30
    touches = "listed"
    n: int = param(
        "Minimum number of output tokens before EOS or a stop may end the output", neutral=0, low=0, name="min_tokens"
    )
    ends: tuple[int, ...] = param(
        "The token ids that end the output: EOS and stop_token_ids", default=(), low=0, public=False
    )

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ends, -INFINITY) if len(history.output) < self.n else {}


class Allowed(Shift):
    """Ban all tokens except the given ones."""

    rank = 33
    touches = "unlisted"
    ids: tuple[int, ...] | None = param(
        "The only token ids that may be sampled", neutral=None, low=0, name="allowed_token_ids"
    )

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ids or (), 0.0)


class Suppress(Shift):
    """Ban given tokens."""

    rank = 32
    touches = "listed"
    ids: tuple[int, ...] = param("Token ids that are never sampled", neutral=(), low=0, name="suppress_token_ids")

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ids, -INFINITY)


class Mask(Shift):
    """Ban all tokens whose bit in the step's mask is 0; without a mask, do nothing."""

    rank = 39
    touches = "masked"

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x - INFINITY


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
