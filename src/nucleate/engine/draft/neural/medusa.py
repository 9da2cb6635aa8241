"""Heads that guess the tokens after the next one from the target's last hidden state: Medusa (arXiv 2401.10774).

Each is some residual blocks before the target's own unembedding. None knows which token was drawn meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nucleate.engine.draft.draft import Draft, Read, State
from nucleate.engine.draft.neural.chain import Chain, drafts_of
from nucleate.engine.draft.neural.draw import draw
from nucleate.engine.draft.neural.files import Weights, weights_for
from nucleate.models.few import product
from nucleate.models.llama import Floats, Llama, one_thread


class Medusa:
    """See ``Proposer``; it drafts as many tokens at most as there are heads."""

    layers: tuple[int, ...] = (6,)

    def __init__(self, weights: Weights, target: Llama) -> None:
        self._target = target
        self._heads = [
            [weights.matrix(f"heads.{head}.{block}") for block in range(weights.count(f"heads.{head}."))]
            for head in range(weights.count("heads."))
        ]
        self._last: dict[int, tuple[int, Floats]] = {}  # the place of the last token that was read, and its state

    @classmethod
    def load(cls, model: object) -> Medusa:
        """The one that was trained for a model. Raises ModelError for others."""
        return cls(*weights_for("medusa", model))

    def propose(self, states: Sequence[State], counts: Sequence[int]) -> list[Draft]:
        """See ``Proposer.propose``. None for a sequence of which the target has not read all but the last token."""
        most = len(self._heads)
        chains = [Chain(state, min(count, most)) for state, count in zip(states, counts, strict=True)]
        going = [
            chain
            for chain in chains
            if chain.count > 0 and self._last.get(chain.state.key, (-1,))[0] == len(chain.state.token_ids) - 2
        ]
        if going:
            with one_thread():
                self._draft(going)
        return drafts_of(chains)

    def _draft(self, going: list[Chain]) -> None:
        target = self._target
        x_RX = target.normalise(np.stack([self._last[chain.state.key][1] for chain in going]), target.norm)
        count = max(chain.count for chain in going)
        guesses = []
        for head in self._heads[:count]:
            y_RX = x_RX
            for block in head:
                z_RX = product(y_RX, block)
                with np.errstate(over="ignore"):  # exp(-z) = inf is right
                    y_RX = y_RX + z_RX / (1 + np.exp(-z_RX))
            guesses.append(y_RX)
        logits_NV = product(np.stack(guesses, axis=1).reshape(len(going) * count, -1), target.unembedding)
        drawn = draw(logits_NV, [chain.state for chain in going for _ in range(count)], [*range(count)] * len(going))
        for row, chain in enumerate(going):
            for one in drawn[row * count : (row + 1) * count]:
                if not chain.add(one):
                    break

    def read(self, readings: Sequence[Read]) -> None:
        """See ``Proposer.read``. Only the last token counts."""
        for read in readings:
            if len(read.features_TF):
                self._last[read.key] = read.start + len(read.features_TF) - 1, read.features_TF[-1].copy()

    def accepted(self, key: int, count: int) -> None:
        """It is seen by what the target reads."""

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        """See ``Proposer.forget``. Nothing is learned."""
        self._last.pop(key, None)
