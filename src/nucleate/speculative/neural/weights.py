"""Loads draft weights, and checks which target they were trained for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.models.numpy_llama import Floats, Llama, read
from nucleate.models.protocol import ModelError

DATA = Path(__file__).parent / "data"
"""Part of a source checkout. Wheels have the files in a second package, nucleate-draft-weights."""


class Weights:
    """The tensors of one trained draft method, by name."""

    def __init__(self, path: Path) -> None:
        self._tensors = read(path)
        self.metadata = read_metadata(path)

    def __getitem__(self, name: str) -> Floats:
        return self._tensors[name]

    def matrix(self, *names: str) -> Floats:
        """The transposed weights of linear layers with the same input, concatenated: [in, out]."""
        return np.ascontiguousarray(np.concatenate([self[f"{name}.weight"] for name in names]).T)

    def count(self, prefix: str) -> int:
        """The number of modules with names of ``prefix`` and a number."""
        return len({name[len(prefix) :].split(".")[0] for name in self._tensors if name.startswith(prefix)})

    def with_prefix(self, prefix: str) -> dict[str, Floats]:
        """The tensors whose names start with ``prefix``."""
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def weights_digest(folder: Path) -> str:
    """The SHA-256 of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


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
    if model.folder is None or weights_digest(model.folder) != weights.metadata.get("target"):
        raise ModelError(f"{requirement}; the model in {model.folder or 'memory'} is a different one")
    return weights, model
