"""Random drafts and laws, what the slow rules say of them, and whether a row of what tensors say is that."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from nucleate.engine import verify as slow
from nucleate.engine.draft.draft import Draft
from nucleate.engine.verify import Verdict


def said(verdict: Verdict, tokens: list[int], stops: list[int]) -> tuple[list[int], bool]:
    """How a row goes on up to its first stop id, and whether it ends with it."""
    for place, token in enumerate(out := verdict.tokens(Draft(tuple(tokens)))):
        if token in stops:
            return out[: place + 1], True
    return out, False


def assert_is(got: Any, row: int, verdict: Verdict, drafted: list[int], stops: list[int]) -> None:
    """A row of what tensors say is what the slow rule says, cut at a stop id."""
    tokens, ended = said(verdict, drafted, stops)
    failed = verdict.token < 0 and not ended
    places = got.tokens_RN.shape[1]
    assert got.tokens_RN[row].tolist() == tokens + [-1] * (places - len(tokens))
    assert got.kept_R[row] == len(tokens) - (not failed)
    assert got.last_R[row] == (-1 if failed else tokens[-1])
    assert (bool(got.ended_R[row]), bool(got.failed_R[row])) == (ended, failed)


def drafts(numbers: np.random.Generator, rows: int, count: int, size: int) -> np.ndarray:
    """Chains of different lengths, with whatever lies behind them."""
    drafted_RK = numbers.integers(size, size=(rows, count))
    for row in range(rows):
        if (length := numbers.integers(count + 1)) < count:
            drafted_RK[row, length] = -1
    return drafted_RK


def chain(drafted_K: np.ndarray) -> list[int]:
    return list(itertools.takewhile(lambda token: token >= 0, drafted_K.tolist()))


def laws(numbers: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Weights of many kinds; some are no law."""
    p = numbers.random(shape) ** numbers.choice([0.3, 1, 8])
    if numbers.random() < 0.5:
        p[numbers.random(shape) < 0.5] = 0
    if numbers.random() < 0.5:
        p = np.round(p * 4) / 4
    flat = p.reshape(-1, shape[-1])
    for row in range(len(flat)):
        if numbers.random() < 0.08:
            flat[row, numbers.integers(shape[-1])] = numbers.choice([np.nan, np.inf, -1.0])
        elif numbers.random() < 0.05:
            flat[row] = 0
        elif numbers.random() < 0.5:
            flat[row] /= flat[row].sum() or 1
    return flat.reshape(shape).astype(dtype)


def slow_rejection(p_NV: np.ndarray, tokens: list[int], q_KV: np.ndarray | None, coins_K: Any, coin: float) -> Verdict:
    given = None if q_KV is None else tuple(q_KV[: len(tokens)])
    return slow.rejection(p_NV, Draft(tuple(tokens), laws=given), coins_K, coin)
