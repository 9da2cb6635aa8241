"""Checks that all ranks have the same setup when they start, and the same rows, parameters and seeds in every step.

A difference is the same ShardError on all ranks, and says what differs and where.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nucleate.sampling import noise
from nucleate.sharding.rank_exchange import RankExchange, ShardError, pack, unpack

PROTOCOL = 1
"""Changes with the format of the exchanges."""

STEP_NUMBERS, TEXT_BYTES = 12, 1024
"""The sizes of messages, which must not depend on what may differ between the ranks."""

ROW_FACTS = ("rows", "seeds of the rows", "parameters of the rows", "tokens of the rows")
"""What a ``RowLog`` keeps checksums of."""


def version() -> str:
    """The version of nucleate on this rank."""
    return str(sys.modules["nucleate"].__version__)  # an import would be circular


def arithmetic() -> str:
    """A checksum of the float64 functions with which the ranks decide alike: it depends on NumPy and the processor."""
    x_N = noise.uniform(1, 0, noise.TOKEN, np.arange(1000))
    results = np.exp(-30.0 * x_N), np.log(x_N), np.log1p(-x_N), np.cumsum(x_N), np.array([x_N.sum()])
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def agree_on_setup(exchange: RankExchange, vocab_size: int) -> int:
    """Check the setups of all ranks. Returns a seed that is the same on all of them."""
    own = {
        "protocol versions": PROTOCOL,
        "versions of nucleate": version(),
        "vocabulary sizes": vocab_size,
        "checksums of the arithmetic of NumPy and the processor": arithmetic(),
        "seed": noise.fresh_seed(),
    }
    setups = [json.loads(text) for text in gather_text(exchange, json.dumps(own))]
    shared = int(setups[0]["seed"])
    for name in own:
        if name != "seed":
            check_equal(f"the {name}", [setup.get(name) for setup in setups])
    return shared


def check_equal(name: str, values: Sequence[Any], *, show: bool = True) -> None:
    """Raise ShardError if a fact differs between ranks. show: whether the message has the values."""
    by_value: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    if len(by_value) > 1:
        groups = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" + (f" ({value})" if show else "")
            for value, ranks in by_value.items()
        ]
        raise ShardError(f"{name} differ between ranks: {' against '.join(groups)}")


class RowLog:
    """A running checksum of what was done with the rows on this rank."""

    def __init__(self) -> None:
        self.facts: dict[str, int] = dict.fromkeys(ROW_FACTS, 0)

    def record(self, fact: str, *values: Any) -> None:
        """Include values in a checksum."""
        self.facts[fact] = zlib.crc32(repr(values).encode(), self.facts[fact])


def agree_on_step(
    exchange: RankExchange, facts: Mapping[str, int], first_id: int, columns: int, problem: str
) -> Callable[[], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Start to compare a step's facts. The result waits, and returns the first ids and the columns of all ranks.

    problem: why this rank cannot take the step; "" if it can. The other ranks then raise ShardError, too.
    """
    numbers = np.zeros(STEP_NUMBERS, np.uint32)
    values = [bool(problem), first_id, columns, *facts.values()]
    numbers[: len(values)] = values
    receive = exchange.gather(pack([torch.from_numpy(numbers.view(np.uint8))], exchange.device))

    def wait() -> tuple[tuple[int, ...], tuple[int, ...]]:
        [rows_RN] = unpack(receive(), [(np.uint32, (STEP_NUMBERS,))])
        if rows_RN[:, 0].any():
            problems = gather_text(exchange, problem)
            rank = int(rows_RN[:, 0].argmax())
            if not problem:
                raise ShardError(f"rank {rank} failed: {problems[rank]}")
        elif (rows_RN[:, 3:] != rows_RN[0, 3:]).any():
            for name, values in zip(facts, rows_RN[:, 3:].T.tolist(), strict=False):
                check_equal(f"the {name}", values, show=False)
        return tuple(rows_RN[:, 1].tolist()), tuple(rows_RN[:, 2].tolist())

    return wait


def gather_text(exchange: RankExchange, text: str) -> list[str]:
    """A text of each rank, cut to TEXT_BYTES."""
    data = np.frombuffer(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"), np.uint8).copy()
    [received] = unpack(exchange.gather(pack([torch.from_numpy(data)], exchange.device))(), [(np.uint8, (TEXT_BYTES,))])
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in received]
