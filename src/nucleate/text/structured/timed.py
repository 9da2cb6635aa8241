"""What matchers do whatever library they ask: an error stays, slow calls are charged, EOS ids count once it has ended.

Knows no library, and no mask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from time import perf_counter
from typing import Any

from nucleate.text.structured.matcher import FREE_SECONDS, TOO_SLOW, Budget, MatcherError


class TimedMatcher(ABC):
    """The part of a Matcher that all libraries share.

    ``inner`` is the library's, of this answer alone, and gets no EOS id that ends it; ``budget`` is for slow calls.
    """

    __slots__ = ("_ended", "_ends", "_error", "_slow", "_tokens", "budget", "inner")

    def __init__(self, inner: Any, ends: frozenset[int], budget: Budget) -> None:
        self.inner, self.budget = inner, budget
        self._ends = ends
        self._tokens: list[int] = []  # that ``inner`` has taken
        self._ended = 0  # EOS ids after them
        self._slow = False  # the last call
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def ended(self) -> bool:
        """Whether an EOS id was pushed."""
        return self._ended > 0

    @property
    def finished(self) -> bool:
        return self._error is None and (self._ended > 0 or self._may_end())

    def push(self, token_id: int) -> None:
        self._check()
        if token_id in self._ends and (self._ended or self._may_end()):
            self._ended += 1
            return
        if self._ended or not self._take(token_id):
            raise ValueError(f"token {token_id} is not allowed here")
        self._tokens.append(token_id)

    def rollback(self, count: int) -> None:
        self._check()
        if not 0 <= count <= len(self._tokens) + self._ended:
            raise ValueError(f"cannot take back {count} of {len(self._tokens) + self._ended} tokens")
        ends = min(count, self._ended)
        if count > ends:
            self._take_back(count - ends)
        self._ended -= ends
        del self._tokens[len(self._tokens) - (count - ends) :]

    @abstractmethod
    def _may_end(self) -> bool:
        """Whether the grammar may end after the tokens so far."""

    @abstractmethod
    def _take(self, token_id: int) -> bool:
        """Have the library take a token. False, and all stays as it was, if it does not."""

    @abstractmethod
    def _take_back(self, count: int) -> None:
        """Have the library take back the last tokens."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Keep a failure of the library as this matcher's error; raise anything else again."""

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the library says to a call."""
        begin = perf_counter()
        try:
            return call(*arguments)
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            self.fail(error)
        finally:
            self._slow = perf_counter() - begin > FREE_SECONDS and self.budget.charge(begin)
            if self._slow and self.budget.empty and self._error is None:
                self._error = TOO_SLOW
        raise MatcherError(self._error)

    def _check(self) -> None:
        if self._slow and self.budget.empty and self._error is None:
            self._error = TOO_SLOW
        if self._error is not None:
            raise MatcherError(self._error)
