"""Where a model comes from: a folder, or an object in memory; and what its generation config recommends."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nucleate.models.gguf.gguf_file import find_gguf
from nucleate.models.loader import adopt, check_options, is_in_memory, load, resolve
from nucleate.models.model_files import GENERATION_CONFIG, read_config, recommended, recommended_values
from nucleate.models.protocol import Model
from nucleate.parameters.parameter import ParameterError

if TYPE_CHECKING:
    from nucleate.models.gguf.gguf_model import GgufSource


@dataclass(frozen=True)
class ModelSource:
    """A model that is found, but not loaded. folder: None for a model in memory."""

    load: Callable[[], Model]
    folder: Path | None
    in_memory: Any = None

    @classmethod
    def find(
        cls,
        model: str | os.PathLike[str] | Any | None,
        *,
        device: str,
        dtype: str,
        runtime: str,
        revision: str | None,
        gguf_options: Any = None,
    ) -> ModelSource | GgufSource:
        """Find a model: None, a folder, a Hugging Face id (downloaded when not cached), a GGUF model, or an object.

        Raises ModelError, ParameterError.
        """
        if not is_in_memory(model) and model is not None:
            path = find_gguf(model, revision)
            if path is not None:
                from nucleate.models.gguf.gguf_model import GgufSource

                return GgufSource.of(path, gguf_options, device=device, dtype=dtype, runtime=runtime)
        if gguf_options is not None:
            raise ParameterError("gguf_options", "gguf_options needs a GGUF model")
        if is_in_memory(model):
            options = {"device": device, "dtype": dtype, "runtime": runtime, "revision": revision}
            return cls(lambda: adopt(model, **options), None, model)
        check_options(device, dtype, runtime)  # before a download
        folder = resolve(model, revision)
        return cls(lambda: load(folder, device, dtype, runtime), folder)

    @property
    def generation_config_name(self) -> str:
        """What errors call the generation config."""
        return str(self.folder / GENERATION_CONFIG) if self.folder is not None else "the model's generation_config"

    def recommended(self) -> dict[str, Any]:
        """The fields of SamplingParams that the generation config sets. Raises ModelError."""
        if self.folder is not None:
            return recommended(self.folder)
        length = getattr(_text_config(self.in_memory), "max_position_embeddings", None)
        return recommended_values(_values(self.in_memory), self.generation_config_name, length or float("inf"))

    def eos_token_ids(self) -> frozenset[int]:
        """The EOS ids in the generation config, or in the config. Raises ModelError."""
        if self.folder is None:
            found = [_values(self.in_memory), getattr(_text_config(self.in_memory), "__dict__", {})]
        else:
            paths = [self.folder / name for name in (GENERATION_CONFIG, "config.json")]
            found = [read_config(path) for path in paths if path.is_file()]
        eos = next((one["eos_token_id"] for one in found if one.get("eos_token_id") is not None), ())
        return frozenset(
            token for token in (eos if isinstance(eos, list | tuple) else (eos,)) if isinstance(token, int)
        )


def _values(model: Any) -> Mapping[str, Any]:
    """The parameters in the generation config of a model in memory that are set."""
    config: Any = getattr(model, "generation_config", None)
    return config.to_diff_dict() if hasattr(config, "to_diff_dict") else {}


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
