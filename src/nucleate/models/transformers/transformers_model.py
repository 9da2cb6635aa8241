"""Any causal language model of Transformers, run by torch one sequence at a time. Loads it and its tokenizer."""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from nucleate.models.cpu_operations import limit_spinning
from nucleate.models.model_files import quantized_weight
from nucleate.models.paged_cache import free_memory
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import install_extra, one_line, shown
from nucleate.parameters.parameter import ParameterError

if TYPE_CHECKING:
    from nucleate.models.transformers.decoding_context import TransformersContext

MISSING = f"this model needs torch and transformers ({{}}): {install_extra('torch')}"


class TransformersModel:
    """A model folder in the Transformers format.

    device: "auto" (CUDA if available), "cpu", "cuda", "cuda:1"... dtype: "float32", "bfloat16", "float16" or "auto",
    which is that of the folder, but float32 on a CPU, except for bfloat16 on one with instructions for it. Raises
    ModelError with one line if it cannot be loaded.
    """

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        torch, transformers = libraries()
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            device_ = torch.device(chosen)
            transformers.utils.logging.disable_progress_bar()
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            quantized = quantized_weight(folder)
            if quantized is not None and getattr(config, "quantization_config", None) is None:
                raise ModelError(f"its weights are quantized ({quantized}), but config.json has no quantization_config")
            if dtype == "auto" and chosen == "cpu" and not (_is_bfloat16(config) and has_bfloat16()):
                dtype = "float32"
            model, found = self._load(folder, config, dtype, device_)
            if missing := sorted(found["missing_keys"]):  # which Transformers initialises at random
                raise ModelError(f"{len(missing)} weights are missing, such as {missing[0]}")
            self._wrap(model.to(device_), chosen)
        except Exception as error:  # of torch, transformers, safetensors or the hub
            raise ModelError(f"cannot load the model in {folder} on {chosen}: {one_line(error)}") from error

    def _load(self, folder: Path, config: Any, dtype: str, device: Any) -> tuple[Any, Any]:
        """The model with its weights on any device, and what Transformers reports about loading them."""
        return _auto_class(config).from_pretrained(  # type: ignore[no-any-return]
            folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )

    @classmethod
    def of(cls, model: Any) -> TransformersModel:
        """A Transformers model in memory, which is not changed, see ``runnable_copy``. Raises ModelError."""
        from nucleate.models.transformers.ragged_attention import runnable_copy

        made, copied = cls.__new__(cls), runnable_copy(model)
        made._wrap(copied, str(copied.device))  # noqa: SLF001
        return made

    def _wrap(self, model: Any, device: str) -> None:
        self.model = model.eval()
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__} has no language model head")
        self.vocab_size: int = _num_logits(head, model)
        text = model.config.get_text_config(decoder=True)
        length = getattr(text, "max_position_embeddings", None) or 0
        self.context_length: int = length if length > 0 else 1 << 20
        self.runtime = f"torch {device} {str(model.dtype).removeprefix('torch.')}"
        self.bidirectional_prompt = bool(getattr(text, "use_bidirectional_attention", False))
        """Whether the tokens of a prompt attend to all of it, so that its output must not be computed with it."""
        self.decoding = self._decoding()

    def _decoding(self) -> Any:
        from nucleate.models.transformers.decoding_context import decoding_of

        return decoding_of(self.model, self.vocab_size)

    @property
    def token_bytes(self) -> int:
        """Approximate bytes of KV cache per token; some models cache other things."""
        text = self.model.config.get_text_config(decoder=True)
        numbers = 0
        for config in layer_configs(text):
            heads = getattr(config, "num_attention_heads", None) or 1
            size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", heads) // heads
            numbers += 2 * (getattr(config, "num_key_value_heads", None) or heads) * size
        return int(numbers * self.model.dtype.itemsize)

    @property
    def free_memory(self) -> int:
        """Bytes free now on the model's device."""
        torch, _ = libraries()
        device = self.model.device
        return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_memory()

    def local_logits(self, logits_LV: Any) -> Any:
        """The columns of the logits that this process keeps: all of them."""
        return logits_LV

    def begin(self) -> TransformersContext:
        from nucleate.models.transformers.decoding_context import TransformersContext

        return TransformersContext(self.model, self.decoding)


class EmbeddingRows:
    """The embeddings of a model as float32 rows, converted when they are read. weight: a tensor [V, X]."""

    def __init__(self, weight: Any) -> None:
        self._weight, self.shape = weight, tuple(weight.shape)

    def __getitem__(self, ids_T: Any) -> Any:
        torch, _ = libraries()
        return self._weight[torch.as_tensor(ids_T, device=self._weight.device)].float().cpu().numpy()


def read_pickled(path: Path) -> dict[str, Any]:
    """The tensors of a ``pytorch_model.bin`` as arrays, floats as float32. Raises ModelError."""
    torch, _ = libraries()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        return {name: (one.float() if one.is_floating_point() else one).numpy() for name, one in state.items()}
    except Exception as error:  # of torch and pickle
        raise ModelError(f"cannot read {path}: {one_line(error)}") from error


def _num_logits(head: Any, model: Any) -> int:
    """The number of logits of a language model head, which may be quantized."""
    shape = getattr(getattr(head, "weight", None), "shape", None)
    size = getattr(head, "out_features", None) or (shape[0] if shape else model.config.get_text_config().vocab_size)
    return int(size)


