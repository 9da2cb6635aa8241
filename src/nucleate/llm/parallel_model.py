"""The arguments of a model that several processes share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.models.loader import ModelSource
from nucleate.models.protocol import Model
from nucleate.models.transformers.transformers_model import libraries
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.speculative.config import TOKEN_METHODS, Speculation

FIELD = "tensor_parallel"


def check_parallel(source: Any, speculation: Speculation | None) -> None:
    """Raise ParameterError for a model or a draft method that cannot be shared by processes."""
    if not isinstance(source, ModelSource) or source.folder is None:
        kind = "a model in memory" if isinstance(source, ModelSource) else "a GGUF file"
        raise ParameterError(FIELD, f"tensor_parallel needs a model folder or a Hugging Face id, got {kind}")
    method = None if speculation is None else speculation.method
    if isinstance(method, str) and method not in TOKEN_METHODS:
        allowed = ", ".join(TOKEN_METHODS)
        raise ParameterError(
            "speculative_config", f"with tensor_parallel, the methods are {allowed} or a proposer, got {shown(method)}"
        )


def load_parallel(source: Any, size: int, options: Mapping[str, str]) -> Model:
    """Load a model that ``check_parallel`` allows on ``size`` processes. options: device, dtype and runtime.

    Raises ModelError, ParameterError.
    """
    libraries()  # raises ModelError
    from nucleate.sharding.tensor_parallel import load_sharded

    return load_sharded(source.folder, size, **options)
