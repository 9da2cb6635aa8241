"""The lines of a file of any size, one at a time, each with a digest that tells it from others. Knows no JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nucleate.cli.main import UsageError

MOST_BYTES = 16 << 20
"""Of a line: a longer one is an error, and is not kept in memory."""
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLine(NamedTuple):
    """A line that is not empty. number: from 1, empty lines counted. data: None if there were too many bytes."""

    number: int
    digest: int  #: of what it says, without the space around it: 64 bits, not 0
    data: bytes | None

    @property
    def id(self) -> str:
        """What the records of an output file call it."""
        return f"line-{self.number}-{self.digest:016x}"


def open_input(path: str) -> AbstractContextManager[BinaryIO]:
    """A file to read; - is stdin."""
    if path != "-":
        return Path(path).open("rb")
    if sys.stdin is None:
        raise UsageError("nothing to read: stdin is closed")
    return nullcontext(sys.stdin.buffer)


def lines(stream: BinaryIO, most: int = MOST_BYTES) -> Iterator[JsonLine]:
    """The lines of a stream that are not empty. Marks of the byte order at their beginning are no part of them."""
    number = 0
    while data := stream.readline(most + 1):
        number += 1
        if len(data) > most and not data.endswith(b"\n"):
            yield JsonLine(number, _digest(chain([data], _rest(stream, most))), None)
        elif data := data.removeprefix(_BYTE_ORDER_MARK).strip(_BLANK):
            yield JsonLine(number, _digest([data]), data)


def _rest(stream: BinaryIO, most: int) -> Iterator[bytes]:
    """What is left of a line, in parts."""
    while data := stream.readline(most):
        yield data.removesuffix(b"\n")
        if data.endswith(b"\n"):
            return


def _digest(parts: Iterable[bytes]) -> int:
    made = blake2b(digest_size=8)
    for part in parts:
        made.update(part)
    return int.from_bytes(made.digest()) or 1
