"""Loads models: finds the folder, chooses the runtime, creates the runner, reads recommended parameters."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from nucleate.models.free_memory import free
from nucleate.models.llama.batched_llama import BatchedLlama
from nucleate.models.llama.numpy_llama import Llama, unsupported_reason
from nucleate.models.model_config import read_config
from nucleate.models.protocol import Model, ModelError
from nucleate.models.runner import BLOCK, Runner, SequentialRunner
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.parameters.parameter import ParameterError

logger = logging.getLogger("nucleate")

EMBEDDED = Path(__file__).parent / "embedded"
"""The folder of the embedded model."""

RUNTIMES = ("auto", "numpy", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_TOKEN_BYTES = 1024
"""Bytes of state per token, for models that do not report it."""
MAX_NUMPY_BYTES = 64 << 20
"""Maximum size of the weights in bytes for which runtime "auto" selects numpy; above, torch is worth its start-up."""


def resolve(model: str | Path | None) -> Path:
    """The folder of a model: the embedded one for None, a folder, or a Hugging Face id (downloaded when not cached)."""
    if model is None:
        return EMBEDDED
    try:
        folder = Path(model).expanduser()
        found = (folder / "config.json").is_file()
        if found or not folder.exists():
            problem = None
        else:
            problem = "it has no config.json" if folder.is_dir() else "it is a file"
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown home directory
        problem = getattr(error, "strerror", None) or str(error)
    if problem is not None:
        raise ModelError(f"{str(model)[:200]} is not a model folder: {problem}")
    if found:
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)) or str(model).startswith(("./", "../")):
        raise ModelError(f"there is no model folder {str(model)!r} (a Hugging Face id has the form 'owner/name')")
    return download(str(model))


def download(name: str) -> Path:
    """The folder of a Hugging Face id, from the local cache or the hub."""
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of many libraries
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"there is no folder {name!r}, and the download from the hub failed: {reason}") from error


def load(folder: Path, device: str = "auto", dtype: str = "auto", runtime: str = "auto") -> Model:
    """Load the model of a folder.

    runtime: "numpy" (plain Llama models on CPU, starts immediately), "torch" (all models of Transformers), or "auto":
    numpy for a Llama of at most 64 MiB if it supports the device and dtype, else torch. Raises ParameterError or
    ModelError.
    """
    for name, value, allowed in (("runtime", runtime, RUNTIMES), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise ParameterError(name, f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    numpy_supports = device in ("auto", "cpu") and dtype in ("auto", "float32")
    if runtime == "numpy" and not numpy_supports:
        raise ModelError(f"the numpy runtime supports device 'cpu' and dtype 'float32' only, got {device!r}, {dtype!r}")
    if runtime == "numpy" or (runtime == "auto" and numpy_supports and _is_small_llama(folder)):
        return Llama(folder)
    return TransformersModel(folder, device, dtype)


def runner_of(model: Model, memory: int | None = None, tokens: int = 1 << 16) -> Runner:
    """The runner of a model.

    Batched if the model supports it; otherwise sequences run one at a time, and ``Runner.unbatched_reason`` gives the
    reason. memory: bytes for the KV cache; by default enough for ``tokens`` tokens, but at most a quarter of the free
    memory. Raises ModelError if that is less than one block.
    """
    token_bytes = getattr(model, "token_bytes", DEFAULT_TOKEN_BYTES)
    if memory is None:
        memory = min(token_bytes * tokens, (model.free_memory if isinstance(model, TransformersModel) else free()) // 4)
    if isinstance(model, Llama):
        return BatchedLlama(model, memory)
    if not isinstance(model, TransformersModel):
        return _sequential(model, memory, token_bytes, f"{type(model).__name__} supports one sequence at a time")
    from nucleate.models.transformers.batched_model import BatchedTransformers
    from nucleate.models.transformers.ragged_attention import IncompatibleModelError

    try:
        return BatchedTransformers(model, memory)
    except IncompatibleModelError as error:
        return _sequential(model, memory, token_bytes, str(error))


def _sequential(model: Model, memory: int, token_bytes: int, reason: str) -> SequentialRunner:
    size = token_bytes * BLOCK
    if memory < size:
        raise ModelError(f"the KV cache needs at least {size} bytes (one block), got {memory}")
    logger.warning("the model runs one sequence at a time, not batched: %s", reason)
    return SequentialRunner(model, memory // size, unbatched_reason=reason)


def _is_small_llama(folder: Path) -> bool:
    return unsupported_reason(folder) is None and (folder / "model.safetensors").stat().st_size <= MAX_NUMPY_BYTES


def recommended(folder: Path) -> dict[str, Any]:
    """The sampling parameters recommended in the model's generation_config.json.

    The values are returned unchecked. Raises ModelError if the file cannot be read.
    """
    path = folder / "generation_config.json"
    config = read_config(path) if path.is_file() else {}
    sampled = config.get("do_sample") or False
    if not isinstance(sampled, bool):
        raise ModelError(f"{path}: do_sample must be true or false, got {sampled!r:.60}")
    if not sampled:
        return {}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if config.get(name) is not None}
