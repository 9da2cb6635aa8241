"""Encodes JSON, large bodies in pieces: ``json.dumps`` of 20 MB would hold the GIL, and all requests, for a second."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from time import perf_counter, sleep
from typing import Any

SLICE = 16
"""Entries of a list that are encoded at once. An entry with the logprobs of a token has up to 60 KiB."""
WORK_SECONDS = 0.002
"""Time after which a thread that encodes a large body sleeps, for as long."""
PIECE_BYTES = 256 * 1024

dumps = json.JSONEncoder(separators=(",", ":")).encode


class Encoded(str):
    """The JSON of a value, for ``json_parts``."""

    __slots__ = ()


def encode_json(body: Any) -> bytes:
    return dumps(body).encode()


def json_parts(value: Any) -> Iterator[str]:
    """Encode a value as compact JSON in short steps, between which other threads can run.

    Iterators become lists. They may be the values of an object and their entries, at any depth, but not in lists.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (name, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{dumps(name)}:"
            yield from json_parts(item)
        yield "}"
    elif isinstance(value, Iterator):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ","
            if _is_lazy(item):
                yield from json_parts(item)
            else:
                yield dumps(item)
        yield "]"
    elif isinstance(value, Encoded):
        yield value
    elif isinstance(value, list) and len(value) > SLICE:
        yield "["
        for start in range(0, len(value), SLICE):
            yield ("," if start else "") + dumps(value[start : start + SLICE])[1:-1]
        yield "]"
    else:
        yield dumps(value)


def _is_lazy(value: Any) -> bool:
    """Whether ``dumps`` cannot encode a value: it has an iterator or JSON."""
    return isinstance(value, Iterator | Encoded) or (isinstance(value, dict) and any(map(_is_lazy, value.values())))


def paced(parts: Iterable[str]) -> Iterator[str]:
    """Sleep as long as the parts take, now and then: a thread that never sleeps slows down each step of the engine."""
    begin = perf_counter()
    for part in parts:
        yield part
        if (elapsed := perf_counter() - begin) > WORK_SECONDS:
            sleep(elapsed)
            begin = perf_counter()


def pieces(parts: Iterable[str], size: int = PIECE_BYTES) -> Iterator[bytes]:
    """Join parts to pieces of at least ``size`` characters; only the last one is smaller."""
    joined: list[str] = []
    length = 0
    for part in parts:
        joined.append(part)
        length += len(part)
        if length >= size:
            yield "".join(joined).encode()
            joined, length = [], 0
    yield "".join(joined).encode()
