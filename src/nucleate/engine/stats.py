"""Counters and gauges of an engine, as values."""

from __future__ import annotations

from typing import NamedTuple


class SpeculativeStats(NamedTuple):
    """Counters of speculative decoding since the engine started."""

    num_verification_steps: int = 0  #: per sequence: one for each forward pass that gave it new tokens, drafted or not
    draft_tokens: int = 0  #: draft tokens verified by the model
    accepted_tokens: int = 0  #: draft tokens accepted
    verified_tokens_per_position: tuple[int, ...] = ()
    """How often the draft token at each position (in a tree: depth) was verified, after all before it were accepted."""
    accepted_tokens_per_position: tuple[int, ...] = ()  #: how often it was accepted
    draft_seconds: float = 0.0  #: time spent in the draft method

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens; 0 if there were none."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of sampled tokens per verification step; 1 without drafts. Jump-forward tokens do not count."""
        return 1 + self.accepted_tokens / self.num_verification_steps if self.num_verification_steps else 1.0


class EngineStats(NamedTuple):
    """State of an engine now, and (from ``num_steps`` on) counters since it started."""

    num_running_seqs: int
    num_waiting_seqs: int  #: sequences that have not started, or were preempted
    num_kv_blocks: int  #: blocks of the paged KV cache
    num_used_kv_blocks: int
    num_steps: int  #: engine steps, with one forward pass each
    computed_tokens: int  #: tokens processed by the model: prompt, generated and draft tokens
    prefix_cache_queries: int  #: prompt tokens of all sequences that have finished
    prefix_cache_hits: int  #: those of them that came from the prefix cache
    sampled_tokens: int
    num_preemptions: int
    forward_seconds: float
    sampling_seconds: float
    grammar_mask_seconds: float  #: time to compute the token masks of structured output
    jump_forward_tokens: int  #: generated tokens that were not sampled because the grammar allowed only one
    speculative: SpeculativeStats = SpeculativeStats()

    @property
    def generation_tokens(self) -> int:
        """All generated tokens."""
        return self.sampled_tokens + self.jump_forward_tokens

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the prefix cache, 0 to 1."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV cache blocks in use, 0 to 1."""
        return self.num_used_kv_blocks / self.num_kv_blocks if self.num_kv_blocks else 0.0
