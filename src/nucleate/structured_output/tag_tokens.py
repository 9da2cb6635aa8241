"""Finds the special tokens of a tokenizer in the texts of structural tags and triggers."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import NamedTuple, final

from nucleate.parameters.converters import shown
from nucleate.structured_output.tag_formats import Token, reject
from nucleate.structured_output.vocabulary import Vocabulary


class FoundToken(NamedTuple):
    """A special token in a text: where it begins and ends, and its id."""

    start: int
    end: int
    token_id: int


@final
class SpecialTokens:
    """The special tokens of a vocabulary by their text. The longest one counts where several begin."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        names = vocabulary.tokenizer.pieces.tokens
        special = [token for token in vocabulary.special_ids if token in vocabulary.allowed_ids]
        self._ids = {names[token]: token for token in reversed(special) if names[token]}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def find(self, text: str, start: int = 0) -> FoundToken | None:
        """Return the first special token in a text, from a position on."""
        found = self._any.search(text, start)
        return None if found is None else FoundToken(found.start(), found.end(), self._ids[found[0]])

    def can_spell(self, text: str) -> bool:
        """Return whether other tokens can write the special tokens in a text, as characters."""
        found = self.find(text)
        while found is not None:
            if not self._spelled(text[found.start : found.end].encode()):
                return False
            found = self.find(text, found.end)
        return True

    @lru_cache(1024)  # noqa: B019  # one per model
    def _spelled(self, data: bytes) -> bool:
        reached = {0}
        for end in range(1, len(data) + 1):
            if any(data[start:end] in self._ordinary for start in reached):
                reached.add(end)
        return len(data) in reached

    @cached_property
    def _ordinary(self) -> frozenset[bytes]:
        special = frozenset(self._vocabulary.special_ids)
        return frozenset(data for token, data in enumerate(self._vocabulary.tokens) if token not in special)

    def text(self, token_id: int) -> str:
        return self._vocabulary.tokenizer.pieces.tokens[token_id]

    def is_token(self, reference: str, token_id: int) -> bool:
        """Return whether a reference of a grammar, ``<[id]>`` or ``<name>``, is a token."""
        return reference in (f"<[{token_id}]>", self.text(token_id))

    def resolve(self, token: Token) -> int | str:
        """Return the id of a special token, or the text of another token. Raises ParameterError for an unknown one."""
        vocabulary, given = self._vocabulary, token.token
        token_id = vocabulary.tokenizer.backend.token_to_id(given) if isinstance(given, str) else given
        if token_id not in vocabulary.allowed_ids:
            reject(token.at, f"{shown(given)} is not a token of this model")
        if token_id in vocabulary.special_ids:
            return token_id
        try:
            return vocabulary.tokens[token_id].decode()
        except UnicodeDecodeError:
            reject(token.at, f"{shown(given)} must be a special token, or one with a text")
