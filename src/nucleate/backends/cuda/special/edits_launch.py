"""The edits of a step through kernels, on the arrays of ``past.Past``. Knows no kernel's inside.

A call waits for nothing, and asks torch for room only, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

import torch

from nucleate.backends.cuda.past import Past
from nucleate.backends.cuda.special.edits import fill
from nucleate.backends.cuda.special.index import Index
from nucleate.backends.cuda.special.look import look
from nucleate.backends.cuda.special.push import go_on, match

BLOCK, FAR = 256, 512
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Products are not fused into sums, as they are not on the CPU."""


def index(past: Past, slots_R: torch.Tensor, size: int, *, looks: bool) -> Index:
    """What the entries of rows of a size do in this step. looks: whether any row's edits look back."""
    state, rows = past.entries.state_SKC, len(slots_R)
    room = state.shape[1]
    found = _found(past, slots_R) if looks else None
    words = torch.zeros((rows, -(-size // 32), 2), dtype=torch.int32, device=slots_R.device)
    entries = torch.empty((rows, room, 3), dtype=torch.float64, device=slots_R.device)
    grid = -(-room // BLOCK), rows
    fill[grid](
        slots_R, past.slots.lines_SC, state, room, size, found, words, words.stride(0), entries, block=BLOCK, **OPTIONS
    )
    return Index(words, entries)


def _found(past: Past, slots_R: torch.Tensor) -> torch.Tensor:
    state, lengths, lists = past.entries.state_SKC, past.matches.lengths_SL, past.lists.words_FNT
    found = torch.zeros((len(slots_R), state.shape[1], 3), dtype=torch.int32, device=slots_R.device)
    most = max(lengths.shape[1] if len(lengths) else 0, lists.shape[1])
    look[-(-most // FAR), len(slots_R)](
        slots_R, past.slots.lines_SC, past.slots.ring_SL, past.slots.ring, state, state.shape[1],
        lengths if len(lengths) else None, *_given(lists), found, block=FAR, **OPTIONS,
    )  # fmt: skip
    return found


def push(past: Past, slots_R: torch.Tensor, tokens_R: torch.Tensor, *, grows: bool, looks: bool) -> None:
    """Rows go on with a token each, below 0 for none. grows, looks: whether any row's entries grow; look back."""
    slots, state, lengths, lists = past.slots, past.entries.state_SKC, past.matches.lengths_SL, past.lists.words_FNT
    row = slots_R, tokens_R, slots.lines_SC, slots.ring_SL, slots.ring
    if looks and len(lengths):
        match[-(-slots.ring // FAR), len(slots_R)](*row, lengths, block=FAR, **OPTIONS)
    given = _given(lists) if looks else (None, 0, 0)
    entries = state if grows else None
    go_on[(len(slots_R),)](*row, entries, state.shape[1], past.entries.size, *given, block=BLOCK, **OPTIONS)


def _given(lists: torch.Tensor) -> tuple[torch.Tensor | None, int, int]:
    return (lists, lists.shape[1], lists.shape[2]) if len(lists) else (None, 0, 0)
