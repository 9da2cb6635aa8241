"""SynthID-Text (Dathathri et al., Nature 634, 2024), non-distortionary: a tournament between candidates.

Each layer of the tournament compares two candidates by a pseudo-random bit g of the key, the context and the token. The
distribution of the winner has a closed form: p <- p * (1 + g - sum of p * g), layer after layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nucleate.sampling.stage import HistoryView, Transform, param
from nucleate.sampling.watermark_key import WatermarkKey, require_key, token_words

TOURNAMENT = "synthid"
"""The purpose of the key, see ``WatermarkKey.numbers``."""


class SynthId(Transform):
    """Watermark: draw by a tournament that favours tokens with pseudo-random bits of 1 (SynthID-Text)."""

    rank = 95
    name = "synthid"
    layers: int = param(
        "Number of layers of the tournament; 0: off", neutral=0, default=30, low=0, high=32, public=False
    )
    context: int = param(
        "Number of last output tokens that the bits depend on; the first tokens of an output, and tokens after a "
        "repeated context, carry no watermark",
        default=4,
        low=1,
        public=False,
    )
    key: WatermarkKey | None = param("Secret key", default=None, public=False)

    def verify(self) -> None:
        require_key(self.key, self.name)

    def apply(self, ids: Any, x: Any, history: HistoryView) -> Any:
        context = history.context(self.context)
        if context is None or context.repeated:
            return x
        words_N = token_words(*require_key(self.key, self.name).numbers(TOURNAMENT, context.tokens), ids)
        p_N = np.exp(x)
        p_N /= p_N.sum()
        for bits_N in ((words_N >> np.arange(self.layers, dtype=np.uint32)[:, None]) & np.uint32(1)).astype(np.float64):
            p_N *= bits_N + max(1.0 - float(p_N @ bits_N), 0.0)  # rounding may make a sum exceed 1
        return np.log(p_N)
