"""Minimum output length. The stop matcher ignores stop strings until then as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.sampling.maths import INFINITY
from nucleate.sampling.stage import History, Shift, TokenInfo, param


class MinTokens(Shift):
    """Ban EOS and stop token ids until the output has a minimum length."""

    rank = 30
    touches = "listed"
    n: int = param(
        "Minimum number of output tokens before EOS or a stop may end the output", neutral=0, low=0, name="min_tokens"
    )
    ends: tuple[int, ...] = param(
        "The token ids that end the output: EOS and stop_token_ids", default=(), low=0, public=False
    )

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.listed

    def listing(self, history: History) -> Mapping[int, float]:
        return dict.fromkeys(self.ends, -INFINITY) if len(history.output) < self.n else {}
