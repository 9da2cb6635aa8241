"""The attention mask and the positions of a draft tree.

The tokens of a tree are computed one after the other, and their keys and values are stored in that order. But the
position of a token is given by its depth, and of the tree it attends to its ancestors and itself only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_TREE_TOKENS = 33
"""Maximum number of new tokens of an input with a tree that the attention kernel takes."""


class TreeMask:
    """A draft tree in the last tokens of a sequence of ``stop`` tokens.

    parents: for each token of the tree, the index in the tree of its parent, an earlier one; -1 for the token before
    the tree.
    """

    def __init__(self, parents: Sequence[int], stop: int) -> None:
        self.parents, self.stop = parents, stop
        self.size, self.base = len(parents), stop - len(parents)  #: base: the index of the first token of the tree
        depths: list[int] = []
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.depths = depths

    def positions(self, start: int) -> NDArray[np.int64]:
        """The positions of the tokens of the tree, from token ``start`` of the sequence on."""
        return np.array(self.depths[max(0, start - self.base) :], np.int64) + self.base

    def mask(self, start: int, window: int = 0) -> NDArray[np.bool_]:
        """Whether each token from ``start`` on attends to each token of the sequence, [stop - start, stop].

        window: size of the sliding window, see ``AttentionRule``, counted in positions; 0: none.
        """
        index_L = np.arange(self.stop)
        position_L = index_L.copy()
        position_L[self.base :] = self.positions(0)
        mask_TL = (index_L < self.base) & (index_L <= position_L[start:, None])
        tree_NN = np.eye(self.size, dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                tree_NN[node] |= tree_NN[parent]
        first = max(0, start - self.base)
        mask_TL[len(mask_TL) - self.size + first :, self.base :] = tree_NN[first:]
        if window:
            mask_TL &= position_L > position_L[start:, None] - window
        return mask_TL