def layer_configs(config: Any) -> list[Any]:
    """The config of each layer. In a heterogeneous config, values that differ can only be read from these."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


AUTO_CLASSES = (
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
    ("AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM_MAPPING"),
)
"""Classes of Transformers that load language models, alone or with vision and audio parts, and what they support."""


def _auto_class(config: Any) -> Any:
    """The class of Transformers that loads the language model with a config. Raises ModelError."""
    _, transformers = libraries()
    kind = type(config)
    for name, mapping in AUTO_CLASSES:
        classes = getattr(transformers, mapping, {})
        if kind in classes and (classes[kind].config_class is kind or classes[kind].config_class in classes):
            return getattr(transformers, name)
    raise ModelError(f"Transformers has no language model for the architecture {config.model_type!r}")


def model_class(config: Any) -> Any:
    """The model class that ``from_pretrained`` of the auto class takes. Raises ModelError."""
    found = _auto_class(config)._model_mapping[type(config)]  # noqa: SLF001
    return found[0] if isinstance(found, tuple) else found


def import_torch() -> Any:
    """Import torch, or raise ModelError with the install command.

    If torch is loaded here, its idle threads sleep early, so that other threads can use the cores.
    """
    if "torch" not in sys.modules:
        limit_spinning()
    try:
        import torch
    except ImportError as error:
        raise ModelError(MISSING.format(error)) from None
    return torch


def libraries() -> tuple[Any, Any]:
    """Import torch and transformers, or raise ModelError with the install command."""
    torch = import_torch()
    try:
        import transformers
    except ImportError as error:
        raise ModelError(MISSING.format(error)) from None
    return torch, transformers


DEVICES = "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for products in bfloat16, as torch tells. Others convert each weight, slowly."""
    found: Mapping[str, Any] = getattr(import_torch().cpu, "get_capabilities", dict)()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _is_bfloat16(config: Any) -> bool:
    """Whether the weights of a folder are in bfloat16, as its configuration says."""
    return str(getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)) == "torch.bfloat16"


_ACCELERATOR = re.compile(r"(cuda|xpu|mps)(?::([0-9]{1,3}))?")


def check_device(device: str) -> None:
    """Raise ParameterError for an unknown device name, or one that torch does not find.

    Imports torch only for an accelerator; raises ModelError if it is not installed.
    """
    if device in ("auto", "cpu"):
        return
    match = _ACCELERATOR.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ParameterError("device", f"device must be {DEVICES}, got {shown(device)}")
    torch, kind = import_torch(), match[1]
    count = getattr(torch, kind).device_count()
    if int(match[2] or 0) < count:
        return
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    else:
        reason = f"torch finds {count or 'no'} {kind} device{'s' * (count != 1)}"
    raise ParameterError("device", f"device {device!r} is not available: {reason}; allowed: {DEVICES}")


logger = logging.getLogger("nucleate")

DELAY = 1.0
"""Seconds before the progress of loading is shown."""


@contextmanager
def load_progress(folder: Path) -> Iterator[None]:
    """Report that a model is loaded in this context: in the log at level info, else by a bar if stderr is a terminal.

    The bar is over the weights. It is shown after DELAY, and erased at the end. Old versions of Transformers have none.
    """
    _, transformers = libraries()
    name, begin, in_log = folder.name or str(folder), monotonic(), logger.isEnabledFor(logging.INFO)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    description = f"loading {name}{f' ({size / 1e9:.1f} GB)' if size >= 5e7 else ''}"
    if in_log:
        logger.info("%s", description)
    shown = not in_log and sys.stderr is not None and sys.stderr.isatty()

    def bar(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not shown or options.get("desc") != "Loading weights":
            return factory(*arguments, **options)
        from tqdm import tqdm

        return tqdm(*arguments, desc=description, delay=DELAY, leave=False, file=sys.stderr, dynamic_ncols=True)

    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", lambda _: None)
    before = set_hook(bar)
    try:
        yield
    finally:
        set_hook(before)
    if in_log:
        logger.info("loaded %s in %.1f s", name, monotonic() - begin)


def convert_tokenizer(folder: Path, out: Path) -> None:
    """Write the tokenizer of a folder without tokenizer.json, converted by Transformers, to another folder."""
    _, transformers = libraries()
    try:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(out)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"cannot load a tokenizer from {folder}: {one_line(error)}") from error
    if not (out / "tokenizer.json").is_file():
        raise ModelError(f"the tokenizer in {folder} has no fast version (tokenizer.json)")
    for name in ("config.json", "generation_config.json"):  # they contain the EOS ids
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def save_tokenizer(tokenizer: Any, out: Path) -> None:
    """Write a tokenizer of Transformers in memory to a folder; one without a fast version is converted."""
    name = type(tokenizer).__name__
    try:
        tokenizer.save_pretrained(out)
        if not (out / "tokenizer.json").is_file():
            _convert(tokenizer).save(str(out / "tokenizer.json"))
    except ModelError:
        raise
    except Exception as error:  # the tokenizer's code may raise anything
        raise ModelError(
            f"the tokenizer {name} cannot be converted: {type(error).__name__}: {one_line(error)}"
        ) from error


def _convert(tokenizer: Any) -> Any:
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS

    name = type(tokenizer).__name__
    converter = SLOW_TO_FAST_CONVERTERS.get(name.removesuffix("Legacy"))
    if converter is None:
        raise ModelError(f"the tokenizer {name} has no fast version (tokenizer.json)")
    return converter(tokenizer).converted()
