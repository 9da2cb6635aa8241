"""Imports flow one way: the table in ARCHITECTURE.md, held."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nucleate"

BELOW_PIPELINE = {"core", "stages", "backends", "rows", "presets", "params", "kernels", "dispatch"}
PIPELINE = {*BELOW_PIPELINE, "pipeline"}
EVERYTHING_BELOW_LLM = {*PIPELINE, "laws", "sampler", "text", "models"}
ALLOWED = {
    "core": set(),
    "stages": {"core"},
    "text": {"core"},
    "models": {"core"},
    "kernels": {"core"},
    "dispatch": {"core", "stages", "kernels"},
    "backends": {"core", "stages", "dispatch"},
    "rows": {"core", "backends"},
    "presets": {"core", "stages"},
    "params": {"core", "stages", "presets", "fields"},  # fields are the derived types
    "pipeline": BELOW_PIPELINE,
    "laws": PIPELINE,
    "host": PIPELINE,
    "device": PIPELINE,
    "sampler": {*PIPELINE, "laws", "host", "device"},
    "tracing": PIPELINE,
    "warming": {"core"},
    "generate": EVERYTHING_BELOW_LLM,
    "engine": {*EVERYTHING_BELOW_LLM, "generate"},
    "progress": set(),
    "llm": {*EVERYTHING_BELOW_LLM, "generate", "engine", "progress"},
    "server": {*EVERYTHING_BELOW_LLM, "generate", "engine", "llm", "__version__"},
    "cli": {
        *EVERYTHING_BELOW_LLM,
        "generate",
        "engine",
        "progress",
        "llm",
        "server",
        "tracing",
        "warming",
        "__version__",
    },
}
ONLY_IN = {
    "numba": {"core/compiling.py", "core/entries.py", "backends/cpu", "models/kernels.py", "models/vectors.py"},
    "llvmlite": {"core/compiling.py", "core/entries.py", "core/native.py", "backends/cpu", "models/vectors.py"},
    "torch": {
        *("models/transformers.py", "models/packed.py", "models/packed_attention.py", "models/trial.py"),
        *("models/watching.py", "models/mtp.py"),
        *("core/maths.py", "backends/cuda"),
    },
    "triton": {"backends/cuda"},
    "transformers": {"models/transformers.py", "models/packed.py", "models/mtp.py"},
    "huggingface_hub": {"models/load.py"},
    "safetensors": {"models/llama.py"},
    "threadpoolctl": {"models/llama.py"},
    "tokenizers": {"text"},
    "llguidance": {"text/structured"},
    "jsonschema": {"text/structured/validate.py"},
    "referencing": {"text/structured/validate.py"},
    "regex": {"text"},
    "jinja2": {"text"},
    "tqdm": {"progress.py"},
    "asyncio": {"engine/worker.py", "server"},
    "starlette": {"server"},
    "uvicorn": {"server/run.py", "server/protocol.py"},
    "prometheus_client": {"server/metrics.py"},
    "argparse": {"cli"},
}
FILES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The full names of all modules and names that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if package == "__init__":  # the public names come from everywhere
        return
    own = {"__main__": {"cli"}}.get(package, ALLOWED.get(package))
    assert own is not None, f"{package} is in no layer: add it to ARCHITECTURE.md and here"
    used = {name.split(".")[1] for name in imports(path) if name.startswith("nucleate.")}
    assert used <= {package, *own}, f"{path} imports {used - own - {package}}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_library_is_imported_only_where_it_belongs(path: Path) -> None:
    place = path.relative_to(SOURCE).as_posix()
    for library in {name.split(".")[0] for name in imports(path)} & ONLY_IN.keys():
        assert any(place == home or place.startswith(home + "/") for home in ONLY_IN[library]), f"{place}: {library}"


def test_the_table_in_architecture_is_this_one() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    assert rows == list(ALLOWED)


def test_no_package_without_a_reason() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts}
    assert not names & {"utils", "util", "common", "helpers", "helper", "base", "misc"}


def test_dispatch_imports_no_backend() -> None:
    """What selects a path must not load the paths: neither a compiler nor tensors."""
    code = (
        "import sys, nucleate.dispatch.select; print(*(name for name in sys.modules if name.startswith('nucleate.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [path for path in done.stdout.split() if ".backends" in path]
