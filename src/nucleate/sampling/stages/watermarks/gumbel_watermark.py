"""The Gumbel watermark (Aaronson 2022; Kuditipudi et al., arXiv 2307.15593): Gumbel-max with keyed noise."""

from __future__ import annotations

from nucleate.sampling.stage import Draw, HistoryView, param
from nucleate.sampling.stages.selection import Gumbel
from nucleate.sampling.watermark_key import WatermarkKey, require_key

NOISE = "gumbel noise"
"""The purpose of the key, see ``WatermarkKey.numbers``."""


class GumbelWatermark(Draw):
    """Watermark: sample by the Gumbel-max trick, with noise that depends on a key and the last tokens."""

    uniforms = "each"
    seed: int | None = param(
        "Random seed, 0 to 2**64 - 1; none: a random one", default=None, low=0, high=2**64 - 1, name="seed"
    )
    context: int = param(
        "Number of last output tokens that the noise depends on; the first tokens of an output, and tokens after a "
        "repeated context, use the seed",
        default=4,
        low=1,
        public=False,
    )
    key: WatermarkKey | None = param("Secret key", default=None, public=False)

    score = Gumbel.score

    def verify(self) -> None:
        require_key(self.key, self.name)

    def noise_key(self, history: HistoryView) -> tuple[int, int] | None:
        context = history.context(self.context)
        if context is None or context.repeated:  # with the same noise again, text could loop
            return None
        return require_key(self.key, self.name).numbers(NOISE, context.tokens)
