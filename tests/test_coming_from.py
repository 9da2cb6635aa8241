"""The parameter tables of docs/how-to/coming_from_*.md: our names exist, with the defaults that the tables give."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.cli.main import command_parser
from nucleate.sampling_params import FIELDS
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
GUIDES = ("vllm", "transformers", "llama_cpp")
FLAGS = {flag for action in command_parser("serve").actions for flag in action.option_strings}
OTHERS = {
    *inspect.signature(nc.LLM).parameters,
    *inspect.signature(nc.Engine).parameters,
    *(field.name for kind in (nc.BeamParams, nc.Speculation, nc.Request) for field in fields(kind)),
    *COMPLETIONS.field_names,
    *CHAT.field_names,
    *("LLM", "Speculation", "Completion", "Engine"),
}


def page(guide: str) -> str:
    return (HOW_TO / f"coming_from_{guide}.md").read_text("utf-8")


def rows(guide: str) -> Iterator[list[str]]:
    """The rows of the tables with our names in the third and our defaults in the fourth column."""
    for line in page(guide).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and cells[2] not in ("nucleate", "---"):
            yield cells


def shown(default: object) -> str:
    return str(default).lower() if default or default in (0, False) else "none"


@pytest.mark.parametrize("guide", GUIDES)
def test_our_names_exist(guide: str) -> None:
    for cells in rows(guide):
        for code in re.findall(r"`([^`]+)`", cells[2]):
            name = re.split(r"[ =(]", code)[0]
            assert name in FIELDS or name in OTHERS or name in FLAGS, cells


@pytest.mark.parametrize("guide", GUIDES)
def test_our_defaults_are_correct(guide: str) -> None:
    checked = 0
    for cells in rows(guide):
        names = re.findall(r"`(\w+)`", cells[2])
        if cells[3] and names and all(name in FIELDS for name in names) and " of " not in cells[2]:
            defaults = [shown(FIELDS[name].default) for name in names]
            known = {", ".join(defaults), ", ".join(dict.fromkeys(defaults)), defaults[0]}
            assert cells[3] in known, (cells, known)
            checked += 1
    assert checked >= 20


def test_defaults_of_beam_search_and_speculation() -> None:
    defaults = {field.name: field.default for kind in (nc.BeamParams, nc.Speculation) for field in fields(kind)}
    table = page("transformers").partition("## Beam search")[2]
    for cells in rows("transformers"):
        name = cells[2].removesuffix(" of `Speculation`").strip("`")
        if name in defaults and name not in FIELDS and cells[0] in table:
            assert cells[3] == shown(defaults[name]), cells


def test_all_parameters_of_transformers_are_listed() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    listed = set(re.findall(r"`(\w+)`", page("transformers")))
    assert names - {"transformers_version"} <= listed
