"""Finds and loads models: a folder, a Hugging Face id, a GGUF file, or an object in memory.

``ModelSource`` finds a model and reads what its generation config recommends; ``load`` chooses the runtime, and
``runner_of`` creates the runner.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nucleate.models import BUNDLED_MODEL
from nucleate.models.batched_llama import BatchedLlama
from nucleate.models.gguf.gguf_file import find_gguf, first_line, local_path
from nucleate.models.model_files import GENERATION_CONFIG, read_config, recommended, recommended_values
from nucleate.models.numpy_llama import Llama, unsupported_reason
from nucleate.models.openvino_model import MODEL_FILE, OpenVinoModel, check_properties
from nucleate.models.paged_cache import free_memory
from nucleate.models.protocol import Model, ModelError
from nucleate.models.runner import BLOCK, Runner, SequentialRunner, blocks_in
from nucleate.models.transformers.transformers_model import TransformersModel, check_device, load_progress
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
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
        openvino_properties: Any = None,
        batch_invariant: bool = False,
    ) -> ModelSource | GgufSource:
        """Find a model: None, a folder, a Hugging Face id (downloaded when not cached), a GGUF model, or an object.

        Raises ModelError, ParameterError.
        """
        properties = check_properties(openvino_properties)
        if not is_in_memory(model) and model is not None:
            path = find_gguf(model, revision)
            if path is not None:
                if properties:
                    raise ParameterError("openvino_properties", NEEDS_OPENVINO)
                from nucleate.models.gguf.gguf_model import GgufSource

                how = {"device": device, "dtype": dtype, "runtime": runtime}
                return GgufSource.of(path, gguf_options, **how, plain=batch_invariant)
        if gguf_options is not None:
            raise ParameterError("gguf_options", "gguf_options needs a GGUF model")
        if is_in_memory(model):
            options: dict[str, Any] = {"device": device, "dtype": dtype, "runtime": runtime, "revision": revision}
            options["openvino_properties"] = properties
            return cls(lambda: adopt(model, **options), None, model)
        check_options(device, dtype, runtime)  # before a download
        folder = resolve(model, revision, runtime)
        others: dict[str, Any] = {"properties": properties, "batch_invariant": batch_invariant}
        return cls(lambda: load(folder, device, dtype, runtime, **others), folder)

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

    def vocab_size(self) -> int | None:
        """The vocabulary size in the config; None if there is none. Raises ModelError."""
        if self.folder is None:
            return getattr(_text_config(self.in_memory), "vocab_size", None)
        config = read_config(self.folder / "config.json")
        size = (config.get("text_config") or config).get("vocab_size", config.get("vocab_size"))
        return size if isinstance(size, int) else None

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


logger = logging.getLogger("nucleate")

EMBEDDED = Path(__file__).parent / "embedded"
"""The folder of the embedded model."""

NEEDS_OPENVINO = f"openvino_properties needs a folder with {MODEL_FILE}"
RUNTIMES = ("auto", "numpy", "torch", "openvino")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_TOKEN_BYTES = 1024
"""Bytes of state per token, for models that do not report it."""
MAX_NUMPY_BYTES = 64 << 20
"""Maximum size of the weights in bytes for which runtime "auto" selects numpy; above, torch is worth its start-up."""
TOKENIZER_FILES = ("*.json", "*.model", "*.jinja", "*.txt")
WEIGHTS = "*.safetensors"
OPENVINO_FILES = (MODEL_FILE, "openvino_model.bin")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_in_memory(model: object) -> bool:
    """Whether a model is an object in memory, and not a folder or an id."""
    return model is not None and not isinstance(model, str | os.PathLike)


def adopt(model: Any, **options: Any) -> Model:
    """A model in memory: of Transformers (it is not changed), or any other ``Model``.

    options: arguments that only apply to a model that is loaded. Raises ParameterError, ModelError.
    """
    for name, value in options.items():
        if value not in ("auto", None, {}):
            raise ParameterError(name, f"{name} cannot be set for a model in memory, got {shown(value)}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return TransformersModel.of(model)
    if all(hasattr(model, name) for name in ("vocab_size", "context_length", "runtime", "begin")):
        return model  # type: ignore[no-any-return]
    allowed = "a folder, a Hugging Face id, None, a model of Transformers, or an object with the methods of Model"
    raise ParameterError("model", f"model must be {allowed}, got {shown(model)}")


FORMER_IDS = {
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"), "openai-community"),
    "distilgpt2": "distilbert",
}
"""The owners of ids that once had none, for error messages."""


def resolve(model: str | os.PathLike[str] | None, revision: str | None = None, runtime: str = "auto") -> Path:
    """The folder of a model: the embedded one for None or its name, a folder (by its path, or by its name in
    ``NUCLEATE_MODELS``), or a Hugging Face id (downloaded when not cached).

    revision: a branch, tag or commit of a Hugging Face id. runtime: see ``load``; of a repository with weights in
    several formats, only those of one are downloaded. Raises ModelError, ParameterError.
    """
    folder = EMBEDDED if model in (None, BUNDLED_MODEL) else _existing(os.fspath(model))
    if folder is not None:
        if revision is not None:
            reason = f"model is {'the embedded one' if folder == EMBEDDED else 'a folder'}"
            raise ParameterError("revision", f"revision needs a Hugging Face id, but {reason}; got {shown(revision)}")
        return folder
    if not _HUB_ID.fullmatch(str(model)) or str(model).startswith(("./", "../")):
        form = "a Hugging Face id has the form 'owner/name'"
        if owner := FORMER_IDS.get(str(model)):
            form = f"the Hugging Face id of that name is now '{owner}/{model}'"
        raise ModelError(f"there is no model folder {str(model)!r} ({form})")
    name, runtimes = str(model), ("torch", "openvino") if runtime == "auto" else (runtime,)
    for one in runtimes:
        files = OPENVINO_FILES if one == "openvino" else (WEIGHTS,)
        found = download(name, revision, (*TOKENIZER_FILES, *files))
        if any(found.glob(files[0])):
            break
    return found


def _existing(model: str) -> Path | None:
    """The folder of a model; None if there is nothing of that name. Raises ModelError for anything else."""
    try:
        folder = local_path(model)
        if (folder / "config.json").is_file():
            return folder
        if not folder.exists():
            return None
        problem = "it has no config.json" if folder.is_dir() else "it is a file"
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown home directory
        problem = getattr(error, "strerror", None) or str(error)
    raise ModelError(f"{model[:200]} is not a model folder: {problem}")


def resolve_tokenizer(tokenizer: str | os.PathLike[str]) -> Path:
    """The folder of a tokenizer: a folder, or a Hugging Face id. Raises ModelError."""
    folder = Path(tokenizer)
    if folder.is_dir() or not _HUB_ID.fullmatch(str(tokenizer)):
        return folder  # its files are checked when they are read
    return download(str(tokenizer))


def download(name: str, revision: str | None = None, patterns: Sequence[str] = TOKENIZER_FILES) -> Path:
    """The folder of a Hugging Face id with the files of these patterns, from the local cache or the hub."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client raises errors of many libraries
        at = "" if revision is None else f" at revision {revision!r:.80}"
        reason = f"the download from the hub{at} failed: {first_line(error)}"
        raise ModelError(f"there is no folder {name!r}, and {reason}") from error


