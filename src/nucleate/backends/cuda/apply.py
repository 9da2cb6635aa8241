"""Shifts one after the other, over the entries of rows, as plain tensors: for rows whose edits are no ``Edits`` by
themselves. Knows no stage.

What comes of a score is told as what is added to it, so that it is an edit like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from nucleate.backends.cuda.device import sent
from nucleate.backends.cuda.edits import Edits
from nucleate.backends.cuda.entries import repeated
from nucleate.backends.cuda.past import Past, places_of
from nucleate.backends.cuda.words import WORDS
from nucleate.backends.resident import Ordered
from nucleate.backends.structure import bound
from nucleate.core.stage import Shift, Token


class Group(NamedTuple):
    """Rows of a call with the same Shifts, in the same order."""

    places_N: torch.Tensor  #: of the rows in the call,
    slots_N: torch.Tensor  #: and their slots
    shifts: tuple[Ordered, ...]
    numbers: list[torch.Tensor]  #: of each Shift, [N, P]
    lists: list[tuple[torch.Tensor, torch.Tensor]]  #: of each Shift: tokens, [N, L], -1 for none; and numbers


def groups_of(
    rows: Sequence[tuple[Ordered, ...]], slots: Sequence[int], floats: torch.dtype, device: Any
) -> list[Group]:
    """The groups among rows of a call, most of which may have no such Shifts."""
    kinds: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        if row:
            kinds.setdefault(tuple(one.structure[:-1] for one in row), []).append(place)
    made = []
    for places in kinds.values():
        some = [rows[place] for place in places]
        columns = [torch.tensor([one.numbers for one in each], dtype=floats) for each in zip(*some, strict=True)]
        lists = [_lists([one.listing for one in each], floats, device) for each in zip(*some, strict=True)]
        where = sent([places, [slots[place] for place in places]], device)
        made.append(Group(where[0], where[1], some[0], [sent(column, device) for column in columns], lists))
    return made


def _lists(
    listings: Sequence[Mapping[int, float]], floats: torch.dtype, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    most = max(map(len, listings))
    padded = [[*listing.items(), *[(-1, 0.0)] * (most - len(listing))] for listing in listings]
    tokens = torch.tensor([[token for token, _ in line] for line in padded], dtype=torch.int64)
    numbers = torch.tensor([[number for _, number in line] for line in padded], dtype=floats)
    return sent(tokens, device), sent(numbers, device)


def with_shifts(past: Past, group: Group, logits_RV: torch.Tensor, edits: Edits) -> Edits:
    """The edits of a call with those of a group. edits: tokens ascending, of which the group's rows have bans only."""
    own = Edits(*(column_RK.index_select(0, group.places_N) for column_RK in edits))
    given_NV = logits_RV.index_select(0, group.places_N)
    x_NK = given_NV.gather(1, own.ids_RK.clamp(max=given_NV.shape[1] - 1)).to(torch.float32).to(own.before_RK.dtype)
    rules = past.slots.rules(group.slots_N) if any(one.repeats for one in group.shifts) else None
    found = past.found(group.slots_N, rules) if rules else None
    y_NK = x_NK
    for one, numbers_NP, (listed_NL, values_NL) in zip(group.shifts, group.numbers, group.lists, strict=True):
        if one.repeats and found and rules:
            value_NK = -repeated(found, rules)
            listed_NK = value_NK != 0
        else:
            value_NK, listed_NK = _spread(own.ids_RK, listed_NL, values_NL)
        prompt_NK, output_NK = counted(past, group.slots_N, own.ids_RK, one.window) if one.counts else (0.0, 0.0)
        touched_NK: Any = listed_NK
        if one.touches != "listed":
            touched_NK = output_NK > 0 if one.touches == "output" else prompt_NK + output_NK > 0
        token = Token(own.ids_RK, prompt_NK, output_NK, value_NK)
        shifted_NK = _rule(one.kind)(_stage(one, numbers_NP), y_NK, token)
        y_NK = torch.where(touched_NK & (y_NK > -torch.inf), shifted_NK, y_NK)
    y_NK = torch.where(own.before_RK == -torch.inf, -torch.inf, y_NK)
    told = own.ids_RK, -x_NK, torch.ones_like(y_NK), -y_NK  # x - x is 0, and 0 - -y is y
    return Edits(*(whole.index_copy(0, group.places_N, column) for whole, column in zip(edits, told, strict=True)))


def counted(
    past: Past, slots_N: torch.Tensor, ids_NK: torch.Tensor, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often tokens are in the prompt, and in the output, as ``Past.counts`` of the host says: floats [N, K]."""
    said_NL = past.slots.said(slots_N, past.slots.ring)
    back_L = torch.arange(1, past.slots.ring + 1, device=slots_N.device)
    output_NL = (back_L <= (past.slots.steps(slots_N)[:, None] if window is None else window)) & (said_NL >= 0)
    if window is not None and window < 0:
        output_NL = said_NL >= 0
    prompt_NL = (said_NL >= 0) & ~output_NL if window is None else torch.zeros_like(output_NL)
    place_NL, there_NL = places_of(ids_NK, said_NL)
    zeros_NK = torch.zeros_like(ids_NK, dtype=past.floats)
    prompt_NK, output_NK = (
        zeros_NK.scatter_add(1, place_NL, (part_NL & there_NL).to(past.floats)) for part_NL in (prompt_NL, output_NL)
    )
    return prompt_NK, output_NK


def _spread(
    ids_NK: torch.Tensor, tokens_NL: torch.Tensor, values_NL: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A list by entries: its numbers, and which entries are on it."""
    nothing_NK = torch.zeros_like(ids_NK, dtype=values_NL.dtype)
    if not tokens_NL.shape[1]:
        return nothing_NK, torch.zeros_like(ids_NK, dtype=torch.bool)
    place_NL, there_NL = places_of(ids_NK, tokens_NL)
    value_NK = nothing_NK.scatter_add(1, place_NL, torch.where(there_NL, values_NL, 0.0))
    return value_NK, nothing_NK.scatter_add(1, place_NL, there_NL.to(values_NL.dtype)) > 0


def _stage(one: Ordered, numbers_NP: torch.Tensor) -> SimpleNamespace:
    """Stands for ``self`` in the rule: its numbers are [N, 1]."""
    return SimpleNamespace(**dict(zip(one.names, numbers_NP.split(1, 1), strict=False)), **dict(one.switches))


@lru_cache(maxsize=256)
def _rule(kind: type[Shift]) -> Any:
    return bound(kind.apply, WORDS, "tensors")
