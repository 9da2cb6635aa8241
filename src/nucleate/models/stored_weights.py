"""Looks at the types of the weights in a model folder, without reading them."""

from __future__ import annotations

from pathlib import Path

SCALES = ("weight_scale", "weight_scale_inv", "scales", "qweight", "SCB")
"""Last parts of names that only quantized weights have."""


def stored_dtypes(path: Path) -> dict[str, str]:
    """The type of each tensor in a safetensors file ("F32", "BF16", "I8"...). Empty for a file that cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError):
        return {}


def quantized_weight(folder: Path) -> str | None:
    """The name and type of a weight in a folder that is an integer or has a scale; None if there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, dtype in stored_dtypes(path).items():
            last = name.rpartition(".")[2]
            if last in SCALES or (last == "weight" and dtype.startswith(("I", "U"))):
                return f"{name}, {dtype}"
    return None
