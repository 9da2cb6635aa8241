"""DRY, "don't repeat yourself" (p-e-w, https://github.com/oobabooga/text-generation-webui/pull/5677)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp, log
from typing import Any, Self

from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.stage import History, IncrementalListing, Shift, TextEncoder, TokenInfo, param
from nucleate.sampling.suffix_automaton import Suffixes, Window, longest, repeats

USUAL_BREAKERS = ("\n", ":", '"', "*")
LARGEST = 87.0  # the logarithm of a number that float32 still holds


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
        spelled: list[tuple[int, ...]] = []
        for breaker in USUAL_BREAKERS if self.breakers is None else self.breakers:
            if isinstance(breaker, str):
                spelled += [(token,) for token in tokenizer.containing(breaker)]
                spelled += [ids for ids in tokenizer.spellings(breaker) if len(ids) > 1]
            else:
                spelled.append(breaker)
        return replace(self, breakers=tuple(dict.fromkeys(spelled)))

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        said, tokens = history.last(-1)[1].tolist(), history.last(self.last_n)[1].tolist()
        breaks = Breaks(self.breakers or ())
        unbroken = next((n for n in range(len(said)) if breaks.at(said, len(said) - 1 - n)), len(said))
        return self.penalties(longest(tokens, repeats(tokens), self.allowed_length, unbroken), said, breaks)

    def incremental_listing(self, history: History) -> IncrementalListing:
        return Repeats(self, history)

    @property
    def room(self) -> float:
        """The exponent at which the penalty reaches its maximum."""
        return (LARGEST - max(0.0, log(self.multiplier or 1.0))) / log(self.base) if self.base > 1 else 0.0

    def penalties(self, lengths: Mapping[int, int], said: list[int], breaks: Breaks) -> Mapping[int, float]:
        """Tokens that extend a repetition of n tokens lose multiplier * base ** (n - allowed_length), kept finite."""
        return {
            token: -min(self.multiplier * self.base ** min(n - self.allowed_length, self.room), exp(LARGEST))
            for token, n in lengths.items()
            if not breaks.at([*said[-breaks.longest :], token], -1)
        }


class Breaks:
    """Finds where sequence breakers end."""

    def __init__(self, breakers: Sequence[str | tuple[int, ...]]) -> None:
        self._before: dict[int, list[list[int]]] = {}
        for breaker in breakers:
            if isinstance(breaker, str):
                field = "dry_sequence_breakers"
                raise ParameterError(
                    field, f"{field} has the text {breaker!r}, but there is no tokenizer: give token ids"
                )
            self._before.setdefault(breaker[-1], []).append([*breaker[:-1]])
        self.longest = max(map(len, breakers), default=1)

    def at(self, tokens: list[int], place: int) -> bool:
        """Whether a breaker ends with the token at this place."""
        place %= len(tokens)
        before = self._before.get(tokens[place], ())
        return any(len(ids) <= place and tokens[place - len(ids) : place] == ids for ids in before)


class Repeats:
    """The incremental form of ``Dry.listing``."""

    def __init__(self, stage: Dry, history: History) -> None:
        self._stage, self._breaks = stage, Breaks(stage.breakers or ())
        self._said = history.last(-1)[1].tolist()
        least, most = stage.allowed_length, stage.allowed_length + ceil(max(0.0, stage.room))
        self._suffixes = (
            Suffixes(self._said, least, most) if stage.last_n < 0 else Window(self._said, stage.last_n, least, most)
        )
        self._unbroken = next(
            (n for n in range(len(self._said)) if self._breaks.at(self._said, len(self._said) - 1 - n)), len(self._said)
        )

    def push(self, token: int) -> None:
        self._said.append(token)
        self._suffixes.push(token)
        self._unbroken = 0 if self._breaks.at(self._said, -1) else self._unbroken + 1

    def listing(self) -> Mapping[int, float]:
        lengths = self._suffixes.followers(self._unbroken)
        return self._stage.penalties(lengths, self._said, self._breaks)
