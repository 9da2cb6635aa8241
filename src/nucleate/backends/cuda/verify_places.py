"""Edits at the places of drafts: penalties that count the tokens drafted before each place. Knows no stage.

Shapes: R rows, E entries, K drafted tokens, N = K + 1 places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from nucleate.backends.cuda.edits import Edits


class Counted(NamedTuple):
    """What was said in rows, and is biased or banned there: at most one entry per token of a row."""

    ids_RE: torch.Tensor  #: int64; -1 where there is no entry
    before_RE: torch.Tensor  #: what is added, float64 (float32 for devices without)
    until_RE: torch.Tensor  #: int64: the step at which a ban ends; 0: none
    prompt_RE: torch.Tensor  #: int64: how often it is in what only the repetition penalty counts, the prompt
    output_RE: torch.Tensor  #: int64: how often it is in the output


class Penalties(NamedTuple):
    """Of rows, [R, 1] each, of the type of ``before_RE``."""

    repetition: torch.Tensor  #: 1 does nothing
    frequency: torch.Tensor  #: 0 does nothing, as the next
    presence: torch.Tensor


def edits_ahead(counted: Counted, penalties: Penalties, drafted_RK: torch.Tensor, steps_R: torch.Tensor) -> Edits:
    """What is done to the scores of all places, see ``Edits``; its columns are [R, N, E + K].

    drafted_RK: int64, below the size of the vocabulary; -1 for none. steps_R: of the first place. All that was said
    counts, however long ago: the caller keeps windows.
    """
    count = drafted_RK.shape[1]
    ids_RM = torch.cat((counted.ids_RE, drafted_RK), 1)
    places_N = torch.arange(count + 1, device=drafted_RK.device)
    earlier_NK = places_N[:count] < places_N[:, None]
    same_RMK = ids_RM[:, :, None] == drafted_RK[:, None, :]  # -1 as well, which stays no entry
    times_RNM = (same_RMK[:, None] & earlier_NK[:, None, :]).sum(3)
    output_RNM = padded(counted.output_RE, count)[:, None] + times_RNM
    entry_M = torch.arange(ids_RM.shape[1], device=ids_RM.device) < counted.ids_RE.shape[1]
    there_RNM = fresh(counted.ids_RE, drafted_RK)[:, None] & (entry_M | (times_RNM > 0))
    ids_RNM = torch.where(there_RNM, ids_RM[:, None], -1)
    banned_RNM = (steps_R[:, None] + places_N)[:, :, None] < padded(counted.until_RE, count)[:, None]
    before_RNM = torch.where(banned_RNM, -torch.inf, padded(counted.before_RE, count)[:, None])
    seen_RNM = output_RNM + padded(counted.prompt_RE, count)[:, None] > 0
    repetition, frequency, presence = (column_R1[:, None] for column_R1 in penalties)
    scale_RNM = torch.where(seen_RNM, repetition, 1.0)
    after_RNM = torch.where(output_RNM > 0, frequency * output_RNM.to(frequency.dtype) + presence, 0.0)
    return Edits(ids_RNM, before_RNM, scale_RNM, after_RNM)


def padded(x_RE: torch.Tensor, count: int) -> torch.Tensor:
    """A column of entries, and 0 for as many drafted tokens."""
    return torch.nn.functional.pad(x_RE, (0, count))


def fresh(ids_RE: torch.Tensor, drafted_RK: torch.Tensor) -> torch.Tensor:
    """Which of entries and drafted tokens are the first of their token in a row: bool [R, E + K]."""
    known_RK = (drafted_RK[:, :, None] == ids_RE[:, None, :]).any(2)
    earlier_KK = torch.ones(drafted_RK.shape[1], drafted_RK.shape[1], dtype=torch.bool, device=ids_RE.device).tril(-1)
    again_RK = ((drafted_RK[:, :, None] == drafted_RK[:, None, :]) & earlier_KK).any(2)
    return torch.cat((torch.ones_like(ids_RE, dtype=torch.bool), ~known_RK & ~again_RK), 1)
