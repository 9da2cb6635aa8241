"""Shifts on a row in place: the rule of each stage over the tokens it touches, and no others. Knows no stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.backends.cpu.staged.bind import give_up, loop, numbers
from nucleate.backends.cpu.staged.old import kernel
from nucleate.core.history import Counts, Past
from nucleate.core.stage import Shift, Token

Ids = NDArray[np.int64]
NOTHING = np.zeros(0)


def edit(x_V: NDArray[Any], stage: Shift, past: Past) -> None:
    """Apply a stage that is not neutral. x_V: float32 or float64 [V]; a NaN or +inf that comes out is left there.

    Tokens at -inf stay there. Raises what the stage's own list raises, and IndexError for a token that is not there.
    """
    with np.errstate(all="ignore"):
        match stage.touches:
            case "seen" | "output":
                _edit_counted(x_V, stage, past.counts(stage.window))
            case "listed":
                ids_K, listed_K = _listed(past.listing(stage))
                _apply(x_V, stage, ids_K, *_counts(past, stage, ids_K), listed_K)
            case "unlisted":
                ids_K, _ = _listed(past.listing(stage))
                inside_V = np.zeros(len(x_V), bool)
                inside_V[ids_K] = True
                _apply_dense(x_V, stage, past, ~inside_V)
            case "masked":
                if past.mask is not None:
                    _mask(x_V, stage, past, past.mask)


def _edit_counted(x_V: NDArray[Any], stage: Shift, counts: Counts) -> None:
    """A stage over the tokens that occurred."""
    ids_K, prompt_K, output_K = counts
    if not len(ids_K):
        return
    x_K = x_V.take(ids_K).astype(np.float64)
    mine = numbers(stage, "apply")
    run = None if mine is None else loop(stage, "apply")
    try:
        if run is not None:
            run(x_K, ids_K, prompt_K, output_K, stage.touches == "output", mine)
    except Exception as error:  # noqa: BLE001  # whatever the compiler says
        give_up(stage, "apply", error)
        run = None
    if run is None:
        _edit_slowly(x_K, stage, counts)
    x_V[ids_K] = x_K


def _edit_slowly(x_K: NDArray[np.float64], stage: Shift, counts: Counts) -> None:
    """The same for a rule that cannot be compiled."""
    ids_K, prompt_K, output_K = counts
    shifted_K = stage.apply(x_K, Token(ids_K, prompt_K, output_K, 0.0))
    touched_K = (x_K > -np.inf) & ((output_K > 0) | (stage.touches != "output"))
    x_K[:] = np.where(touched_K, shifted_K, x_K)


def _listed(listing: Mapping[int, float]) -> tuple[Ids, NDArray[np.float64]]:
    count = len(listing)
    ids_K = np.fromiter(listing, np.int64, count)
    if count and ids_K.min() < 0:
        raise IndexError(ids_K.min())
    return ids_K, np.fromiter(listing.values(), np.float64, count)


def _counts(past: Past, stage: Shift, ids_K: Ids) -> tuple[Any, Any]:
    """How often listed tokens occurred, for a rule that asks."""
    if not {"prompt_count", "output_count"} & set(type(stage).apply.__code__.co_names):
        return 0, 0
    seen_K, prompt_K, output_K = past.counts(stage.window)
    if not len(seen_K):
        return np.zeros(len(ids_K)), np.zeros(len(ids_K))
    order_K = np.argsort(seen_K)
    place_K = np.minimum(np.searchsorted(seen_K, ids_K, sorter=order_K), len(seen_K) - 1)
    found_K = seen_K[order_K[place_K]] == ids_K
    prompt, output = (np.where(found_K, column[order_K[place_K]], 0) for column in (prompt_K, output_K))
    return prompt, output


def _apply(x_V: NDArray[Any], stage: Shift, ids_K: Ids, prompt_K: Any, output_K: Any, listed_K: Any) -> None:
    """The rule over some tokens."""
    if not len(ids_K):
        return
    x_K = x_V[ids_K].astype(np.float64)
    listed = listed_K if len(listed_K) else 0.0
    shifted_K = stage.apply(x_K, Token(ids_K, prompt_K, output_K, listed))
    x_V[ids_K] = np.where(x_K > -np.inf, shifted_K, x_K)


def _apply_dense(x_V: NDArray[Any], stage: Shift, past: Past, touched_V: NDArray[np.bool_]) -> None:
    """The rule over a large part of the vocabulary."""
    if bans(stage):
        x_V[touched_V] = -np.inf
        return
    ids_K = np.flatnonzero(touched_V)
    _apply(x_V, stage, ids_K, *_counts(past, stage, ids_K), NOTHING)


def _mask(x_V: NDArray[Any], stage: Shift, past: Past, mask_W: NDArray[np.int32]) -> None:
    if bans(stage):
        forbid(x_V, np.ascontiguousarray(mask_W, np.int32))
        return
    bits_V = np.unpackbits(np.asarray(mask_W).astype("<i4").view(np.uint8), bitorder="little")[: len(x_V)]
    _apply_dense(x_V, stage, past, bits_V == 0)


def bans(stage: Shift) -> bool:
    """Whether the rule takes out whatever it touches."""
    some = np.array([-1e30, -1.0, 0.0, 1.0, 1e30])
    return bool(np.all(stage.apply(some, Token(np.arange(5), np.zeros(5), np.zeros(5), np.zeros(5))) == -np.inf))


@kernel
def forbid(x: Any, words: Any) -> None:
    """Put -inf where the bit of a token is 0."""
    for word in range((x.size + 31) // 32):
        bits = words[word]
        if bits != -1:
            start = word * 32
            for bit in range(min(32, x.size - start)):
                if (bits >> bit) & 1 == 0:
                    x[start + bit] = -np.inf
