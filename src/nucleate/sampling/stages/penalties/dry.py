"""DRY, "don't repeat yourself" (p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log
from typing import Any, Self

from nucleate.parameters.converters import changed_copy
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import History, IncrementalListing, Shift, TextEncoder, TokenInfo, param
from nucleate.sampling.suffix_automaton import RepeatIndex, WindowRepeatIndex, longest_repeats, repeat_lengths

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
LARGEST = 87.0  # exp of it is finite in float32


class Dry(Shift):
    """Penalise tokens that would extend a repetition of earlier text; the penalty grows with its length."""

    rank = 23
    touches = "listed"
    multiplier: float = param(
        "Penalty, in logits, of the shortest penalised repetition; 0 disables DRY",
        neutral=0.0,
        low=0.0,
        name="dry_multiplier",
    )
    base: float = param(
        "Factor by which the penalty grows with each further repeated token", default=1.75, low=1.0, name="dry_base"
    )
    allowed_length: int = param(
        "Number of tokens that may repeat before the next one is penalised", default=2, low=1, name="dry_allowed_length"
    )
    breakers: tuple[str | tuple[int, ...], ...] | None = param(
        "Repetitions do not continue across these: strings (every token that contains one) or lists of token ids; "
        'none: newline, ":", "*" and the double quote, if there is a tokenizer',
        default=None,
        low=0,
        name="dry_sequence_breakers",
    )
    last_n: int = param(
        "Number of last tokens of prompt and output that are searched; -1: all", default=-1, low=-1, name="dry_last_n"
    )

    def encode_text(self, tokenizer: TextEncoder) -> Self:
        encoded: list[tuple[int, ...]] = []
        for breaker in DEFAULT_BREAKERS if self.breakers is None else self.breakers:
            if isinstance(breaker, str):
                encoded += [(token,) for token in tokenizer.containing(breaker)]
                encoded += [ids for ids in tokenizer.spellings(breaker) if len(ids) > 1]
            else:
                encoded.append(breaker)
        return replace(self, breakers=tuple(dict.fromkeys(encoded)))

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        tokens, last = history.last(-1)[1].tolist(), history.last(self.last_n)[1].tolist()
        matcher = BreakerMatcher(self.breakers or ())
        lengths = longest_repeats(last, repeat_lengths(last), self.allowed_length, matcher.since_breaker(tokens))
        return self.penalties(lengths, tokens, matcher)

    def incremental_listing(self, history: History) -> IncrementalListing:
        return IncrementalDry(self, history)

    @property
    def max_exponent(self) -> float:
        """The exponent at which the penalty reaches its maximum."""
        return (LARGEST - max(0.0, log(self.multiplier or 1.0))) / log(self.base) if self.base > 1 else 0.0

    def penalties(self, lengths: Mapping[int, int], tokens: list[int], matcher: BreakerMatcher) -> Mapping[int, float]:
        """Tokens that extend a repetition of n tokens lose multiplier * base ** (n - allowed_length), kept finite."""
        return {
            token: -min(self.multiplier * self.base ** min(n - self.allowed_length, self.max_exponent), exp(LARGEST))
            for token, n in lengths.items()
            if not matcher.ends_at([*tokens[-matcher.max_length :], token], -1)
        }


class BreakerMatcher:
    """Matches sequence breakers."""

    def __init__(self, breakers: Sequence[str | tuple[int, ...]]) -> None:
        self._before: dict[int, list[list[int]]] = {}
        for breaker in breakers:
            if isinstance(breaker, str):
                field = "dry_sequence_breakers"
                raise ParameterError(
                    field, f"{field} has the text {breaker!r}, but there is no tokenizer: give token ids"
                )
            self._before.setdefault(breaker[-1], []).append([*breaker[:-1]])
        self.max_length = max(map(len, breakers), default=1)

    def ends_at(self, tokens: list[int], position: int) -> bool:
        """Whether a breaker ends with the token at this position."""
        position %= len(tokens)
        before = self._before.get(tokens[position], ())
        return any(len(ids) <= position and tokens[position - len(ids) : position] == ids for ids in before)

    def since_breaker(self, tokens: list[int]) -> int:
        """The number of tokens after the last breaker."""
        return next((n for n in range(len(tokens)) if self.ends_at(tokens, len(tokens) - 1 - n)), len(tokens))


class IncrementalDry:
    """The incremental form of ``Dry.listing``."""

    def __init__(self, stage: Dry, history: History) -> None:
        self._stage, self._matcher = stage, BreakerMatcher(stage.breakers or ())
        self._tokens = history.last(-1)[1].tolist()
        least, most = stage.allowed_length, stage.allowed_length + ceil(max(0.0, stage.max_exponent))
        self._index = (
            RepeatIndex(self._tokens, least, most)
            if stage.last_n < 0
            else WindowRepeatIndex(self._tokens, stage.last_n, least, most)
        )
        self._since_breaker = self._matcher.since_breaker(self._tokens)

    def fork(self) -> Self:
        return changed_copy(self, _tokens=self._tokens.copy(), _index=self._index.fork())

    def push(self, token: int) -> None:
        self._tokens.append(token)
        self._index.push(token)
        self._since_breaker = 0 if self._matcher.ends_at(self._tokens, -1) else self._since_breaker + 1

    def listing(self) -> Mapping[int, float]:
        lengths = self._index.continuations(self._since_breaker)
        return self._stage.penalties(lengths, self._tokens, self._matcher)
