"""Logprobs: what the distribution was, as of the stage's place in the pipeline."""

from __future__ import annotations

from nucleate.sampling.stage import Tap, param


class Logprobs(Tap):
    """Report log-probabilities and ranks: of the token drawn, of the best ones, of given ones."""

    rank = 98
    n: int | None = param(
        "how many of the likeliest tokens to report, beside the one drawn", neutral=None, low=0, name="logprobs"
    )
    ids: tuple[int, ...] = param("token ids to report too", neutral=(), low=0, name="logprob_token_ids")

    @property
    def wanted(self) -> tuple[int, tuple[int, ...]]:
        return self.n or 0, self.ids
