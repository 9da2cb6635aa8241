"""Secret keys of watermarks, and pseudo-random 32-bit words, one per token id, for keyed stages.

A key is read from a file, and never shown. Words are functions of (seed, step, stream, token id). Ids are in groups of
256. A Philox block has the words of one place in four groups: token i has the word g % 4 of the block
g // 4 * 256 + i % 256, where g = i // 256.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nucleate.jit.kernel_libraries import COMPOSED
from nucleate.parameters import converters
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling.noise import GROUP_SIZE, WATERMARK, block_words

FIELD = "watermark_key"
MIN_BYTES, MAX_BYTES = 16, 65536
"""The length of a key, without white space at the ends of the file."""

logger = logging.getLogger("nucleate")


@with_suggestions
class WatermarkKey:
    """A secret key of at least 16 bytes. It is not shown in ``repr``, and is not pickled or written as JSON.

    Create one from a file with ``WatermarkKey.read``. Two are equal if their bytes are. Raises ParameterError.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not isinstance(secret, bytes | bytearray):
            raise ParameterError(FIELD, "a watermark key must be bytes; WatermarkKey.read takes a file")
        if not MIN_BYTES <= len(secret) <= MAX_BYTES:
            what = "is empty" if not secret else f"has {len(secret)} bytes"
            raise ParameterError(FIELD, f"a watermark key must have {MIN_BYTES} to {MAX_BYTES} bytes; this one {what}")
        self._secret = hashlib.blake2b(bytes(secret), person=b"nucleate key").digest()

    @classmethod
    def read(cls, path: str | PathLike[str]) -> WatermarkKey:
        """Read a key from a file. White space at its ends does not count.

        Logs a warning if other users can read the file. Raises ParameterError if it cannot be read, or for its length.
        """
        try:
            with Path(path).open("rb") as file:
                secret = file.read(2 * MAX_BYTES).strip()
            mode = Path(path).stat().st_mode
        except OSError as error:
            raise ParameterError(FIELD, f"cannot read the watermark key {str(path)!r}: {error.strerror}") from None
        try:
            key = cls(secret)
        except ParameterError as error:
            raise ParameterError(FIELD, f"{str(path)!r}: {error}") from None
        if mode & 0o044:
            logger.warning("the watermark key %s can be read by other users; use chmod 600", path)
        return key

    def numbers(self, purpose: str, tokens: Iterable[int]) -> tuple[int, int]:
        """Two pseudo-random integers, 0 to 2**64 - 1, for some token ids: a seed and a step of ``noise``.

        purpose: at most 16 ASCII characters; different ones give independent numbers.
        """
        ids = [*tokens]
        hashed = hashlib.blake2b(
            struct.pack(f"<{len(ids)}q", *ids), key=self._secret, person=purpose.encode("ascii"), digest_size=16
        )
        seed, step = struct.unpack("<2Q", hashed.digest())
        return seed, step

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WatermarkKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self._secret)

    def __repr__(self) -> str:
        return "WatermarkKey(hidden)"

    def __copy__(self) -> WatermarkKey:
        return self

    def __deepcopy__(self, memo: Any) -> WatermarkKey:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a WatermarkKey is not pickled; read it from its file again")


def _from_value(value: Any) -> WatermarkKey:
    """A key from bytes. The error does not show the value."""
    if isinstance(value, bytes):
        return WatermarkKey(value)
    raise ParameterError(FIELD, "key must be a WatermarkKey; requests and JSON cannot have one")


converters.register(WatermarkKey, _from_value, "a WatermarkKey")


def require_key(key: WatermarkKey | None, name: str) -> WatermarkKey:
    """A key that is set. Raises ParameterError. name: of the stage."""
    if key is None:
        raise ParameterError(
            FIELD, f"{name} needs a watermark key: key=WatermarkKey.read(file); requests cannot set one"
        )
    return key


Uint32 = NDArray[np.uint32]

WORDS = 4
"""Words per Philox block."""


def token_words(seed: Any, step: Any, ids_N: NDArray[Any], stream: int = WATERMARK) -> Uint32:
    """The words of some tokens: uint32 [N]. seed, step: one for all tokens, or uint64 [N]."""
    ids_N = np.ascontiguousarray(ids_N, np.int64)
    if COMPOSED.ready and np.ndim(seed) == np.ndim(step) == 0:
        words_N = np.empty(ids_N.shape, np.uint32)
        COMPOSED.listed_words(np.uint64(seed), np.uint64(step), stream, ids_N, words_N)
        return words_N
    seeds, steps = (np.asarray(one, np.uint64).reshape(-1) for one in (seed, step))
    group_N, place_N = ids_N // GROUP_SIZE, ids_N % GROUP_SIZE
    words = block_words(seeds, steps, stream, group_N // WORDS * GROUP_SIZE + place_N)
    return np.choose(group_N % WORDS, words).astype(np.uint32)


def vocabulary_words(seed: int, step: int, size: int, stream: int = WATERMARK) -> Uint32:
    """The words of the tokens 0 to size - 1. Compiled if the kernels are loaded."""
    count = -(-size // (WORDS * GROUP_SIZE))
    if COMPOSED.ready:
        words_V = np.empty(count * WORDS * GROUP_SIZE, np.uint32)
        COMPOSED.token_words(seed, step, stream, words_V)
        return words_V[:size]
    blocks = np.arange(count * GROUP_SIZE)
    words = block_words(np.array([seed], np.uint64), np.array([step], np.uint64), stream, blocks)
    planes = np.stack(words).astype(np.uint32).reshape(WORDS, count, GROUP_SIZE)
    return planes.transpose(1, 0, 2).reshape(-1)[:size]


def values_below(seed: int, step: int, size: int, threshold: int, value: float) -> NDArray[np.float32]:
    """A value for the tokens whose ``vocabulary_words`` are below a threshold, 0 for the others: float32 [size]."""
    if not COMPOSED.ready:
        return np.where(vocabulary_words(seed, step, size) < threshold, np.float32(value), np.float32(0.0))
    values_V = np.empty(-(-size // (WORDS * GROUP_SIZE)) * WORDS * GROUP_SIZE, np.float32)
    COMPOSED.values_below(seed, step, WATERMARK, threshold, value, values_V)
    return values_V[:size]
