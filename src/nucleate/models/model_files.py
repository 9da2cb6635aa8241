"""Reads the files of a model folder: configs, types of the weights, recommended sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nucleate.jit.native_library import warn_once
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError with one line that names the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value


def positive(config: dict[str, Any], name: str, default: float | None = None) -> float:
    """A number > 0 in config.json. ``default``, if given, replaces a missing or null value."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"config.json: {name} must be a number > 0, got {value!r:.60}")
    return value


def positive_integer(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """The same for an integer > 0."""
    value = positive(config, name, default)
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} must be an integer, got {value!r:.60}")
    return value


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


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return file.metadata() or {}


def quantized_weight(folder: Path) -> str | None:
    """The name and type of a weight in a folder that is an integer or has a scale; None if there is none."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, dtype in stored_dtypes(path).items():
            last = name.rpartition(".")[2]
            if last in SCALES or (last == "weight" and dtype.startswith(("I", "U"))):
                return f"{name}, {dtype}"
    return None


GENERATION_CONFIG = "generation_config.json"

ALWAYS: Mapping[str, str] = MappingProxyType(
    {
        "guidance_scale": "guidance_scale",
        "repetition_penalty": "repetition_penalty",
        "no_repeat_ngram_size": "no_repeat_ngram_size",
        "bad_words_ids": "bad_words",
        "suppress_tokens": "suppress_token_ids",
        "min_new_tokens": "min_tokens",
        "max_new_tokens": "max_tokens",
        "stop_strings": "stop",
        "sequence_bias": "logit_bias",
    }
)
"""Parameters of Transformers that apply with and without sampling, and the fields of SamplingParams."""

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Parameters that apply only if ``do_sample`` is true. The fields of SamplingParams have the same names."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "min_length": (0,),
        "max_length": (),
        "max_time": (),
        "num_beams": (1,),
        "num_return_sequences": (1,),
        "penalty_alpha": (0,),
        "dola_layers": (),
        "token_healing": (False,),
        "watermarking_config": (),
        "remove_invalid_values": (False,),
        "encoder_repetition_penalty": (1,),
        "encoder_no_repeat_ngram_size": (0,),
        "exponential_decay_length_penalty": (),
        "begin_suppress_tokens": ([],),
        "constraints": ([],),
        "force_words_ids": ([],),
        "forced_bos_token_id": (),
        "forced_eos_token_id": (),
    }
)
"""Parameters that change the output in Transformers and have no counterpart, with the values that have no effect."""


def recommended(folder: Path) -> dict[str, Any]:
    """The fields of SamplingParams that the model's generation_config.json sets, see ``recommended_values``.

    Raises ModelError if the file cannot be read.
    """
    path = folder / GENERATION_CONFIG
    return recommended_values(read_config(path), str(path), _context_length(folder)) if path.is_file() else {}


def recommended_values(given: Mapping[str, Any], source: str, context_length: float) -> dict[str, Any]:
    """The fields of SamplingParams that the parameters of a generation config set.

    The parameters of SAMPLING need ``do_sample: true``, as in Transformers; ``do_sample: false`` recommends temperature
    0. source: where the config comes from, for messages. Raises ModelError.
    """
    config = {name: value for name, value in given.items() if value is not None}
    do_sample = config.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ModelError(f"{source}: do_sample must be true or false, got {do_sample!r:.60}")
    values = {name: config[name] for name in SAMPLING if name in config and do_sample}
    if do_sample is False:
        values["temperature"] = 0
    for name, field in ALWAYS.items():
        if name in config:
            values[field] = _logit_bias(config[name]) if name == "sequence_bias" else config[name]
    ignored = [
        name for name in UNSUPPORTED if name in config and not _has_no_effect(name, config[name], context_length)
    ]
    ignored += [name for name, field in ALWAYS.items() if values.get(field, ...) is None]
    _report(source, config, ignored, "have no counterpart")
    if not do_sample:
        unused = [name for name in SAMPLING if name in config]
        _report(source, config, unused, "apply only with do_sample: true")
    return {name: value for name, value in values.items() if value is not None}


def _report(source: str, config: Mapping[str, Any], names: list[str], reason: str) -> None:
    if names:
        listed = ", ".join(f"{name}={shown(config[name])}" for name in names)
        warn_once(f"{source}: these parameters are not applied, because they {reason}: {listed}")


def _has_no_effect(name: str, value: Any, context_length: float) -> bool:
    if name == "max_length" and isinstance(value, int):  # the whole context, or more
        return context_length <= value
    return value in UNSUPPORTED[name]


def _context_length(folder: Path) -> float:
    path = folder / "config.json"
    length = read_config(path).get("max_position_embeddings") if path.is_file() else None
    return length if isinstance(length, int) else float("inf")


def _logit_bias(value: Any) -> dict[Any, Any] | None:
    """``sequence_bias`` as a logit bias: [[token ids], bias] pairs, or a mapping of a model in memory.

    None if a sequence has several tokens.
    """
    pairs = [[list(ids), bias] for ids, bias in value.items()] if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return None
    if not all(isinstance(ids, list) and len(ids) == 1 for ids, _ in pairs):
        return None
    return {ids[0]: bias for ids, bias in pairs}
