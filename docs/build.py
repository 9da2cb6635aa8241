"""Write what is derived from the stages: docs/stages.md, and the types of what is found at import.

Also makes the page of benchmarks from the results that are kept (which only `make bench-page` measures), and checks
every relative link. With --check nothing is written, only compared.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from nucleate.parameters.parameter import Parameter
from nucleate.sampling.stage import shape_of
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS, REQUEST_PARAMETERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "stages.md"
MEASURED = ROOT / "docs" / "benchmarks.md"
FIELD_TYPES = ROOT / "src" / "nucleate" / "_sampling_params_fields.pyi"
STAGE_TYPES = ROOT / "src" / "nucleate" / "sampling" / "stages" / "__init__.pyi"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def page() -> str:
    """The page of all stages and parameters."""
    lines = [
        "# Stages and parameters",
        "",
        "Made by `make docs` from `src/nucleate/sampling/stages/`; do not edit.",
        "What each stage means, exactly: [semantics.md](semantics.md).",
        "",
        "| rank | stage | shape | what it does | parameter | allowed | without it |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in STAGES.values():
        what = (stage.__doc__ or "").strip().splitlines()[0]
        public = [parameter for parameter in stage.parameters.values() if parameter.public]
        cells = [(f"`{p.name}`", p.allowed, shown(p.default)) for p in public] or [("", "", "")]
        for row, (name, allowed, default) in enumerate(cells):
            head = f"| {stage.rank} | `{stage.name}` | {shape_of(stage)} | {what} " if row == 0 else "| | | | "
            lines.append(f"{head}| {name} | {allowed} | {default} |")
    lines += ["", "## Parameters of a request", ""]
    lines += ["| parameter | what it does | allowed | without it |", "|---|---|---|---|"]
    for p in REQUEST_PARAMETERS.values():
        lines.append(f"| `{p.name}` | {p.help} | {p.allowed} | {shown(p.default)} |")
    return "\n".join(lines) + "\n"


def shown(default: object) -> str:
    return str(default).lower() if default or default in (0, False) else "none"


def field_types() -> str:
    """The fields of SamplingParams for type checkers and editors."""
    lines = [
        "# The fields of SamplingParams as type checkers see them. Made by `make docs` from the stages; do not edit.",
        "",
        "from collections.abc import Mapping, Sequence",
        "",
        "from nucleate.structured_output.spec import StructuredOutputs",
        "",
        "class Fields:",
        "    def __init__(",
        "        self,",
        "        *,",
    ]
    lines += [f"        {name}: {taken(p)} = ...," for name, p in FIELDS.items()]
    lines += ["    ) -> None: ..."]
    for name, p in FIELDS.items():
        lines += ["    @property", f"    def {name}(self) -> {p.kind}{' | None' if p.optional else ''}:"]
        lines += [f'        """{p.described}"""'.replace("\\", "\\\\")]
    return "\n".join(lines) + "\n"


def stage_types() -> str:
    """The names in nucleate.sampling.stages, which are found at import, for type checkers and editors."""
    kinds = sorted(STAGES.values(), key=lambda kind: kind.__module__)
    lines = ["# The stages as type checkers see them. Made by `make docs`; do not edit.", ""]
    lines += ["from nucleate.sampling.stage import Stage"]
    lines += [f"from {kind.__module__} import {kind.__name__} as {kind.__name__}" for kind in kinds]
    return "\n".join([*lines, "", "STAGES: dict[str, type[Stage]]"]) + "\n"


def taken(p: Parameter) -> str:
    """What may be given for a parameter: more than what it becomes."""
    kind = {
        "tuple[int, ...]": "Sequence[int]",
        "tuple[str, ...]": "str | Sequence[str]",
        "str | tuple[str, ...]": "str | Sequence[str]",
        "tuple[str | tuple[int, ...], ...]": "str | Sequence[str | Sequence[int]]",
        "StructuredOutputs": "StructuredOutputs | Mapping[str, object]",
    }.get(p.kind, p.kind)
    return kind + (" | None" if p.optional else "")


def benchmarks() -> str:
    """The page of benchmarks."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import page as measured

    return measured.page(json.loads(measured.RESULTS.read_text("utf-8")))


def broken_links() -> list[str]:
    """Every relative link to a file that does not exist."""
    pages = [path for path in ROOT.rglob("*.md") if not {".venv", "node_modules"} & set(path.parts)]
    return [
        f"{path.relative_to(ROOT)}: {target}"
        for path in pages
        for target in LINK.findall(path.read_text("utf-8"))
        if not (path.parent / target).exists()
    ]


def main() -> int:
    problems = [f"broken link in {link}" for link in broken_links()]
    made = {PAGE: page(), MEASURED: benchmarks(), FIELD_TYPES: field_types(), STAGE_TYPES: stage_types()}
    for path, text in made.items():
        if "--check" not in sys.argv:
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            problems.append(f"{path.relative_to(ROOT)} is not what it is made from: run `make docs`")
    print("\n".join(problems) or f"docs: {len(STAGES)} stages, no broken link")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
