"""One answer under a grammar, by the library xgrammar, and the tokens as it is to see them. Knows no form.

The library knows neither UTF-8 nor which ids have no text: both are seen to here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from nucleate.text.structured.matcher import FAILED, NOTHING, Budget, MatcherError, check_masks
from nucleate.text.structured.timed import TimedMatcher
from nucleate.text.structured.vocabulary import Vocabulary, mask_of

FORCED: Final = 32
"""Tokens told at once."""

_BROKEN: Final = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""First bytes of characters, and the range of what must not follow them in UTF-8, which the library does not know."""
_BREAKS: Final = re.compile(b"|".join(b"%c[%c-%c]" % (first, *rest) for first, rest in _BROKEN.items()), re.DOTALL)


@final
class Words:
    """A vocabulary as xgrammar is to see it: ``tokens`` without those that are no text, or none in UTF-8."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        special = frozenset(vocabulary.special)
        self.tokens = [
            b"" if token in special or _BREAKS.search(data) else data for token, data in enumerate(vocabulary.tokens)
        ]
        self.ends, self.ends_W = vocabulary.ends, vocabulary.ends_W
        self._any_W = self.ends_W | mask_of((token for token, data in enumerate(self.tokens) if data), len(self.tokens))
        self._after_W = {
            first: self._any_W
            & ~mask_of(
                (token for token, data in enumerate(self.tokens) if data and low <= data[0] <= high), len(self.tokens)
            )
            for first, (low, high) in _BROKEN.items()
        }

    def after(self, pushed: Sequence[int]) -> NDArray[np.int32]:
        """The mask of the tokens that are text after these."""
        return self._after_W.get(self.tokens[pushed[-1]][-1], self._any_W) if pushed else self._any_W


@final
class XGrammarMatcher(TimedMatcher):
    """A Matcher by xgrammar. ``inner`` is a GrammarMatcher, which never gets an EOS id.

    ``next_W``: the mask of this state, once computed; whether anything but EOS can follow is read off it.
    """

    __slots__ = ("_answers", "_goes_on", "_words", "next_W")

    def __init__(
        self, inner: Any, words: Words, budget: Budget, *, answers: Budget | None = None, goes_on: bool = False
    ) -> None:
        super().__init__(inner, words.ends, budget)
        self._answers = answers or budget  # that of those that begin here
        self._words, self._goes_on = words, goes_on
        self.next_W: NDArray[np.int32] | None = None

    @property
    def stopped(self) -> bool:
        if not self.finished:
            return False
        if self._ended:
            return True
        try:
            return not (self._mask() & ~self._words.ends_W).any()
        except MatcherError:
            return False

    def fill(self, mask_W: NDArray[np.int32]) -> None:
        check_masks(mask_W, self._words.ends_W.shape)
        self._check()
        mask_W[:] = self._words.ends_W if self._ended else self._mask()

    def keep(self, mask_W: NDArray[np.int32]) -> None:
        """Take a mask that was computed for this state."""
        mask_W = mask_W & self._words.after(self._tokens)  # the library's has ids beyond the vocabulary
        more = mask_W & ~self._words.ends_W
        if not mask_W.any():
            self._error = NOTHING
        self.next_W = more if self._goes_on and more.any() else mask_W

    def _may_end(self) -> bool:
        return bool(self._timed(self.inner.is_completed))

    def _take(self, token_id: int) -> bool:
        tokens = self._words.tokens
        # What is no text would be refused with a line on stderr.
        text = 0 <= token_id < len(tokens) and bool(tokens[token_id]) and self._is_text(token_id)
        if not text or not self._timed(self.inner.accept_token, token_id):
            return False
        self.next_W = None
        return True

    def _take_back(self, count: int) -> None:
        self._timed(self.inner.rollback, count)
        self.next_W = None

    def forced(self) -> tuple[int, ...]:
        """Those that are the only ones a mask allows; where a text can be written in several ways, none is forced."""
        self._check()
        tokens: list[int] = []
        ahead = self
        while not ahead.ended and len(tokens) < FORCED:
            mask_W = ahead._mask()
            word = int(np.argmax(mask_W != 0))
            bits = int(mask_W[word]) & 0xFFFFFFFF
            if np.count_nonzero(mask_W) != 1 or bits & (bits - 1) or mask_W[word] & self._words.ends_W[word]:
                break
            ahead = self.copy() if ahead is self else ahead
            tokens.append(32 * word + bits.bit_length() - 1)
            ahead.push(tokens[-1])
        return tuple(tokens)

    def copy(self) -> XGrammarMatcher:
        return self._copied(self.budget, self._goes_on)

    def begun(self, *, goes_on: bool) -> XGrammarMatcher:
        made = self._copied(self._answers, goes_on)
        made.next_W = None
        return made

    def _copied(self, budget: Budget, goes_on: bool) -> XGrammarMatcher:
        self._check()
        made = XGrammarMatcher(self._timed(self.inner.fork), self._words, budget, goes_on=goes_on)
        made._slow = self._slow and budget is self.budget
        made._tokens, made._ended, made.next_W = self._tokens.copy(), self._ended, self.next_W
        return made

    def _is_text(self, token_id: int) -> bool:
        return bool(self._words.after(self._tokens)[token_id // 32] >> (token_id % 32) & 1)

    def _mask(self) -> NDArray[np.int32]:
        if self.next_W is None:
            mask_1W = np.zeros((1, len(self._words.ends_W)), np.int32)
            self._timed(self.inner.fill_next_token_bitmask, mask_1W, 0)
            self.keep(mask_1W[0])
        self._check()
        if self.next_W is None:  # pragma: no cover - it was kept
            raise AssertionError
        return self.next_W

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, RuntimeError):
            raise error
        self._error = FAILED
