"""Medusa heads in their public layouts, for any target model.

That of Medusa: ``medusa_lm_head.safetensors`` or ``medusa_lm_head.pt``, with residual blocks ``HEAD.BLOCK.linear`` and
an unembedding ``HEAD.BLOCKS`` for each head. That of vLLM: ``model.safetensors`` or ``pytorch_model.bin``, with
``blocks.HEAD.layers.BLOCK`` and ``lm_heads.HEAD``; the first one serves all heads with ``original_lm_head`` in the
config. ``token_map`` has the tokens of the target that the heads can draft, if these are not all. The number of heads
and blocks is that of the tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.numpy_llama import Floats
from nucleate.models.protocol import Model
from nucleate.speculative.draft import Proposer
from nucleate.speculative.neural.draft_checkpoint import FILES, Checkpoint, DraftVocabulary, TargetParts
from nucleate.speculative.neural.medusa import Block, Medusa

MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", *FILES)
ORIGINAL = "original_lm_head"


def load_medusa(given: Any, target: Model, tree_width: int) -> Callable[[], Proposer]:
    """A function that makes a proposer from a folder or Hugging Face id, for an engine.

    Raises ModelError for a folder that has no Medusa heads, or none for a target of this size.
    """
    checkpoint = MedusaCheckpoint(given, TargetParts(target))
    return lambda: PublicMedusa(checkpoint, tree_width)


LAYOUTS = (("{head}.{block}.linear", "{head}.{blocks}"), ("blocks.{head}.layers.{block}", "lm_heads.{head}"))
"""The names of blocks and unembeddings: those of Medusa, and those of vLLM."""


class MedusaCheckpoint(Checkpoint):
    """The weights of the heads."""

    def __init__(self, given: Any, target: TargetParts) -> None:
        super().__init__(given, MEDUSA_FILES)
        self.rename({"medusa_heads.": "", "medusa_head.": ""})
        self.target, width = target, target.hidden_size
        first = [layout[0].format(head=0, block=0) + ".weight" for layout in LAYOUTS]
        found = next((layout for layout, name in zip(LAYOUTS, first, strict=True) if name in self), None)
        if found is None:
            raise self.error(f"it has no {' or '.join(first)}, so it has no Medusa heads")
        block, unembedding = found
        count = next(n for n in itertools.count() if f"{block.format(head=n, block=0)}.weight" not in self)
        blocks = next(n for n in itertools.count() if f"{block.format(head=0, block=n)}.weight" not in self)
        self.heads = [
            [self._block(block.format(head=head, block=each)) for each in range(blocks)] for head in range(count)
        ]
        tokens = self["token_map"] if "token_map" in self else np.arange(target.vocab_size)
        self.vocabulary = DraftVocabulary(self, "token_map", tokens, target.vocab_size)
        names = [f"{unembedding.format(head=head, blocks=blocks)}.weight" for head in range(count)]
        if self.config.get(ORIGINAL):
            name = "lm_head.weight" if "lm_head.weight" in self else names[0]
            self.unembeddings = [self._unembedding(name)] * count
        else:
            self.unembeddings = [self._unembedding(name) for name in names]
        self.check_unused("lm_head.weight", *names)
        target.normalize(np.zeros((1, width), np.float32))  # fail here rather than in the first request

    def _block(self, name: str) -> Block:
        width = self.target.hidden_size
        self.check_shapes({f"{name}.weight": (width, width)})
        if f"{name}.bias" not in self:
            return self.matrix(name), None
        self.check_shapes({f"{name}.bias": (width,)})
        return self.matrix(name), self[f"{name}.bias"]

    def _unembedding(self, name: str) -> Floats:
        """The unembedding of a head [X, tokens], for the tokens that it can draft."""
        rows, ids = self[name], self.vocabulary.target_ids
        if len(rows) == self.target.vocab_size:
            rows = rows[ids]
        if rows.shape != (len(ids), self.target.hidden_size):
            raise self.error(f"{name} has the shape {rows.shape}, needed is {(len(ids), self.target.hidden_size)}")
        return np.ascontiguousarray(rows.T)


class PublicMedusa(Medusa):
    """See ``Proposer``."""

    def __init__(self, checkpoint: MedusaCheckpoint, tree_width: int = 1) -> None:
        self._checkpoint = checkpoint
        super().__init__(checkpoint, checkpoint.target, tree_width)  # type: ignore[arg-type]
        self.layers = (checkpoint.target.num_layers,)

    def _blocks(self, weights: Any) -> list[list[Block]]:
        return self._checkpoint.heads

    def _normalize(self, x_RX: Floats) -> Floats:
        return self._checkpoint.target.normalize(x_RX)

    def _unembed(self, x_RNX: Floats) -> Floats:
        matrices = self._checkpoint.unembeddings[: x_RNX.shape[1]]
        parts = [product(x_RNX[:, head], matrix) for head, matrix in enumerate(matrices)]
        logits_RNV = np.stack([self._checkpoint.vocabulary.logits(each_RD) for each_RD in parts], axis=1)
        return logits_RNV.reshape(-1, logits_RNV.shape[2])
