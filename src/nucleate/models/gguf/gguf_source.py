"""A GGUF model that is found, and what its file recommends."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nucleate.models.gguf.gguf_model import GgufModel
from nucleate.models.gguf.gguf_options import GgufOptions
from nucleate.models.gguf.llama_library import llama_cpp
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

PREFIX = "general.sampling."
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_repeat": "repetition_penalty",
        "penalty_last_n": "penalty_last_n",
    }
)
"""Sampling parameters in GGUF files, and the fields of SamplingParams."""
MIROSTAT = {"1": "mirostat_v1", "2": "mirostat"}


class GgufSource:
    """See ``ModelSource``. path: of the file, also ``folder`` for messages."""

    in_memory = None

    def __init__(self, path: Path, options: GgufOptions) -> None:
        self.folder, self._options = path, options

    @classmethod
    def of(cls, path: Path, options: Any, *, device: str, dtype: str, runtime: str) -> GgufSource:
        """Check the arguments that apply to models in folders. Raises ModelError, ParameterError."""
        for name, value, allowed in (("dtype", dtype, ("auto",)), ("runtime", runtime, ("auto", "llama.cpp"))):
            if value not in allowed:
                raise ParameterError(name, f"{name} cannot be set for a GGUF model, got {shown(value)}")
        chosen = GgufOptions.of(options, device)
        if device not in ("auto", "cpu"):
            if not device.startswith("cuda") or device not in ("cuda", "cuda:0"):
                raise ParameterError(
                    "device", f"device must be auto, cpu or cuda for a GGUF model, got {shown(device)}"
                )
            if not llama_cpp().llama_supports_gpu_offload():
                raise ModelError("device cuda needs a build of llama-cpp-python for GPUs")
        return cls(path, chosen)

    @cached_property
    def _model(self) -> GgufModel:
        return GgufModel(self.folder, self._options)

    def load(self) -> GgufModel:
        """Load the model. Raises ModelError."""
        return self._model

    @property
    def generation_config_name(self) -> str:
        """What errors call the recommended parameters."""
        return f"the sampling parameters in {self.folder}"

    def recommended(self) -> dict[str, Any]:
        """The fields of SamplingParams that the file sets. Raises ModelError."""
        return recommended(self._model.metadata)

    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output. Raises ModelError."""
        return self._model.vocabulary.eos_token_ids


def recommended(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields of SamplingParams that the metadata of a file sets."""
    given = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    values = {field: _number(given[name]) for name, field in FIELDS.items() if name in given}
    if stage := MIROSTAT.get(given.get("mirostat", "")):
        values[f"{stage}_tau"] = _number(given.get("mirostat_tau", "5"))
        values[f"{stage}_eta"] = _number(given.get("mirostat_eta", "0.1"))
    return values


def _number(text: str) -> Any:
    """A value of the metadata."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() and "." not in text else value
