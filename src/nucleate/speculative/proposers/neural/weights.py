"""Loads draft weights, and checks which target they were trained for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.models.llama.numpy_llama import Floats, Llama, read
from nucleate.models.protocol import ModelError

DATA = Path(__file__).parent / "data"


class Weights:
    """The tensors of one part, by the names they were trained under."""

    def __init__(self, path: Path) -> None:
        self._tensors = read(path)
        self.about = about(path)

    def __getitem__(self, name: str) -> Floats:
        return self._tensors[name]

    def matrix(self, *names: str) -> Floats:
        """Of linear layers that read the same, side by side: [in, out]."""
        return np.ascontiguousarray(np.concatenate([self[f"{name}.weight"] for name in names]).T)

    def count(self, prefix: str) -> int:
        """How many parts are numbered after a prefix."""
        return len({name[len(prefix) :].split(".")[0] for name in self._tensors if name.startswith(prefix)})

    def beginning(self, prefix: str) -> dict[str, Floats]:
        """All tensors whose names begin so."""
        return {name: tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}


def about(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def digest(folder: Path) -> str:
    """A fingerprint of a model's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def weights_for(name: str, model: object) -> tuple[Weights, Llama]:
    """The trained part of this name, and the model. Raises ModelError for a model it was not trained for."""
    what, weights = f"the trained part {name!r} is for the embedded model", Weights(DATA / f"{name}.safetensors")
    if not isinstance(model, Llama):
        runtime = getattr(model, "runtime", type(model).__name__)
        raise ModelError(f"{what} on the numpy runtime, not for one on {runtime}")
    if model.folder is None or digest(model.folder) != weights.about.get("target"):
        raise ModelError(f"{what}; the model in {model.folder or 'memory'} is another")
    return weights, model
