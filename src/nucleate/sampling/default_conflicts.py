"""Decides which default parameters give way to a request, because they contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nucleate.sampling.given_pipeline import replaced_fields
from nucleate.sampling.presets import REQUESTABLE, stages_in
from nucleate.sampling.stage import Floor, Prefix
from nucleate.sampling.stages import STAGES
from nucleate.sampling.stages.truncation.mirostat import Mirostat
from nucleate.sampling.stages.truncation.mirostat_v1 import MirostatV1

GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0, "top_k": 1, "top_p": 0, "top_h": 0, "draw": "greedy"})
"""Values that make a request greedy: those of a truncation with ``min_keep`` only while that keeps one token."""

MIROSTATS = {"mirostat_tau": Mirostat, "mirostat_v1_tau": MirostatV1}
"""The stages that control truncation alone, by the field that enables them."""

COMBINING: Mapping[str, float] = MappingProxyType({"guidance_scale": 1.0, "contrastive_beta": 0.0})
"""The fields that enable a Combine stage, of which a request has at most one, with their neutral values."""

DECISIVE = (
    *COMBINING,
    *MIROSTATS,
    *(*GREEDY, "min_keep", "order", "min_tokens", "max_tokens", "pipeline"),
)
"""The fields of a request that defaults can contradict."""


def _truncations() -> set[str]:
    """The fields of all truncation stages except mirostat, and without the one that they share."""
    kinds = [kind for kind in STAGES.values() if issubclass(kind, Floor | Prefix) and kind not in MIROSTATS.values()]
    fields = {parameter.name for kind in kinds for parameter in kind.parameters.values() if parameter.public}
    return fields - {"min_keep"}


def _greedy_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of GREEDY that make a request greedy. values: all fields of the request."""
    if values["min_keep"] <= 1:
        return GREEDY
    return {name: value for name, value in GREEDY.items() if name not in ("top_p", "top_h")}


def conflicts(defaults: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, str]:
    """The names of all defaults that contradict a request, each with what they contradict.

    defaults: all fields. request: the valid values of those fields of DECISIVE that the request sets.
    """
    if request.get("pipeline") is not None:
        return dict.fromkeys(replaced_fields(), "pipeline")
    found: dict[str, str] = {}
    if defaults["pipeline"] is not None and (replaced := request.keys() & {*replaced_fields()}):
        found["pipeline"] = ", ".join(sorted(replaced))
    if mirostat := next((name for name in MIROSTATS if request.get(name)), None):
        greedy = {name for name, value in GREEDY.items() if defaults[name] == value}
        found |= dict.fromkeys({*_truncations(), *greedy, *MIROSTATS} - {mirostat}, mirostat)
    elif any(request.get(name) == value for name, value in _greedy_values({**defaults, **request}).items()):
        found |= dict.fromkeys(MIROSTATS, "greedy sampling")
    for name, neutral in COMBINING.items():
        if request.get(name, neutral) != neutral:
            found |= dict.fromkeys(COMBINING.keys() - {name}, name)
    if "order" in request:
        missing = set(REQUESTABLE) - set(stages_in(request["order"]))
        fields = [parameter.name for name in missing for parameter in STAGES[name].parameters.values()]
        found |= dict.fromkeys(fields, f"order {request['order']!r}")
    least, most = request.get("min_tokens"), request.get("max_tokens")
    if most is not None and least is None and defaults["min_tokens"] > most:
        found["min_tokens"] = "max_tokens"
    if least is not None and "max_tokens" not in request and (defaults["max_tokens"] or least) < least:
        found["max_tokens"] = "min_tokens"
    return found
