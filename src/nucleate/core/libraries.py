"""The kernels of the program: which modules have them, and which are compiled together. Knows modules by name only."""

from __future__ import annotations

from pathlib import Path

from nucleate.core.native import Library

_ROOT = Path(__file__).parents[1]


def _sources(*names: str) -> list[Path]:
    found = (path for name in names for path in _ROOT.glob(name))
    return sorted(found)


_CPU = "backends/cpu/**/*.py"
CHAIN = Library(
    "chain",
    ("nucleate.backends.cpu.special.chain",),
    _sources(_CPU, "dispatch/chain.py", "core/maths.py", "core/noise.py"),
)
GENERIC = Library(
    "generic",
    ("nucleate.backends.cpu.generic.kernels", "nucleate.backends.cpu.load"),
    _sources(_CPU, "core/maths.py", "core/noise.py"),
)
MODELS = Library(
    "models",
    ("nucleate.models.kernels", "nucleate.models.attention_kernel"),
    _sources(*(f"models/{name}.py" for name in ("kernels", "attention_kernel", "branches", "pool", "vectors"))),
)
DRAFTS = Library(
    "drafts", ("nucleate.engine.draft.neural.race",), _sources("engine/draft/neural/race.py", "backends/cpu/*.py")
)

SAMPLER = (CHAIN, GENERIC)
"""What backend "cpu" draws with."""
ALL = (*SAMPLER, MODELS, DRAFTS)
