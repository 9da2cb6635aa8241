"""Any causal language model of Transformers, run by torch: one sequence at a time, with the model's own cache."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.models.free_memory import free
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import one_line

NO_CACHE = "{} does not return its cache, which decoding needs"


class TransformersModel:
    """A model folder in the Transformers format.

    device: "auto" (CUDA if available), "cpu", "cuda", "cuda:1"... dtype: "auto" (float32 on CPU, else that of the
    folder), "float32", "bfloat16", "float16". Raises ModelError with one line if it cannot be loaded.
    """

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        torch, transformers = libraries()
        chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        if dtype == "auto":
            dtype = "float32" if chosen == "cpu" else "auto"
        try:
            device_ = torch.device(chosen)
            transformers.utils.logging.disable_progress_bar()
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
            if missing := sorted(found["missing_keys"]):  # which Transformers initialises at random
                raise ModelError(f"{len(missing)} weights are missing, such as {missing[0]}")
            self._wrap(model.to(device_), chosen)
        except Exception as error:  # of torch, transformers, safetensors or the hub
            raise ModelError(f"cannot load the model in {folder} on {chosen}: {one_line(error)}") from error

    @classmethod
    def of(cls, model: Any) -> TransformersModel:
        """Wrap a Transformers model that is in memory. Raises ModelError if it cannot be run."""
        made = cls.__new__(cls)
        made._wrap(model, str(model.device))  # noqa: SLF001
        return made

    def _wrap(self, model: Any, device: str) -> None:
        self.model = model.eval()
        _signature(model.__class__)
        text = model.config.get_text_config()
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 1 << 20
        self.runtime = f"torch {device} {str(model.dtype).removeprefix('torch.')}"

    @property
    def token_bytes(self) -> int:
        """Approximate bytes of KV cache per token; some models cache other things."""
        config = self.model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", None) or 1
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        shared = getattr(config, "num_key_value_heads", None) or heads
        return int(2 * config.num_hidden_layers * shared * size * self.model.dtype.itemsize)

    @property
    def free_memory(self) -> int:
        """Bytes free now on the model's device."""
        torch, _ = libraries()
        device = self.model.device
        return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free()

    def begin(self) -> TransformersContext:
        return TransformersContext(self.model)


class TransformersContext:
    """One sequence, with the model's own cache: keys and values, or a state."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.length = model, None, 0
        self.cache_name, self.takes_positions = _signature(model.__class__)
        self.stateful = bool(getattr(model, "_is_stateful", False))

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``DecodingContext.forward``."""
        logits: NDArray[np.float32] = self._forward(token_ids, 1)[-1]
        return logits

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``DecodingContext.forward_all``."""
        return self._forward(token_ids, 0)

    def _forward(self, token_ids: Sequence[int], keep: int) -> NDArray[np.float32]:
        """The logits of the last ``keep`` tokens, 0 for all."""
        torch, _ = libraries()
        if not len(token_ids):
            raise ValueError("forward needs one or more token ids")
        if self.stateful and self.length and len(token_ids) > 1:  # many allow several tokens at the start only
            return np.concatenate([self._forward([token], 1) for token in token_ids])[-keep:]
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        settings: dict[str, Any] = {self.cache_name: self.cache, "use_cache": True, "logits_to_keep": keep}
        if self.stateful and self.takes_positions:  # some count positions wrongly
            settings["position_ids"] = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        with torch.inference_mode():
            out = self.model(input_ids=ids, **settings)
        if out.get(self.cache_name) is None:
            raise ModelError(NO_CACHE.format(type(self.model).__name__))
        self.cache, self.length = out[self.cache_name], self.length + len(token_ids)
        logits: NDArray[np.float32] = out.logits[0].float().cpu().numpy()
        return logits


@functools.cache
def _signature(kind: Any) -> tuple[str, bool]:
    """The name of a model's cache argument, and whether it takes positions. Raises ModelError if it has no cache."""
    parameters = inspect.signature(kind.forward).parameters
    for name in ("past_key_values", "cache_params", "state"):
        if name in parameters:
            return name, "position_ids" in parameters
    raise ModelError(NO_CACHE.format(kind.__name__))


SPIN_COUNT = "2000"
"""GOMP_SPINCOUNT for torch's idle threads; OpenMP's default is a hundred times as high."""


def libraries() -> tuple[Any, Any]:
    """Import torch and transformers, or raise ModelError with the install command.

    If torch is loaded here, its idle threads sleep early, so that other threads can use the cores.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelError(f"this model needs torch and transformers ({error}): pip install 'nucleate[torch]'") from None
    return torch, transformers


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
