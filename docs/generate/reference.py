"""Writes the generated pages of the section Reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from generate import api, api_names
from generate.command_pages import command_page
from generate.errors_page import errors_page
from generate.http_page import http_page
from generate.metrics_page import metrics_page
from generate.navigation import Section
from generate.parameters_page import parameters_page
from generate.stage_pages import stage_index, stage_page
from generate.trace_page import trace_page
from nucleate.cli.main import COMMANDS
from nucleate.sampling.stages import STAGES

SINGLE: Mapping[str, Callable[[], str]] = {
    "parameters": parameters_page,
    "http": http_page,
    "metrics": metrics_page,
    "trace": trace_page,
    "errors": errors_page,
}
"""The pages that stand alone."""


def reference_pages(sources: Path) -> list[str]:
    """Write all generated pages. Return the paths of those directly below the section, without ``.md``."""

    def write(name: str, text: str) -> str:
        path = sources / "reference" / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return f"reference/{name}"

    write("stages/index", stage_index())
    stages = Section("reference/stages", "Stages", "")
    stages.entries = [write(f"stages/{name}", stage_page(kind)) for name, kind in STAGES.items()]
    python = Section("reference/api", "Python API", "All names are in `nucleate`, unless another module is shown.")
    python.entries = [write(f"api/{one.name}", api.page(one)) for one in api_names.PAGES]
    commands = Section("reference/commands", "Command line", "`nucleate COMMAND --help` shows the same, shorter.")
    commands.entries = [write(f"commands/{name}", command_page(name)) for name in COMMANDS]
    indexes = [section.write(sources) for section in (stages, python, commands)]
    single = [write(name, page()) for name, page in SINGLE.items()]
    return [indexes[0], single[0], *indexes[1:], *single[1:]]
