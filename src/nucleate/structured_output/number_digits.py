"""Limits the consecutive digits of numbers in JSON, so that a model cannot repeat digits without end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from nucleate.structured_output.json_schema import NUMERIC, SchemaLocation

_DIGITS = frozenset(b"0123456789")
_LEADING = re.compile(rb"[0-9]*")


class JsonPosition(NamedTuple):
    """The position in a JSON text: in a string, after its backslash, or after ``digits`` digits of a number."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def after(self, data: bytes) -> JsonPosition:
        in_string, escaped, digits = self
        for byte in data:
            if in_string:
                in_string, escaped = escaped or byte != 0x22, not escaped and byte == 0x5C
            elif byte in _DIGITS:
                digits += 1
            else:
                in_string, digits = byte == 0x22, 0
        return JsonPosition(in_string, escaped, digits)


@final
class TokenDigits:
    """The number of digits with which each token of a vocabulary begins."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        leading = [_LEADING.match(data) for data in tokens]
        self._leading_V = np.array([0 if found is None else found.end() for found in leading], np.int32)
        self.longest = int(self._leading_V.max(initial=0))
        self.allowed = lru_cache(32)(self._allowed)

    def _allowed(self, digits: int) -> NDArray[np.int32]:
        """Return the bitmask of the tokens that begin with at most so many digits."""
        bits = np.zeros(-(-len(self.tokens) // 32) * 32, np.uint8)
        bits[: len(self.tokens)] = self._leading_V <= digits
        return np.packbits(bits, bitorder="little").view(np.int32)


@final
class DigitLimit:
    """The limit of one constraint."""

    def __init__(self, digits: TokenDigits, maximum: int) -> None:
        self.tokens, self._digits, self._maximum = digits.tokens, digits, maximum

    def applies(self, position: JsonPosition) -> bool:
        """Whether some token would exceed the limit."""
        return position.digits > 0 and position.digits + self._digits.longest > self._maximum

    def apply(self, position: JsonPosition, mask_W: NDArray[np.int32]) -> None:
        """Remove the tokens that exceed the limit from a bitmask, unless no other token is left."""
        allowed_W = mask_W & self._digits.allowed(max(0, self._maximum - position.digits))
        if allowed_W.any():
            mask_W[:] = allowed_W


def longest_number(locations: Iterable[SchemaLocation]) -> int:
    """Return the most consecutive digits in a constant or bound of a prepared schema."""
    given = [location.schema[name] for location in locations for name in NUMERIC & location.schema.keys()]
    return max((len(digits) for value in given for digits in re.findall("[0-9]+", json.dumps(value))), default=0)
