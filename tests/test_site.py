"""The generator of the documentation site: reference pages from the code, links, and what makes a build fail."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.cli.main import COMMANDS, command_parser
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS

ROOT = Path(__file__).parents[1]
FIRST = ("min_p", "gumbel", "logprobs", "guidance", "mask", "synthid")
"""Stages of different shapes."""
sys.path.append(str(ROOT / "docs"))

from generate import (  # noqa: E402  # noqa: E402
    api_check,
    api_names,
    docstrings,
    errors_page,
    links,
    navigation,
    pages,
    site_checks,
    stage_definitions,
    stage_facts,
    stage_pages,
    stage_plots,
    trace_page,
)
from generate.command_pages import command_page  # noqa: E402
from generate.http_page import http_page  # noqa: E402
from generate.llms import plain  # noqa: E402
from generate.metrics_page import metrics_page  # noqa: E402
from generate.parameters_page import parameters_page  # noqa: E402
from generate.site import FRONT, in_order, run_sphinx, write_sources  # noqa: E402


@pytest.mark.slow
def test_every_public_name_is_documented() -> None:
    assert api_check.undocumented() == []


def test_names_without_documentation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(a: int) -> int:
        return a

    def half(logits: int, other: int) -> int:
        """Add logits."""
        return logits + other

    class Bare:
        """A class."""

        def method(self) -> None:
            pass

    for name, value in (("silent", silent), ("half", half), ("Bare", Bare), ("THREE", (3,))):
        monkeypatch.setitem(nc.__dict__, name, value)
    monkeypatch.setattr(nc, "__all__", [*nc.__all__, "silent", "half", "Bare", "THREE", "explain2"])
    page = api_names.ApiPage("more", "More", "", ("silent", "half", "Bare", "THREE"))
    monkeypatch.setattr(api_check, "PAGES", (*api_names.PAGES, page))
    assert api_check.undocumented() == [
        "nucleate.Bare.method has no docstring",
        "nucleate.THREE has no docstring",
        "nucleate.explain2 is on no page of the API reference",
        "nucleate.half: its docstring does not describe the parameter other",
        "nucleate.silent has no docstring",
    ]


def test_the_sentences_about_parameters_become_a_list() -> None:
    lines = [
        "Do it.",
        "",
        "a, b: two numbers, at most 3. c_BV: the",
        "``x | y``: not",
        "a list. Raises E.",
        "",
        "    a: b",
    ]
    assert docstrings.docstring_lines(lines, ["a", "b", "c_BV"]) == [
        *("Do it.", "", "- **a**, **b**: two numbers, at most 3."),
        *("- **c_BV**: the ``x | y``: not a list.", "", "Raises E.", "", "    a: b", ""),
    ]
    fields = docstrings.docstring_lines(["Fields:", "    a: one * two.", "    b: c: d."], [])
    assert fields == ["Fields:", "", r"- **a**: one \* two.", "- **b**: c: d.", ""]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", [*FIRST, *(name for name in STAGES if name not in FIRST)])
def test_the_page_of_a_stage(name: str) -> None:
    page, kind = stage_pages.stage_page(STAGES[name]), STAGES[name]
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    wanted = ["Meaning", "Effect", "Parameters", "Cost", "Python"]
    assert [h for h in headings if h in wanted] == [
        h for h in wanted if (h != "Effect" or name != "logprobs") and (h != "Parameters" or kind.parameters)
    ]
    assert all(f"`{attribute}`" in page for attribute in kind.parameters)
    assert f"nucleate.stages.{kind.__name__}" in page
    for svg in re.findall(r"<svg .*?</svg>", page, re.DOTALL):
        assert len(ET.fromstring(svg).findall("rect")) == 2 * len(stage_plots.PROBABILITIES) + 2
        assert len(svg) < 6000


def test_every_stage_has_an_example_which_has_an_effect() -> None:
    assert list(stage_facts.FACTS) == list(STAGES)
    for name, facts in stage_facts.FACTS.items():
        assert facts.example.name == name
        assert not facts.example.neutral


def test_the_page_of_min_p_comes_from_the_code_and_the_other_pages() -> None:
    page = stage_pages.stage_page(STAGES["min_p"])
    assert "[arXiv 2407.01082](https://arxiv.org/abs/2407.01082)" in page
    assert "Keep `p_i >= m * p_top`" in page  # docs/semantics.md
    assert "return row.top + log(self.m) - SLACK" in page
    assert "`min_p` above 1 in llama.cpp" in page  # docs/differences.md
    assert "flag `--min-p`" in page
    assert "`probability >= 0.06, 0.2 of the highest`" in page  # the trace


def test_a_stage_without_a_definition_fails() -> None:
    with pytest.raises(ValueError, match=r"semantics.md does not define min_q"):
        [*stage_definitions.semantics("min_q")]


def test_the_page_of_parameters_has_every_field() -> None:
    assert set(re.findall(r"^### (.+)$", parameters_page(), re.MULTILINE)) == set(FIELDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_has_every_flag(name: str) -> None:
    page, parser = command_page(name), command_parser(name)
    flags = {flag for action in parser.actions for flag in action.option_strings if action.help != "==SUPPRESS=="}
    assert flags <= set(re.findall(r"--?[a-z][a-z0-9-]*", page))
    assert page.startswith(f"# nucleate {name}\n")


def test_the_pages_of_the_server() -> None:
    pytest.importorskip("starlette")
    http, metrics, errors = http_page(), metrics_page(), errors_page.errors_page()
    assert "### POST /v1/chat/completions" in http
    assert "All [sampling parameters](parameters.md), and:" in http
    per_position = "Accepted draft tokens, by position in the draft. (counter, label `position`, also "
    assert f": {per_position}`vllm:spec_decode_num_accepted_tokens_per_pos_total`)" in metrics
    assert '"message": "top_p must be a number >= 0 and <= 1, got 2"' in errors
    assert "`130`: interrupted" in errors


def test_a_code_or_member_without_a_description_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors_page, "CODES", {**errors_page.CODES, "unknown_code": ("400", "")})
    with pytest.raises(ValueError, match="differ: unknown_code"):
        errors_page.errors_page()
    monkeypatch.setattr(trace_page, "STEP", {k: v for k, v in trace_page.STEP.items() if k != "why"})
    with pytest.raises(ValueError, match="differ: why"):
        trace_page.trace_page()


def test_links_in_code_are_no_links() -> None:
    text = "[a](b.md#c) `[d](e.md)`\n```\n[f](g.md)\n```\n[`h`](i.md) [j](https://k) [l](#m)"
    assert [found[1] for found in links.links(text)] == ["b.md", "i.md"]
    changed = links.replace_links(text, lambda path, anchor: f"new/{path}{anchor}")
    assert changed == text.replace("(b.md", "(new/b.md").replace("(i.md", "(new/i.md")


def test_a_page_brings_the_files_that_it_links_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "docs/how-to/a.md": "# A\n\n[d](../decisions/README.md) [x](../../src/x.py) "
        "[e](../../examples/README.md#u) [s](../../src)",
        "docs/decisions/README.md": "# D\n",
        "src/x.py": "x = 1\n",
        "examples/README.md": "# E\n\n[back](../docs/how-to/a.md) [none](none.md)",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "DOCS", tmp_path / "docs")
    copied = pages.Pages(tmp_path / "out")
    assert copied.add(tmp_path / "docs" / "how-to" / "a.md") == "how-to/a.md"
    assert copied.orphans == {"repository/examples/README.md"}
    assert (tmp_path / "out" / "how-to" / "a.md").read_text("utf-8") == (
        "# A\n\n[d](../decisions/index.md) [x](../repository/src/x.py) [e](../repository/examples/README.md#u) s"
    )
    assert "[back](../../how-to/a.md) [none](none.md)" in (tmp_path / "out/repository/examples/README.md").read_text(
        "utf-8"
    )
    assert (tmp_path / "out/repository/src/x.py").read_text("utf-8") == "x = 1\n"


def test_a_page_that_is_not_listed_is_a_guide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(navigation, "LISTED", {**navigation.LISTED, "explanation": ()})
    assert "engine" in navigation.hand_written(pages.Pages(tmp_path))["how-to"].entries
    monkeypatch.setattr(navigation, "LISTED", {"explanation": ("no_such_page",)})
    with pytest.raises(FileNotFoundError):
        navigation.hand_written(pages.Pages(tmp_path))


def test_the_first_sentence_of_a_page() -> None:
    assert pages.summary("# A\n\n> note\n\nThe [b](c.md) `d.e` is\nshort. More.\n") == "The b `d.e` is short."
    assert pages.summary("# A\n\nGenerated by x.\n\n## B\n") == ""
    assert pages.title("x\n# The title\n") == "The title"


@pytest.mark.slow
def test_the_navigation_has_every_page(tmp_path: Path) -> None:
    names = write_sources(tmp_path)
    assert names[0] == "index"
    assert len(names) == len(set(names))
    assert set(names) == {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.md")}
    assert {f"reference/stages/{name}" for name in STAGES} <= set(names)
    for folder in ("tutorials", "how-to", "explanation"):
        written = (ROOT / "docs" / folder).glob("*.md")
        assert {pages.page_name(path).removesuffix(".md") for path in written} <= set(names)
    assert in_order(tmp_path, "reference/api/index")[1] == "reference/api/llm"
    assert "toctree" not in plain((tmp_path / "index.md").read_text("utf-8"))


@pytest.mark.slow
def test_the_example_of_the_front_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", FRONT, re.DOTALL)
    exec(compile(code, "<front page>", "exec"), {})
    assert len(capsys.readouterr().out) > 40


def test_pages_that_load_from_elsewhere_or_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<script src="https://x.example/a.js"></script><article><h1>A</h1><h3>B</h3><a href="b.html#c">b</a></article>',
        "utf-8",
    )
    (tmp_path / "b.css").write_text("@import url(https://fonts.example/a.css)", "utf-8")
    assert site_checks.site_problems(tmp_path) == [
        "b.css loads from another host",
        'a.html: loads <script src="https://x.example/a.js"',
        "a.html: links to b.html, which does not exist",
        "a.html: skips a level of headings",
    ]


@pytest.mark.slow
def test_sphinx_reports_broken_links(tmp_path: Path) -> None:
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="it is in the extra docs")
    sources = tmp_path / "sources"
    sources.mkdir()
    text = "# A\n\n[ok](#a) [b](#none) [c](none.md) ![d](none.png)\n\n"
    text += "```{eval-rst}\n.. autofunction:: nucleate.none\n```\n"
    (sources / "index.md").write_text(text, "utf-8")
    problems = "\n".join(run_sphinx(sources, tmp_path / "out", "html"))
    for part in (
        "target not found: 'none'",
        "target not found: 'none.md'",
        "not readable: none.png",
        "failed to import 'none'",
    ):
        assert part in problems
    assert "'a'" not in problems
    page = (tmp_path / "out" / "index.html").read_text("utf-8")
    regions = re.findall(r"<aside[^>]*>", page)
    assert len({re.findall(r'aria-label="(.*?)"', region)[0] for region in regions}) == len(regions) == 2
