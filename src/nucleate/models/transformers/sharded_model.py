"""One rank's shard of a Transformers model, by the tensor-parallel plan of the model; its head returns local columns.

Exchanges only inside the layers of the model, over the default process group of torch.distributed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.decoding_context import declared_decoding
from nucleate.models.transformers.transformers_model import TransformersModel, layer_configs, libraries, model_class
from nucleate.parameters.converters import one_line

GATHERED = ("colwise_gather_output", "colwise_rep")
"""The styles of a language model head whose columns are gathered."""

HEAD_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value")
"""Projections whose output holds attention heads."""


class ShardedTransformers(TransformersModel):
    """See ``TransformersModel``. rank, size: of this process among those that share the model.

    ``vocab_size`` is that of the whole model; its logits are the columns from ``first_id`` on, ``columns`` of them.
    """

    def __init__(self, folder: Path, device: str, dtype: str, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        super().__init__(folder, device, dtype)

    def _load(self, folder: Path, config: Any, dtype: str, device: Any) -> tuple[Any, Any]:
        cls = _sharded_class(model_class(config), device, self._size)
        plan = {name: "colwise" for name, style in (cls._tp_plan or {}).items() if style in GATHERED}
        sharding = {"tp_size": self._size, "tp_plan": plan or None}
        model, found = cls.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False, distributed_config=sharding
        )
        return model, found

    def _wrap(self, model: Any, device: str) -> None:
        super()._wrap(model, device)
        self.first_id, self.columns = self.columns_of(self._rank)
        self.runtime += f", {self._size} ranks"

    def columns_of(self, rank: int) -> tuple[int, int]:
        """The first token id of a rank, and how many it has: as torch.chunk divides the vocabulary."""
        width = -(-self.vocab_size // self._size)
        first = min(rank * width, self.vocab_size)
        return first, min(width, self.vocab_size - first)

    def _decoding(self) -> Any:
        return declared_decoding(self.model)._replace(cache=None, reason="it is sharded")

    @property
    def token_bytes(self) -> int:
        """Approximate bytes of KV cache per token on this rank."""
        return max(1, super().token_bytes // self._size)

    @property
    def free_memory(self) -> int:
        """Bytes free now for this rank: on a CPU, ranks are assumed to share a machine."""
        return super().free_memory // (1 if self.model.device.type == "cuda" else self._size)

    def local_logits(self, logits_LX: Any) -> Any:
        """The columns of this rank, of logits that the model has gathered or not. Raises ModelError."""
        width = logits_LX.shape[-1]
        if width == self.columns:
            return logits_LX
        if width != self.vocab_size:
            raise ModelError(f"its head returns {width} columns; a rank has {self.columns} of {self.vocab_size}")
        return logits_LX[..., self.first_id : self.first_id + self.columns]


def check_shardable(folder: Path, size: int) -> None:
    """Raise ModelError for a model that cannot be sharded over so many ranks. Reads its config only."""
    _, transformers = libraries()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of transformers
        raise ModelError(f"cannot read the config of {folder}: {one_line(error)}") from error
    cls = model_class(config)
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ModelError(f"{cls.__name__} has no tensor-parallel plan in Transformers; use tensor_parallel=1")
    if not any(name.endswith(HEAD_PROJECTIONS) and style == "colwise" for name, style in plan.items()):
        return
    counts = set()
    for layer in layer_configs(text):
        heads = layer.num_attention_heads
        counts |= {heads, getattr(layer, "num_key_value_heads", None) or heads}
    if any(count % size for count in counts):
        most = math.gcd(*counts)
        allowed = ", ".join(str(number) for number in range(1, most + 1) if most % number == 0)
        numbers = " and ".join(map(str, sorted(counts, reverse=True)))
        raise ModelError(
            f"{cls.__name__} has {numbers} heads (attention, key and value), which {size} ranks cannot share; "
            f"tensor_parallel may be {allowed}"
        )


def _sharded_class(cls: Any, device: Any, size: int) -> Any:
    """A model class that is sharded over the processes of the default group, on a given device.

    Transformers would take the first accelerator of the machine, and needs the package accelerate also on a CPU.
    """
    try:
        from transformers.distributed.utils import TransformersDeviceMesh
    except ImportError:
        _, transformers = libraries()
        raise ModelError(f"tensor_parallel needs Transformers 5.23 or newer, got {transformers.__version__}") from None

    def prepare(_: Any, config: Any, device_map: Any = None) -> Any:
        from transformers.distributed import DistributedConfig

        dense = ("pp", "dp_replicate", "fsdp", "tp"), (1, 1, 1, size)
        expert = ("pp", "dp_replicate", "efsdp", "ep"), (1, 1, size, 1)
        meshes = [
            torch.distributed.init_device_mesh(device.type, shape, mesh_dim_names=names)
            for names, shape in (dense, expert)
        ]
        on = None if device.type == "cpu" else device
        return DistributedConfig.from_dict(config), on, TransformersDeviceMesh(*meshes)

    members = {"prepare_distribute_model": classmethod(prepare), "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)
