"""Translates ``options``, ``think`` and ``format`` of Ollama's requests."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import present_fields, sampling_fields
from nucleate.server.openai.fields import invalid_value, json_equal

RENAMED: Mapping[str, str] = MappingProxyType(
    {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}
)
"""Options, and the sampling parameters that they are."""
IGNORED = frozenset(
    [
        *("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep"),
    ]
)
"""Options for loading a model: this server has loaded it."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType({"tfs_z": (1, 1.0), "penalize_newline": (True,)})
"""Unsupported options, and their values without effect, which are accepted."""
UNLIMITED = (-1, -2)
"""Values of ``num_predict``: as many tokens as fit the context."""
_MIROSTAT = {1: "mirostat_v1", 2: "mirostat"}
MIROSTAT_TAU = 5.0
"""Ollama's default."""
LEVELS = ("low", "medium", "high", "max")


def option_names() -> frozenset[str]:
    """Return the names of all options: Ollama's and every sampling parameter."""
    return frozenset({*sampling_fields("structured_outputs"), *RENAMED, *IGNORED, *UNSUPPORTED, "mirostat"})


def read_options(value: Any) -> dict[str, Any]:
    """Return the sampling parameters of ``options``. Raises ParameterError."""
    given = present_fields(value, option_names(), "options", "options")
    for name, accepted in UNSUPPORTED.items():
        if name in given and not any(json_equal(given[name], one) for one in accepted):
            raise ParameterError("options", f"options.{name} is not supported, got {shown(given[name])}")
    made = {name: item for name, item in given.items() if name not in {*RENAMED, *IGNORED, *UNSUPPORTED}}
    for name, own in RENAMED.items():
        if name in given:
            if own in made:
                raise ParameterError("options", f"options.{name} and options.{own} are the same; set one of them")
            made[own] = given[name]
    if any(json_equal(made.get("max_tokens"), one) for one in UNLIMITED):
        del made["max_tokens"]
    if json_equal(made.get("seed"), -1):
        del made["seed"]
    return _with_mirostat(made) if "mirostat" in made else made


def _with_mirostat(given: dict[str, Any]) -> dict[str, Any]:
    """Return parameters for ``mirostat``: the version, 0 for off."""
    version = given.pop("mirostat")
    tau, eta = given.pop("mirostat_tau", MIROSTAT_TAU), given.pop("mirostat_eta", None)
    if json_equal(version, 0):
        return given
    if not isinstance(version, int) or isinstance(version, bool) or version not in _MIROSTAT:
        raise invalid_value("options.mirostat", "0, 1 or 2", version, "options")
    name = _MIROSTAT[version]
    return {**given, f"{name}_tau": tau, **({} if eta is None else {f"{name}_eta": eta})}


def read_think(value: Any) -> dict[str, Any]:
    """Return the fields for ``think``: whether the model reasons, or how much. Raises ParameterError."""
    if isinstance(value, bool):
        return {"chat_template_kwargs": {"enable_thinking": value, "thinking": value}}
    if value not in LEVELS:
        raise invalid_value("think", f"true, false, or one of {', '.join(LEVELS)}", value)
    return {"reasoning_effort": value}


def read_format(value: Any) -> dict[str, Any]:
    """Return the field for ``format``: "json" or a schema; "" for none. Raises ParameterError."""
    if value == "":
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, Mapping):
        raise invalid_value("format", "json or a JSON schema", value)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": value}}}
