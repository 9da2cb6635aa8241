"""A GGUF model as a Runner: batches of many sequences in one call of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nucleate.models.gguf.llama_library import GgufContext, LoadedModel, Token, llama_cpp
from nucleate.models.gguf.sequence_map import SequenceMap, WholeSequences
from nucleate.models.paged_cache import free_memory
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, NO_HIDDEN_STATES, Fork, ModelInput, Move

MAX_SLOTS = 256
"""Sequences of a context: running ones, and finished ones whose cells may be reused. llama.cpp allows no more."""
RECURRENT_SLOTS = 64
"""The same for recurrent models, which allocate the state of all sequences."""


class BatchedGguf:
    """See ``Runner``. memory: bytes for the KV cache. Raises ModelError if they are less than a block."""

    asynchronous = False
    tree_attention = False
    unbatched_reason = ""
    capture_enabled = True
    hidden_states = NO_HIDDEN_STATES

    def __init__(self, model: LoadedModel, memory: int, block_size: int = BLOCK) -> None:
        self.model, self.block_size, self.paged = model, block_size, not model.recurrent
        self.vocab_size, self.context_length, self.runtime = model.vocab_size, model.context_length, model.runtime
        size = model.options.n_ctx or memory // model.token_bytes
        self.blocks = size // block_size
        if not self.blocks:
            needed = block_size * model.token_bytes
            raise ModelError(f"the KV cache needs at least {needed} bytes (one block), got {memory}")
        self._check_memory()
        slots = model.options.n_seq_max or (MAX_SLOTS if self.paged else RECURRENT_SLOTS)
        self.max_sequences = min(slots, llama_cpp().llama_max_parallel_sequences())
        tokens = self.blocks * block_size
        slots = min(self.max_sequences, tokens)  # llama.cpp aborts if there are more sequences than tokens
        self._context = GgufContext(model, tokens, slots)
        if self.paged:
            self._map: SequenceMap | WholeSequences = SequenceMap(
                self._context, slots, block_size, model.options.prefix_cache_tokens
            )
        else:
            self._map = WholeSequences(self._context, slots)

    def _check_memory(self) -> None:
        """Raise ModelError for a KV cache that does not fit: llama.cpp would try to write to all of it."""
        needed, left = self.blocks * self.block_size * self.model.token_bytes, free_memory()
        if not self.model.uses_gpu and needed > left:
            size = f"{self.blocks * self.block_size} tokens"
            raise ModelError(
                f"a KV cache of {size} needs {needed >> 20} MiB, but only {left >> 20} MiB are free; reduce n_ctx"
            )

    def capture_hidden_states(self, layers: Sequence[int]) -> None:
        """See ``Runner.capture_hidden_states``. Only () is supported."""
        if layers:
            raise ModelError("llama.cpp does not return hidden states; use another draft method")

    def forward(self, inputs: Sequence[ModelInput]) -> NDArray[np.float32]:
        """See ``Runner.forward``. The logits are valid until the next call.

        Raises ValueError for ids outside the vocabulary and positions past the context, and ModelError.
        """
        for each in inputs:
            self._check(each)
        tokens: list[Token] = []
        done: list[tuple[int, int]] = []
        parts: list[NDArray[np.float32]] = []

        def compute() -> None:
            parts.append(self._context.forward(tokens).copy())
            tokens.clear()

        try:
            for each in inputs:
                slot, first = self._map.prepare(each.key, each.start, each.stop, each.block_ids, compute)
                done.append((each.key, first))
                with_logits = each.stop - each.num_logits
                tokens += [
                    Token(token, position, slot, position >= with_logits)
                    for position, token in enumerate(each.token_ids[first : each.stop], first)
                ]
            logits_LV = self._context.forward(tokens)
        except BaseException:
            for key, first in done:
                self._map.invalidate(key, first)
            raise
        finally:
            self._map.mark_computed()
        return np.concatenate([*parts, logits_LV]) if parts else logits_LV

    def _check(self, each: ModelInput) -> None:
        if each.stop > self.context_length:
            raise ValueError(f"{each.stop} tokens exceed the context length {self.context_length}")
        ids = each.token_ids[each.start : each.stop]
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise ValueError(f"token ids must be in 0..{self.vocab_size - 1}")

    def fork(self, forks: Sequence[Fork]) -> None:
        """See ``Runner.fork``."""
        for key, child, block in forks:
            self._map.fork(key, child, block)

    def move(self, moves: Sequence[Move]) -> None:
        """Never called: trees are not supported."""

    def forget(self, key: int) -> None:
        """See ``Runner.forget``."""
        self._map.forget(key)

    def warm(self) -> None:
        """Nothing to do."""
