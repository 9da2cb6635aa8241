"""Imports only go to lower layers: enforces the table in ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nucleate"

ALLOWED = {
    "parameters": set(),
    "outputs": set(),
    "jit": {"parameters"},
    "sampling": {"parameters", "outputs", "jit"},
    "tokenization": {"parameters"},
    "stopping": {"parameters", "outputs"},
    "structured_output": {"parameters", "outputs", "sampling", "tokenization"},
    "chat": {"parameters", "outputs", "tokenization", "structured_output"},
    "sampling_params": {"parameters", "jit", "sampling", "structured_output", "_sampling_params_fields"},
    "plugins": {"parameters", "jit", "sampling", "sampling_params"},
    "models": {"parameters", "jit"},
    "sharding": {"parameters", "outputs", "jit", "sampling", "models"},
    "watermark": {"parameters", "sampling"},
    "speculative": {"parameters", "jit", "sampling", "structured_output", "models"},
}
"""The packages that each package may import. The packages added below may import all of these."""
BELOW = {*ALLOWED}
ALLOWED |= {
    "engine": BELOW,
    "generation": {*BELOW, "engine"},
    "llm": {*BELOW, "engine"},
    "comparison": {*BELOW, "engine", "llm"},
    "inspector": {*BELOW, "engine", "llm", "__version__"},
    "server": {*BELOW, "engine", "llm", "inspector", "__version__"},
    "batch": {*BELOW, "engine", "llm", "server"},
    "scale": {*BELOW, "engine", "llm", "server", "batch"},
    "cli": {*BELOW, "engine", "generation", "llm", "comparison", "inspector", "server", "__version__"}
    | {"batch", "scale"},
    "integrations": {*BELOW, "engine", "llm", "cli"},
}
NUMBA = {"jit/compiler.py", "sampling/cpu", "models/kernels.py"}
ONLY_IN = {
    "numba": NUMBA,
    "llvmlite": {*NUMBA, "jit/native_library.py"},
    "torch": {
        "models/transformers",
        "integrations/row_processor.py",
        "sharding",
        "sampling/maths.py",
        "sampling/gpu",
    },
    "triton": {"sampling/gpu/torch_device.py", "sampling/gpu/triton"},
    "transformers": {"models/transformers", "integrations/transformers.py"},
    "llm": {"integrations/llm_plugin.py"},
    "pydantic": {"integrations/llm_plugin.py"},
    "huggingface_hub": {"models/loader.py", "models/gguf/gguf_file.py", "models/model_store.py"},
    "llama_cpp": {"models/gguf/llama_library.py", "integrations/llama_cpp.py"},
    "vllm": {"integrations/vllm.py"},
    "sglang": {"integrations/sglang.py"},
    "mlx": {"integrations/mlx_lm.py"},
    "onnxruntime_genai": {"integrations/onnxruntime_genai.py"},
    "openvino": {"models/openvino_model.py"},
    "safetensors": {"models/numpy_llama.py", "models/model_files.py"},
    "threadpoolctl": {"models/cpu_operations.py"},
    "tokenizers": {"tokenization"},
    "llguidance": {"structured_output"},
    "jsonschema": {"structured_output/guide.py"},
    "referencing": {"structured_output/guide.py"},
    "regex": {"stopping", "tokenization", "structured_output/guide.py"},
    "jinja2": {"tokenization"},
    "tqdm": {"llm", "models/transformers/transformers_model.py"},
    "matplotlib": {"comparison/comparison.py"},
    "asyncio": {"engine/async_engine.py", "server", "scale", "integrations/llm_plugin.py"},
    "starlette": {"server", "scale"},
    "uvicorn": {"server/run.py"},
    "prometheus_client": {"server/metrics.py"},
    "argparse": {"cli"},
    "ray": {"scale"},
    "pyarrow": {"scale"},
}
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def imports(path: Path) -> set[str]:
    """The full names of all modules and names that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_files_import_only_allowed_layers() -> None:
    for path in FILES:
        package = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if package == "__init__":  # the public names come from everywhere
            continue
        own = {"__main__": {"cli"}}.get(package, ALLOWED.get(package))
        assert own is not None, f"{package} is in no layer: add it to ARCHITECTURE.md and here"
        used = {name.split(".")[1] for name in imports(path) if name.startswith("nucleate.")}
        assert used <= {package, *own}, f"{path} imports {used - own - {package}}"


def test_a_library_is_imported_only_in_its_packages() -> None:
    for path in FILES:
        relative = path.relative_to(SOURCE).as_posix()
        for library in {name.split(".")[0] for name in imports(path)} & ONLY_IN.keys():
            assert any(relative == home or relative.startswith(home + "/") for home in ONLY_IN[library]), (
                f"{relative}: {library}"
            )


def test_the_table_in_architecture_equals_this_one() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    assert rows == list(ALLOWED)


def modules() -> dict[str, Path]:
    """Every module by its full name."""
    names = (path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".") for path in FILES)
    return {name.removesuffix(".__init__"): path for name, path in zip(names, FILES, strict=True)}


def test_there_are_no_circular_imports() -> None:
    """Not through other modules either, nor for type hints only."""
    known, graph = modules(), {}
    for name, path in known.items():
        used = {each if each in known else each.rpartition(".")[0] for each in imports(path)}
        graph[name] = used & known.keys() - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_file_name_is_unique_in_its_package() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for path in FILES:
        relative = path.relative_to(SOURCE)
        if path.name != "__init__.py":
            found.setdefault((relative.parts[0], path.name), []).append(relative.as_posix())
    assert [paths for paths in found.values() if len(paths) > 1] == []


def test_there_are_no_utility_packages() -> None:
    names = {part.removesuffix(".py") for path in FILES for part in path.relative_to(SOURCE).parts}
    assert not names & {"utils", "util", "common", "helpers", "helper", "base", "misc"}


def test_dispatch_imports_no_backend() -> None:
    """Selecting a path must not import the paths: neither a compiler nor tensors."""
    code = "import sys, nucleate.sampling.route; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [
        path
        for path in done.stdout.split()
        if path.startswith(("nucleate.sampling.cpu.", "nucleate.sampling.gpu", "nucleate.sampling.reference"))
    ]
