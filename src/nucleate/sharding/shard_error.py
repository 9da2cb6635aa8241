"""ShardError: the ranks cannot sample together."""

from __future__ import annotations


class ShardError(RuntimeError):
    """The ranks cannot sample together: their setups differ, or a rank has ended. The sampler cannot be used again."""
