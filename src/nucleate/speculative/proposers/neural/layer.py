"""A transformer layer of a draft head in NumPy, over a paged KV cache.

Everything is float32; sizes are those of the target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nucleate.models import cpu_operations
from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.numpy_llama import Floats, Llama
from nucleate.models.paged_cache import AttentionRule, KVCache, allocate_kv_cache
from nucleate.models.runner import BLOCK
from nucleate.speculative.proposers.neural.weights import Weights

MAX_CACHED_TOKENS = 1 << 16
"""Default KV cache size in tokens; memory is committed when it is first written."""


def rms_normalize(x_TX: Floats, epsilon: np.float32) -> Floats:
    """Scale each row to a mean square of 1 (RMSNorm without weights)."""
    square_T = np.einsum("...x,...x->...", x_TX, x_TX) / np.float32(x_TX.shape[-1])
    scaled: Floats = x_TX / np.sqrt(square_T + epsilon)[..., None]
    return scaled


def fuse_hidden_states(hidden_states_TF: Floats, width: int, epsilon: np.float32, fuse: Floats) -> Floats:
    """Project the concatenated, RMS-normalized hidden states of several layers to one: [T, width]."""
    units = rms_normalize(hidden_states_TF.reshape(len(hidden_states_TF), -1, width), epsilon)
    return product(units.reshape(len(hidden_states_TF), -1), fuse)


def rotary_tables(positions_T: NDArray[np.int64], target: Llama) -> tuple[Floats, Floats]:
    """Cosines and sines of rotary positions."""
    angle = positions_T[:, None] * target.frequencies
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class DraftLayer:
    """The weights and the KV cache of one layer."""

    def __init__(self, weights: Weights, prefix: str, target: Llama, blocks: int) -> None:
        self._target = target
        self._query, self._out = weights.matrix(prefix + "query"), weights.matrix(prefix + "out")
        self._key_value = weights.matrix(prefix + "key", prefix + "value")
        self._norm = weights[prefix + "mlp_norm.weight"]
        self._gate_up, self._down = weights.matrix(prefix + "gate", prefix + "up"), weights.matrix(prefix + "down")
        self.pool: KVCache = allocate_kv_cache(blocks, BLOCK, target.kv_heads, target.head_size, target.head_size)
        self.rule = AttentionRule(target.head_size**-0.5)

    def query(self, x_TX: Floats, rotary: tuple[Floats, Floats]) -> Floats:
        """Rotated queries [T, heads, head size]."""
        query_THD = product(x_TX, self._query).reshape(len(x_TX), -1, self._target.head_size)
        cpu_operations.rotate(query_THD, *rotary)
        return query_THD

    def key_value(self, x_TX: Floats, rotary: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Rotated keys, and values: [T, kv heads, head size] each."""
        key_value_TKD = product(x_TX, self._key_value).reshape(len(x_TX), -1, self._target.head_size)
        key_TKD, value_TKD = key_value_TKD[:, : self._target.kv_heads], key_value_TKD[:, self._target.kv_heads :]
        cpu_operations.rotate(key_TKD, *rotary)
        return key_TKD, value_TKD

    def output(self, x_TX: Floats, heads_THD: Floats) -> Floats:
        """Apply the output projection and the MLP, both with residuals."""
        x_TX = x_TX + product(heads_THD.reshape(len(x_TX), -1), self._out)
        gate_up_TY = product(rms_normalize(x_TX, self._target.epsilon) * self._norm, self._gate_up)
        gated_TY = np.empty((len(x_TX), gate_up_TY.shape[1] // 2), np.float32)
        cpu_operations.gate(gate_up_TY, gated_TY)
        out: Floats = x_TX + product(gated_TY, self._down)
        return out
