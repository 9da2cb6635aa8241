"""Write docs/stages.md from the stages, and check every relative link of every page. With --check, only compare."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from nucleate.core.request import REQUEST_PARAMETERS
from nucleate.core.stage import shape_of
from nucleate.stages import STAGES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "stages.md"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def page() -> str:
    """The page of all stages and parameters."""
    lines = [
        "# Stages and parameters",
        "",
        "Made by `make docs` from `src/nucleate/stages/`; do not edit.",
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
    if "--check" not in sys.argv:
        PAGE.write_text(page(), "utf-8")
    problems = [f"broken link in {link}" for link in broken_links()]
    if PAGE.read_text("utf-8") != page():
        problems.append("docs/stages.md is not what the stages say: run `make docs`")
    print("\n".join(problems) or f"docs: {len(STAGES)} stages, no broken link")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
