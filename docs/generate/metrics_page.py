"""Generates the page of Prometheus metrics from a scrape of the metrics of a server without requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nucleate.outputs import EngineStats, SpeculativeStats
from nucleate.server.metrics import BUCKETS, VLLM_ALIASES, Metrics

ABOUT = """\
# Metrics

`GET /metrics` returns these metrics in Prometheus' text format. Every sample has the label `model_name`. Counters have
the suffix `_total`, histograms the suffixes `_bucket`, `_sum` and `_count`. Some metrics exist a second time under the
name that they have in vLLM, because gateways look it up. [Server](../server.md) explains how to scrape them.
"""


def metrics_page() -> str:
    """Return the page."""
    zeros = dict.fromkeys(EngineStats._fields, 0) | {"speculative": SpeculativeStats(accepted_tokens_per_position=(0,))}
    metrics = Metrics("model", lambda: EngineStats(**zeros))
    metrics.count_request("/v1/completions", 200, 0.1)
    lines = [ABOUT]
    for family in metrics.collect():
        if family.name in {alias.replace("nucleate_", "vllm:", 1) for alias in VLLM_ALIASES}:
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = [family.type, *(f"label `{label}`" for label in _labels(family.samples))]
        if family.name in VLLM_ALIASES:
            kind.append(f"also `{name.replace('nucleate_', 'vllm:', 1)}`")
        lines.append(f"`{name}`\n: {family.documentation} ({', '.join(kind)})\n")
    bounds = ", ".join(f"{bound:g}" for bound in BUCKETS)
    return "\n".join([*lines, f"Histograms have buckets up to {bounds} seconds.", ""])


def _labels(samples: Iterable[Any]) -> list[str]:
    return [*dict.fromkeys(label for s in samples for label in s.labels if label not in ("model_name", "le"))]
