"""Draft heads in their public layouts: their folders, and what a head shares with its target.

A folder has config.json and the weights, in one safetensors file or one of torch. Heads run in NumPy, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.models.cpu_operations import compiled_matmul as product
from nucleate.models.loader import download
from nucleate.models.model_files import read_config
from nucleate.models.numpy_llama import Floats, Llama, read
from nucleate.models.protocol import Model, ModelError
from nucleate.models.transformers.transformers_model import (
    EmbeddingRows,
    TransformersModel,
    import_torch,
    read_pickled,
)
from nucleate.speculative.neural.draft_head import Weights, as_array

FILES = ("model.safetensors", "pytorch_model.bin")
NO_WEIGHTS = ("t2d", "rotary_emb.inv_freq")
"""Last parts of the names of tensors that follow from others."""


class TargetParts:
    """What heads use of a target: its sizes, embeddings, final norm and unembedding.

    Raises ModelError for a target whose hidden states cannot be read.
    """

    def __init__(self, model: Model) -> None:
        self._model: Any = model
        self.vocab_size = model.vocab_size
        self.embedding: Any  #: rows [V, X]
        if isinstance(model, Llama):
            self.num_layers, self.hidden_size, self.embedding = len(model.layers), model.hidden_size, model.embedding
        elif isinstance(model, TransformersModel):
            text = model.model.config.get_text_config(decoder=True)
            self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
            self.embedding = EmbeddingRows(model.model.get_input_embeddings().weight.detach())
        else:
            raise ModelError(f"a draft head needs a target whose hidden states can be read, not one on {model.runtime}")

    def normalize(self, x_TX: Floats) -> Floats:
        """Apply the final norm to hidden states [T, X]. Raises ModelError for a target whose norm is not found."""
        if isinstance(self._model, Llama):
            return self._model.normalise(x_TX, self._model.norm)
        norm = getattr(self._model.model.get_decoder(), "norm", None)
        if norm is None:
            raise ModelError(f"the final norm of {type(self._model.model).__name__} is not found")
        return self._call(norm, x_TX)

    def logits(self, x_RX: Floats) -> Floats:
        """The unembedding of normalized hidden states: [R, V]."""
        if isinstance(self._model, Llama):
            return product(x_RX, self._model.unembedding)
        return self._call(self._model.model.get_output_embeddings(), x_RX)

    def _call(self, module: Any, x_TX: Floats) -> Floats:
        """Apply a module of the target, on its device and in its dtype."""
        torch, model = import_torch(), self._model.model
        with torch.inference_mode():
            return as_array(module(torch.from_numpy(x_TX).to(model.device, model.dtype)).float())


class Checkpoint(Weights):
    """The config and the tensors of a draft head. given: a folder or a Hugging Face id. Raises ModelError."""

    def __init__(self, given: Any, files: Sequence[str] = FILES) -> None:
        folder = Path(str(given)).expanduser()
        if not folder.is_dir():
            folder = download(str(given), patterns=("config.json", *files))
        self.folder, self.config = folder, read_config(folder / "config.json")
        path = next((folder / name for name in files if (folder / name).is_file()), None)
        if path is None:
            raise ModelError(f"{folder} has none of the files {', '.join(files)}")
        self._tensors = read(path, integers=True) if path.suffix == ".safetensors" else read_pickled(path)
        self._used: set[str] = set()

    def error(self, what: str) -> ModelError:
        return ModelError(f"cannot use the draft head in {self.folder}: {what}")

    def __getitem__(self, name: str) -> Floats:
        if name not in self._tensors:
            raise self.error(f"{name} is missing")
        self._used.add(name)
        found: Floats = self._tensors[name]
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors by the beginnings of their names."""
        for name in [*self._tensors]:
            for old, new in names.items():
                if name.startswith(old):
                    self._tensors[new + name[len(old) :]] = self._tensors.pop(name)
                    break

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ModelError for a tensor that is missing, or has another shape."""
        for name, shape in shapes.items():
            if self[name].shape != shape:
                raise self.error(f"{name} has the shape {self[name].shape}, this target needs {shape}")

    def check_unused(self, *ignored: str) -> None:
        """Raise ModelError for a tensor that was not read, and is none of those."""
        for name in self._tensors:
            if name not in self._used and not name.endswith(NO_WEIGHTS) and name not in ignored:
                raise self.error(f"it has a tensor that these heads do not have: {name}")


class DraftVocabulary:
    """The tokens of the target that a head with a vocabulary of its own can draft. target_ids: of its tokens."""

    def __init__(self, checkpoint: Checkpoint, name: str, target_ids: Any, vocab_size: int) -> None:
        self._vocab_size, self.target_ids, count = vocab_size, np.asarray(target_ids), len(target_ids)
        if not count or self.target_ids.min() < 0 or self.target_ids.max() >= vocab_size:
            raise checkpoint.error(f"{name} does not map its {count} tokens to the {vocab_size} of the target")
        self._all = count == vocab_size and np.array_equal(self.target_ids, np.arange(count))

    def __len__(self) -> int:
        return len(self.target_ids)

    def logits(self, logits_RD: Floats) -> Floats:
        """The logits of the target's tokens [R, V]; -inf for those that cannot be drafted."""
        if self._all:
            return logits_RD
        logits_RV = np.full((len(logits_RD), self._vocab_size), -np.inf, np.float32)
        logits_RV[:, self.target_ids] = logits_RD
        return logits_RV
