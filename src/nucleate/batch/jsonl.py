"""Reads the lines of a file of any size one at a time, each with a digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain
from typing import BinaryIO, NamedTuple

MAX_LINE_BYTES = 16 << 20
"""Maximum size of a line. A longer one is an error, and is not kept in memory."""
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLine(NamedTuple):
    """A line that is not empty. number: from 1, counting empty lines. data: None if the line is too long."""

    number: int
    digest: int  #: 64-bit hash of the stripped line, not 0
    data: bytes | None

    @property
    def id(self) -> str:
        """The id of its output record."""
        return f"line-{self.number}-{self.digest:016x}"


def lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonLine]:
    """Yield the lines of a stream that are not empty, without byte order marks."""
    number = 0
    while data := stream.readline(max_bytes + 1):
        number += 1
        if len(data) > max_bytes and not data.endswith(b"\n"):
            yield JsonLine(number, _digest(chain([data], _rest(stream, max_bytes))), None)
        elif data := data.removeprefix(_BYTE_ORDER_MARK).strip(_BLANK):
            yield JsonLine(number, _digest([data]), data)


def _rest(stream: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the rest of a line in parts."""
    while data := stream.readline(max_bytes):
        yield data.removesuffix(b"\n")
        if data.endswith(b"\n"):
            return


def _digest(parts: Iterable[bytes]) -> int:
    made = blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest()) or 1
