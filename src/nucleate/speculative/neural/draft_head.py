"""What trained draft methods share: weights, KV cache blocks, captured hidden states, and a transformer layer.

The hidden states of a sequence are buffered until the head has processed them. The layer is in NumPy, over a paged KV
cache. Everything is float32; sizes are those of the target.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.models import cpu_operations
from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.model_files import read_metadata
from nucleate.models.numpy_llama import Floats, Llama, read
from nucleate.models.paged_cache import AttentionRule, BatchLayout, KVCache, allocate_kv_cache
from nucleate.models.protocol import ModelError
from nucleate.models.runner import BLOCK, ModelInput
from nucleate.speculative.draft import TargetOutput
from nucleate.speculative.neural.draft_sampling import ChainBuilder, TrainedProposer


class KVSlots:
    """The block tables of sequences. blocks: number of blocks; block_size: tokens per block."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(blocks))
        self.tables: OrderedDict[int, list[int]] = OrderedDict()

    def allocate(self, key: int, tokens: int, protected_keys: Iterable[int]) -> list[int]:
        """Allocate blocks for ``tokens`` tokens of a sequence. Returns the keys of the sequences evicted for it.

        ``protected_keys`` are not evicted. If there are not enough blocks, the sequence itself is evicted.
        """
        table = self.tables.setdefault(key, [])
        self.tables.move_to_end(key)
        num_missing = -(-tokens // self.block_size) - len(table)
        evicted: list[int] = []
        if num_missing > len(self.free):
            protected = {key, *protected_keys}
            for old in [old for old in self.tables if old not in protected]:
                evicted.append(old)
                self.free_sequence(old)
                if num_missing <= len(self.free):
                    break
        if num_missing > len(self.free):
            self.free_sequence(key)
            return [*evicted, key]
        table += [self.free.pop() for _ in range(num_missing)]
        return evicted

    def free_sequence(self, key: int) -> None:
        self.free += self.tables.pop(key, [])


MAX_PENDING = 512
"""Maximum number of hidden states that are buffered between drafts; then the older half is dropped."""


@dataclass
class CapturedHiddenStates:
    """Hidden states of ``count`` tokens of a sequence from position ``base`` on; those from ``first`` on are stored.

    num_processed: for how many of these tokens the draft head has KV cache entries.
    """

    copy: Callable[[Any], Any]  #: copies an array
    concatenate: Callable[[Sequence[Any]], Any]
    base: int = 0
    first: int = 0
    count: int = 0
    num_processed: int = 0
    _chunks: list[Any] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The position after the last token with a known hidden state."""
        return self.base + self.count

    def add(self, output: TargetOutput) -> None:
        """Add hidden states. After a gap, the earlier ones are dropped."""
        num_known = self.stop - output.start if self.count else -1
        new_TX = output.hidden_states_TF[max(0, num_known) :]
        if not len(new_TX):
            return
        if num_known < 0:
            self._begin(output.start, [])
        self._chunks.append(self.copy(new_TX))
        self.count += len(new_TX)
        if self.count - self.num_processed > MAX_PENDING:
            kept_TX = self.copy(self._all_states()[-(MAX_PENDING // 2) :])
            self._begin(self.stop - len(kept_TX), [kept_TX])

    def states(self, start: int) -> Any:
        """The hidden states from index ``start`` on, relative to ``base``: [count - start, X]."""
        return self._all_states()[start - self.first :]

    def mark_processed(self, keep: int = 1) -> None:
        """Mark all tokens as processed; the last ``keep`` hidden states stay stored."""
        last_TX = self._all_states()[-keep:]
        self.num_processed, self.first = self.count, self.count - len(last_TX)
        self._chunks = [self.copy(last_TX)]

    def _all_states(self) -> Any:
        if len(self._chunks) > 1:
            self._chunks = [self.concatenate(self._chunks)]
        return self._chunks[0]

    def _begin(self, base: int, chunks: list[Any]) -> None:
        self.base, self.first, self.num_processed, self._chunks = base, 0, 0, chunks
        self.count = sum(map(len, chunks))


def as_array(states_TF: Any) -> Floats:
    """A copy of hidden states as an array; they are tensors on a GPU."""
    return np.array(states_TF.cpu().numpy() if hasattr(states_TF, "cpu") else states_TF, np.float32)


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


class DraftLayer:
    """The weights and the KV cache of one layer."""

    def __init__(self, weights: Weights, prefix: str, target: Llama, blocks: int) -> None:
        self._target = target
        self._query, self._out = weights.matrix(prefix + "query"), weights.matrix(prefix + "out")
        self._key_value = weights.matrix(prefix + "key", prefix + "value")
        self._query_bias, self._out_bias = weights.bias(prefix + "query"), weights.bias(prefix + "out")
        self._key_value_bias = weights.bias(prefix + "key", prefix + "value")
        self._norm = weights[prefix + "mlp_norm.weight"]
        self._gate_up, self._down = weights.matrix(prefix + "gate", prefix + "up"), weights.matrix(prefix + "down")
        self.pool: KVCache = allocate_kv_cache(blocks, BLOCK, target.kv_heads, target.head_size, target.head_size)
        self.rule = AttentionRule(target.head_size**-0.5)

    def query(self, x_TX: Floats, rotary: tuple[Floats, Floats]) -> Floats:
        """Rotated queries [T, heads, head size]."""
        query_TY = product(x_TX, self._query) + self._query_bias
        query_THD = query_TY.reshape(len(x_TX), -1, self._target.head_size)
        cpu_operations.rotate(query_THD, *rotary)
        return query_THD

    def key_value(self, x_TX: Floats, rotary: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Rotated keys, and values: [T, kv heads, head size] each."""
        key_value_TY = product(x_TX, self._key_value) + self._key_value_bias
        key_value_TKD = key_value_TY.reshape(len(x_TX), -1, self._target.head_size)
        key_TKD, value_TKD = key_value_TKD[:, : self._target.kv_heads], key_value_TKD[:, self._target.kv_heads :]
        cpu_operations.rotate(key_TKD, *rotary)
        return key_TKD, value_TKD

    def output(self, x_TX: Floats, heads_THD: Floats) -> Floats:
        """Apply the output projection and the MLP, both with residuals."""
        x_TX = x_TX + product(heads_THD.reshape(len(x_TX), -1), self._out) + self._out_bias
        gate_up_TY = product(rms_normalize(x_TX, self._target.epsilon) * self._norm, self._gate_up)
        gated_TY = np.empty((len(x_TX), gate_up_TY.shape[1] // 2), np.float32)
        cpu_operations.gate(gate_up_TY, gated_TY)
        out: Floats = x_TX + product(gated_TY, self._down)
        return out


class DraftHead(TrainedProposer):
    """Base class of proposers with a KV cache over hidden states: their sequences, and the blocks of these.

    blocks: size of the KV cache. copy, concatenate: functions for hidden states.
    """

    def __init__(
        self,
        blocks: int,
        copy: Callable[[Any], Any] = np.array,
        concatenate: Callable[[Sequence[Any]], Any] = np.concatenate,
    ) -> None:
        self._kv_slots, self._captured = KVSlots(blocks, BLOCK), dict[int, CapturedHiddenStates]()
        self._new_captured = partial(CapturedHiddenStates, copy, concatenate)

    def observe(self, outputs: Sequence[TargetOutput]) -> None:
        for output in outputs:
            self._captured.setdefault(output.key, self._new_captured()).add(output)

    def forget(self, key: int, output_ids: Sequence[int] = ()) -> None:
        self._captured.pop(key, None)
        self._kv_slots.free_sequence(key)

    def _num_cached(self, max_tokens: int) -> int:
        """The number of draft tokens that a draft writes to the KV cache."""
        return max_tokens

    def _prepare(self, chain: ChainBuilder, keys: Sequence[int]) -> bool:
        """Whether all but the last token have hidden states, and the KV cache has space."""
        key, states, ids = chain.context.key, self._captured.get(chain.context.key), chain.context.token_ids
        if states is None or states.stop != len(ids) - 1 or not states.count:
            return False
        chain.ids = [*ids]
        for evicted in self._kv_slots.allocate(key, states.count + self._num_cached(chain.max_tokens), keys):
            self._captured.pop(evicted, None)
        return key in self._captured

    def _states(self, chain: ChainBuilder) -> CapturedHiddenStates:
        return self._captured[chain.context.key]

    def _model_input(self, chain: ChainBuilder, start: int, stop: int, shift: int = 0) -> ModelInput:
        """The model input for the captured tokens ``start`` to ``stop`` of a sequence, ``shift`` positions later."""
        key = chain.context.key
        ids = chain.ids[self._captured[key].base + shift :]
        return ModelInput(key, ids, start, stop, self._kv_slots.tables[key], 1)

    def _pending_layout(self, chains: Sequence[ChainBuilder], shift: int = 0) -> BatchLayout:
        """The layout of the tokens whose hidden states are not processed yet."""
        spans = [(chain, self._states(chain)) for chain in chains]
        parts = [self._model_input(chain, one.num_processed, one.count, shift) for chain, one in spans]
        return BatchLayout(parts, BLOCK)


DATA = Path(__file__).parent / "data"
"""Part of a source checkout. Wheels have the files in a second package, nucleate-draft-weights."""


class Weights:
    """The tensors of one trained draft method, by name."""

    def __init__(self, path: Path) -> None:
        self._tensors = read(path)
        self.metadata = read_metadata(path)

    def __getitem__(self, name: str) -> Floats:
        found: Floats = self._tensors[name]
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def matrix(self, *names: str) -> Floats:
        """The transposed weights of linear layers with the same input, concatenated: [in, out]."""
        return np.ascontiguousarray(np.concatenate([self[f"{name}.weight"] for name in names]).T)

    def bias(self, *names: str) -> Floats:
        """The biases of linear layers with the same input, concatenated: [out]. Zero for a layer without."""
        return np.concatenate(
            [
                self[f"{name}.bias"] if f"{name}.bias" in self else np.zeros(len(self[f"{name}.weight"]), np.float32)
                for name in names
            ]
        )

    def count(self, prefix: str) -> int:
        """The number of modules with names of ``prefix`` and a number."""
        return len({name[len(prefix) :].split(".")[0] for name in self._tensors if name.startswith(prefix)})

    def with_prefix(self, prefix: str) -> dict[str, Floats]:
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}


def weights_for(name: str, model: object) -> tuple[Weights, Llama]:
    """The draft weights of a method, and the model.

    Raises ModelError for a model they were not trained for, and if the package with the weights is not installed.
    """
    requirement, path = f"the draft weights for {name!r} are for the embedded model", DATA / f"{name}.safetensors"
    if not isinstance(model, Llama):
        runtime = getattr(model, "runtime", type(model).__name__)
        raise ModelError(f"{requirement} on the numpy runtime, not on {runtime}")
    if not path.is_file():
        how = "in the source tree: pip install ./packages/draft-weights"
        raise ModelError(f"the draft weights for {name!r} are not installed; {how}")
    weights = Weights(path)
    target = "" if model.folder is None else sha256((model.folder / "model.safetensors").read_bytes()).hexdigest()
    if target != weights.metadata.get("target"):
        raise ModelError(f"{requirement}; the model in {model.folder or 'memory'} is a different one")
    return weights, model
