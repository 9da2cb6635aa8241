"""Logprobs of the distribution at the stage's position in the pipeline."""

from __future__ import annotations

from nucleate.sampling.stage import Tap, param


class Logprobs(Tap):
    """Report logprobs and ranks of the sampled token, of the most likely ones and of given ones."""

    rank = 98
    n: int | None = param(
        "Number of most likely tokens to report logprobs for, in addition to the sampled one",
        neutral=None,
        low=0,
        name="logprobs",
    )
    ids: tuple[int, ...] = param(
        "Further token ids to report logprobs for", neutral=(), low=0, name="logprob_token_ids"
    )

    @property
    def request(self) -> tuple[int, tuple[int, ...]]:
        return self.n or 0, self.ids
