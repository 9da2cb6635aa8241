"""Generates the files of the documentation that are committed, checks every relative link, and builds the site.

The files are docs/stages.md, the type stubs of fields and stages, and docs/benchmarks.md, from the stored results; only
`make bench-page` measures them. With --check, compares the files and writes nothing. With --site FOLDER, builds the
site instead, which needs the extra `docs`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from generate import DOCS, ROOT
from generate.links import broken_links
from generate.stage_table import stage_table
from generate.type_stubs import field_types, stage_types

from nucleate.sampling.stages import STAGES

PACKAGE = ROOT / "src" / "nucleate"


def benchmarks() -> str:
    """Return docs/benchmarks.md."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import page as measured

    return measured.page(json.loads(measured.RESULTS.read_text("utf-8")))


def committed() -> dict[Path, str]:
    """Return the text of each generated file that is committed."""
    return {
        DOCS / "stages.md": stage_table(),
        DOCS / "benchmarks.md": benchmarks(),
        PACKAGE / "_sampling_params_fields.pyi": field_types(),
        PACKAGE / "sampling" / "stages" / "__init__.pyi": stage_types(),
    }


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    if arguments[:1] == ["--site"]:
        from generate.site import build_site

        return build_site(Path(arguments[1]))
    problems = [f"broken link in {link}" for link in broken_links()]
    for path, text in committed().items():
        if "--check" not in arguments:
            path.write_text(text, "utf-8")
        elif path.read_text("utf-8") != text:
            problems.append(f"{path.relative_to(ROOT)} is out of date: run `make docs`")
    print("\n".join(problems) or f"docs: {len(STAGES)} stages, no broken links")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