@with_suggestions
def load(
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    runtime: str = "auto",
    *,
    properties: Mapping[str, Any] = MappingProxyType({}),
    batch_invariant: bool = False,
) -> Model:
    """Load the model of a folder.

    runtime: "numpy" (plain Llama models on CPU, starts immediately), "torch" (all models of Transformers), "openvino"
    (models converted for it), or "auto": openvino for a folder that has only ``openvino_model.xml``, numpy for a
    Llama of at most 64 MiB if it supports the device and dtype, else torch. properties: of OpenVINO. batch_invariant:
    choose types for it, see ``LLM``. Raises ParameterError, ModelError.
    """
    numpy_supports = check_options(device, dtype, runtime)
    if runtime == "openvino" or (runtime == "auto" and is_openvino(folder)):
        if device not in ("auto", "cpu"):
            raise ParameterError("device", f"device must be auto or cpu for an OpenVINO model, got {shown(device)}")
        return OpenVinoModel(folder, dtype, properties, plain=batch_invariant)
    if properties:
        raise ParameterError("openvino_properties", NEEDS_OPENVINO)
    if runtime == "numpy" or (runtime == "auto" and numpy_supports and _is_small_llama(folder)):
        return Llama(folder)
    with load_progress(folder):
        return TransformersModel(folder, device, dtype)


def is_openvino(folder: Path) -> bool:
    """Whether a folder has a model for OpenVINO, and no other weights."""
    return (folder / MODEL_FILE).is_file() and not any(folder.glob(WEIGHTS))


def check_vocabulary(
    kind: str, other: Model, model: Model, other_folder: Path | None = None, folder: Path | None = None
) -> None:
    """Raise ModelError if another model has not the vocabulary of the model. Folders: None for a model in memory."""
    own, others = (getattr(each, "vocabulary", None) for each in (model, other))  # of GGUF models
    files = [each / "tokenizer.json" for each in (folder, other_folder) if each is not None]
    if other.vocab_size != model.vocab_size:
        difference = f"{other.vocab_size} tokens instead of {model.vocab_size}"
    elif (own and others and any(own.text(token) != others.text(token) for token in range(model.vocab_size))) or (
        len(files) == 2 and all(file.is_file() for file in files) and _vocabulary(files[0]) != _vocabulary(files[1])
    ):
        difference = "other tokens"
    else:
        return
    raise ModelError(f"the {kind} must have the vocabulary of the model; {other_folder or 'it'} has {difference}")


