"""A transformer layer of a draft head in NumPy, over a paged KV cache.

Everything is float32; sizes are those of the target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nucleate.models.kernels import numpy_fallback
from nucleate.models.llama.numpy_llama import Floats, Llama
from nucleate.models.matmul import compiled_matmul as product
from nucleate.models.paged.kv_cache import AttentionRule, KVCache, allocate_kv_cache
from nucleate.models.runner import BLOCK
from nucleate.speculative.proposers.neural.weights import Weights

TOKENS = 1 << 16
"""That keys and values are kept of at most; memory is taken as it is first written."""


def unit(x_TX: Floats, epsilon: np.float32) -> Floats:
    """Each row with a mean square of 1."""
    square_T = np.einsum("...x,...x->...", x_TX, x_TX) / np.float32(x_TX.shape[-1])
    scaled: Floats = x_TX / np.sqrt(square_T + epsilon)[..., None]
    return scaled


def fused(features_TF: Floats, width: int, epsilon: np.float32, fuse: Floats) -> Floats:
    """Hidden states of several layers, each of unit size, as one: [T, width]."""
    units = unit(features_TF.reshape(len(features_TF), -1, width), epsilon)
    return product(units.reshape(len(features_TF), -1), fuse)


def rotation(positions_T: NDArray[np.int64], target: Llama) -> tuple[Floats, Floats]:
    """Cosines and sines of rotary positions."""
    angle = positions_T[:, None] * target.frequencies
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


class DraftLayer:
    """The weights of one, and the keys and values it has made."""

    def __init__(self, weights: Weights, prefix: str, target: Llama, blocks: int) -> None:
        self._target = target
        self._query, self._out = weights.matrix(prefix + "query"), weights.matrix(prefix + "out")
        self._key_value = weights.matrix(prefix + "key", prefix + "value")
        self._norm = weights[prefix + "mlp_norm.weight"]
        self._gate_up, self._down = weights.matrix(prefix + "gate", prefix + "up"), weights.matrix(prefix + "down")
        self.pool: KVCache = allocate_kv_cache(blocks, BLOCK, target.kv_heads, target.head_size, target.head_size)
        self.rule = AttentionRule(target.head_size**-0.5)

    def queries(self, x_TX: Floats, turn: tuple[Floats, Floats]) -> Floats:
        """[T, heads, size]."""
        query_THD = product(x_TX, self._query).reshape(len(x_TX), -1, self._target.head_size)
        numpy_fallback.rotate(query_THD, *turn)
        return query_THD

    def keys(self, x_TX: Floats, turn: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Keys and values, [T, kv heads, size] each."""
        both_TKD = product(x_TX, self._key_value).reshape(len(x_TX), -1, self._target.head_size)
        key_TKD, value_TKD = both_TKD[:, : self._target.kv_heads], both_TKD[:, self._target.kv_heads :]
        numpy_fallback.rotate(key_TKD, *turn)
        return key_TKD, value_TKD

    def rest(self, x_TX: Floats, heads_THD: Floats) -> Floats:
        """What comes after attention."""
        x_TX = x_TX + product(heads_THD.reshape(len(x_TX), -1), self._out)
        both_TY = product(unit(x_TX, self._target.epsilon) * self._norm, self._gate_up)
        gated_TY = np.empty((len(x_TX), both_TY.shape[1] // 2), np.float32)
        numpy_fallback.gate(both_TY, gated_TY)
        out: Floats = x_TX + product(gated_TY, self._down)
        return out
