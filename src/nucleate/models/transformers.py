"""Any causal language model of Transformers, run by torch. The one file that imports either."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nucleate.models.model import ModelError


class TransformersModel:
    """A model folder in the Transformers format.

    device: "auto" (CUDA if there is one), "cpu", "cuda", "cuda:1"... dtype: "auto" (float32 on CPU, the folder's own
    elsewhere), "float32", "bfloat16", "float16". Raises ModelError with one line if it cannot be loaded.
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
            if missing := sorted(found["missing_keys"]):  # Transformers would go on with random numbers in their place
                raise ModelError(f"{len(missing)} of its weights are not there, such as {missing[0]}")
            self.model = model.to(device_).eval()
        except Exception as error:  # of torch, transformers, safetensors or the hub
            raise ModelError(f"cannot load the model in {folder} on {chosen}: {one_line(error)}") from error
        text = self.model.config.get_text_config()
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.context_length: int = getattr(text, "max_position_embeddings", None) or 1 << 20
        self.runtime = f"torch {chosen} {str(self.model.dtype).removeprefix('torch.')}"

    def begin(self) -> TransformersContext:
        return TransformersContext(self.model)


class TransformersContext:
    """One sequence, with the model's own cache."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.length = model, None, 0

    def forward(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward``."""
        logits: NDArray[np.float32] = self._read(token_ids, 1)[-1]
        return logits

    def forward_all(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See ``Context.forward_all``."""
        return self._read(token_ids, 0)

    def _read(self, token_ids: Sequence[int], keep: int) -> NDArray[np.float32]:
        """The logits of the last ``keep`` tokens, 0 for all."""
        torch, _ = libraries()
        if not len(token_ids):
            raise ValueError("forward takes one or more token ids")
        ids = torch.tensor([list(token_ids)], device=self.model.device)
        with torch.inference_mode():
            out = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=keep)
        self.cache, self.length = out.past_key_values, self.length + len(token_ids)
        logits: NDArray[np.float32] = out.logits[0].float().cpu().numpy()
        return logits


def libraries() -> tuple[Any, Any]:
    """torch and transformers, or a ModelError that says how to get them."""
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
        raise ModelError(f"the tokenizer in {folder} has no fast form (tokenizer.json)")
    for name in ("config.json", "generation_config.json"):  # they say which ids end a text
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
