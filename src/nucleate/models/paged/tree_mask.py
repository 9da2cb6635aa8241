"""A drafted tree among the tokens that a sequence reads: what each of them follows, and sees. Knows no attention.

The tokens of a tree are read one after the other, as those of a chain are, and their keys and values lie in that order.
But each follows its parent: it has the place in the sequence that its depth gives it, and sees of the tree itself and
what leads to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 33
"""Tokens of a part with a tree up to which each is attended for itself."""


class TreeMask:
    """The last tokens of a sequence of ``stop``: parents has for each the place in the tree of the one it follows.

    -1 is the token before the tree. Parents come before those that follow them.
    """

    def __init__(self, parents: Sequence[int], stop: int) -> None:
        count = len(parents)
        self.parents, self.stop, self.base = parents, stop, stop - count
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = depths
        self.size = count

    def positions(self, start: int) -> NDArray[np.int64]:
        """Where the tokens of the tree from ``start`` on are in the sequence."""
        return np.array(self.depths[max(0, start - self.base) :], np.int64) + self.base

    def seen(self, start: int, window: int = 0) -> NDArray[np.bool_]:
        """What each token from ``start`` on sees, by where keys lie [stop - start, stop].

        window: as in ``Rule``, counted along the branch; 0: all.
        """
        place_L = np.arange(self.stop)
        position_L = place_L.copy()
        position_L[self.base :] = self.positions(0)
        seen_TL = (place_L < self.base) & (place_L <= position_L[start:, None])
        own_NN = np.eye(self.size, dtype=np.bool_)
        for place, parent in enumerate(self.parents):
            if parent >= 0:
                own_NN[place] |= own_NN[parent]
        first = max(0, start - self.base)
        seen_TL[len(seen_TL) - self.size + first :, self.base :] = own_NN[first:]
        if window:
            seen_TL &= position_L > position_L[start:, None] - window
        return seen_TL