def _vocabulary(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the vocabulary in {file}: {error}") from error


def check_options(device: str, dtype: str, runtime: str) -> bool:
    """Check the arguments of ``load`` before the model is found or downloaded.

    Returns whether the numpy runtime supports them. Raises ParameterError or ModelError.
    """
    for name, value, allowed in (("runtime", runtime, RUNTIMES), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise ParameterError(name, f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    numpy_supports = device in ("auto", "cpu") and dtype in ("auto", "float32")
    if runtime == "numpy" and not numpy_supports:
        raise ModelError(f"the numpy runtime supports device 'cpu' and dtype 'float32' only, got {device!r}, {dtype!r}")
    check_device(device)
    return numpy_supports


def runner_of(
    model: Model, memory: int | None = None, tokens: int = 1 << 16, *, batch_invariant: bool = False
) -> Runner:
    """The runner of a model.

    Batched if the model supports it, or has a method ``new_runner(memory)``; otherwise sequences run one at a time, and
    ``Runner.unbatched_reason`` gives the reason. memory: bytes for the KV cache; by default enough for ``tokens``
    tokens, but at most a quarter of the free memory. batch_invariant: whether to compute the same logits in every batch
    where that is possible. Raises ModelError if the memory is less than one block.
    """
    runner = _runner_of(model, memory, tokens, batch_invariant=batch_invariant)
    if batch_invariant and not getattr(runner, "batch_invariant", False):
        logger.warning("the model is not batch-invariant: the same seed may give another text in another batch")
    return runner


def _runner_of(model: Model, memory: int | None, tokens: int, *, batch_invariant: bool) -> Runner:
    token_bytes = bytes_per_token(model)
    if memory is None:
        memory = _default_memory(model, token_bytes * min(tokens, getattr(model, "default_tokens", tokens)))
    if getattr(model, "can_be_batch_invariant", False):
        return model.new_runner(memory, batch_invariant=batch_invariant)  # type: ignore[no-any-return,attr-defined]
    if hasattr(model, "new_runner"):
        return model.new_runner(memory)  # type: ignore[no-any-return]
    if isinstance(model, Llama):
        return BatchedLlama(model, memory, batch_invariant=batch_invariant)
    if not isinstance(model, TransformersModel):
        return _sequential(model, memory, f"{type(model).__name__} supports one sequence at a time")
    return _transformers_runner(model, memory, batch_invariant=batch_invariant)


def _transformers_runner(model: TransformersModel, memory: int, *, batch_invariant: bool) -> Runner:
    """The first one that works: paged, in padded batches, one sequence at a time."""
    from nucleate.models.transformers.batched_model import BatchedTransformers
    from nucleate.models.transformers.ragged_attention import IncompatibleModelError, OwnMaskError

    try:
        return BatchedTransformers(model, memory, batch_invariant=batch_invariant)
    except OwnMaskError as error:
        return _sequential(model, memory, str(error))
    except IncompatibleModelError as error:
        reason = str(error)
    if model.decoding.cache is None:
        reason += f"; each new token recomputes its sequence, as {model.decoding.reason}"
        return _sequential(model, memory, reason)
    from nucleate.models.transformers.padded_batch import PaddedRunner

    try:
        runner = PaddedRunner(model, blocks_in(memory, model.token_bytes * BLOCK), reason)
    except IncompatibleModelError as error:
        return _sequential(model, memory, f"{reason}; {error}")
    logger.info("the model runs in padded batches; its cache is not paged: %s", reason)
    return runner


def runners_of(
    model: Model, companion: Model | None, memory: int | None, tokens: int, *, batch_invariant: bool = False
) -> list[Runner]:
    """The runners of a model and of its companion model, with about the same number of blocks. See ``runner_of``."""
    if companion is None:
        return [runner_of(model, memory, tokens, batch_invariant=batch_invariant)]
    sizes = [bytes_per_token(each) for each in (model, companion)]
    if memory is None:
        memory = _default_memory(model, sum(sizes) * tokens)
    shares = [memory * size // sum(sizes) for size in sizes]
    pairs = zip((model, companion), shares, strict=True)
    return [runner_of(each, share, tokens, batch_invariant=batch_invariant) for each, share in pairs]


def bytes_per_token(model: Model) -> int:
    """Bytes of KV cache per token."""
    return int(getattr(model, "token_bytes", DEFAULT_TOKEN_BYTES))


def _default_memory(model: Model, most: int) -> int:
    return min(most, (model.free_memory if hasattr(model, "free_memory") else free_memory()) // 4)


def _sequential(model: Model, memory: int, reason: str) -> SequentialRunner:
    blocks = blocks_in(memory, bytes_per_token(model) * BLOCK)
    logger.warning("the model runs one sequence at a time, not batched: %s", reason)
    return SequentialRunner(model, blocks, unbatched_reason=reason)


def _is_small_llama(folder: Path) -> bool:
    return unsupported_reason(folder) is None and (folder / "model.safetensors").stat().st_size <= MAX_NUMPY_BYTES
