"""The options of a GGUF model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import UnknownKeywordError, with_suggestions
from nucleate.parameters.parameter import ParameterError

CACHE_TYPES: Mapping[str, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
    "iq4_nl": (20, 18 / 32),
}
"""The types of the KV cache: their number in ggml, and bytes per value."""
MAX_INT = (1 << 31) - 1
FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


@with_suggestions
@dataclass(frozen=True)
class GgufOptions:
    """How llama.cpp runs a GGUF model.

    n_gpu_layers: layers on the GPU, if llama.cpp was built for one; -1: all. n_ctx: size of the KV cache in tokens, for
    all sequences together; None: see ``LLM``. n_seq_max: sequences in the KV cache, running ones and finished ones that
    others may share a prefix with; None: 256, or 64 for recurrent models, which allocate the state of all.
    prefix_cache_tokens: how many tokens of finished sequences are kept for others with the same prefix; llama.cpp reads
    them in each forward pass, too. n_threads: threads of a forward pass; None: the physical cores. cache_type_k,
    cache_type_v: types of the KV cache, one of CACHE_TYPES; quantised values need flash attention. flash_attn: "auto",
    "on" or "off". Raises ParameterError.
    """

    n_gpu_layers: int = -1
    n_ctx: int | None = None
    n_seq_max: int | None = None
    prefix_cache_tokens: int = 4096
    n_threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"

    def __post_init__(self) -> None:
        least = {"n_gpu_layers": -1, "n_ctx": 1, "n_seq_max": 1, "prefix_cache_tokens": 0, "n_threads": 1}
        names = {"cache_type_k": CACHE_TYPES, "cache_type_v": CACHE_TYPES, "flash_attn": FLASH_ATTENTION}
        for name, low in least.items():
            value = getattr(self, name)
            is_default = value is None and getattr(type(self), name) is None
            if not is_default and not (type(value) is int and low <= value <= MAX_INT):
                raise ParameterError(name, f"{name} must be an integer in {low}..{MAX_INT}, got {shown(value)}")
        for name, allowed in names.items():
            value = getattr(self, name)
            if value not in [*allowed]:
                raise ParameterError(name, f"{name} must be one of {', '.join(allowed)}, got {shown(value)}")

    @classmethod
    def of(cls, given: GgufOptions | Mapping[str, Any] | None, device: str = "auto") -> GgufOptions:
        """Options in any form that ``LLM`` takes. device "cpu" means no layers on the GPU. Raises ParameterError."""
        if given is None:
            given = cls()
        elif isinstance(given, Mapping):
            try:
                given = cls(**{str(name): value for name, value in given.items()})
            except UnknownKeywordError as error:
                raise ParameterError("gguf_options", f"gguf_options: {error}") from None
        elif not isinstance(given, cls):
            raise ParameterError("gguf_options", f"gguf_options must be a GgufOptions or a dict, got {shown(given)}")
        return replace(given, n_gpu_layers=0) if device == "cpu" else given

    @property
    def threads(self) -> int:
        """The number of threads: more than the physical cores make matrix products slower."""
        return self.n_threads or _physical_cores()


DEFAULT_OPTIONS = GgufOptions()


def _physical_cores() -> int:
    """The physical cores that this process may use; the logical ones if the system does not tell."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text("ascii"))
        except OSError:
            return len(usable)
    return max(len(cores), 1)
