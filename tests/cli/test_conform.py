"""``nucleate conform``: exit status, the forms of the report, and errors."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from server_process import Server, free_port

from nucleate.cli.conform import GROUPS, MEANINGS, escape, meaning, to_html, to_text
from nucleate.cli.main import main
from nucleate.comparison.exact_tests import Finding, Findings

DOCS = Path(__file__).parents[2] / "docs"
FINDINGS = Findings(
    "http://<b>&.test",
    {"requests": 1234, "power": "a change of 0.05"},
    [
        Finding("fields", "top_k", "same", "top_k 1 changes the text"),
        Finding("fields", "stop", "differs", 'stop "<i>" stays & is kept'),
        Finding("order", "temperature, then top_p", "not tested", "no logprobs"),
        Finding("errors", "temperature -1", "differs", "x" * 300),
    ],
)
SAMPLER = """
import numpy as np
def sample(logits, parameters, seeds):
    return np.zeros(len(logits), int)
"""


def test_every_meaning_has_a_place_in_the_docs() -> None:
    for name, found in MEANINGS.items():
        page, _, anchor = found.link.partition("#")
        headings = [
            line.lstrip("# ").lower() for line in (DOCS / page).read_text("utf-8").splitlines() if line[:1] == "#"
        ]
        assert not anchor or anchor in [heading.replace(" ", "-").replace("`", "") for heading in headings], name
        assert found.text
    assert {*GROUPS} - {"stop"} <= MEANINGS.keys()


def test_the_text_has_differences_beside_their_meaning() -> None:
    text = to_text(FINDINGS)
    assert "4 checks: 1 as documented, 2 differ, 1 not tested" in text
    assert f"documented: {MEANINGS['stop'].text} ({MEANINGS['stop'].link})" in text
    assert f"to get it: {MEANINGS['stop'].setting}" in text
    assert meaning(FINDINGS.findings[3]) == MEANINGS["errors"]
    assert max(map(len, text.splitlines())) <= 100


def test_the_page_has_strict_markup() -> None:
    page = to_html(FINDINGS)
    open_tags: list[str] = []

    class Strict(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "br"):
                open_tags.append(tag)
            assert tag != "script"

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

    Strict().feed(page)
    assert open_tags == []
    assert escape('stop "<i>" stays & is kept') in page
    assert "<i>" not in page
    assert "src=" not in page


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_axe_finds_nothing_in_the_page(width: int, scheme: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    (tmp_path / "report.html").write_text(to_html(FINDINGS), "utf-8")
    with chromium() as browser:
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.goto((tmp_path / "report.html").as_uri())
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert page.evaluate("() => document.scrollingElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
def test_the_server_of_this_project_has_no_difference(run: Any, tmp_path: Path) -> None:
    with Server() as server:
        server.warmed()
        page = tmp_path / "report.html"
        found = json.loads(run("conform", server.url, "--json", "--html", str(page)).out)
    assert [one for one in found["findings"] if one["outcome"] != "same"] == []
    assert len(found["findings"]) > 50
    assert found["about"]["draws per test"] == 1280
    assert page.read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_a_key_is_read_from_the_environment(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Server("--api-key", "secret") as server:
        assert "401" in run("conform", server.url, "--max-requests", "20", status=1).err
        assert "401" in run("conform", server.url, "--api-key", "wrong", status=1).err
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert "the budget of 20 requests is spent" in run("conform", server.url, "--max-requests", "20").out
        assert "the budget of 1 requests is spent" in run("conform", server.url, "--max-requests", "1", status=1).err


def test_a_sampler_with_differences(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "zero_sampler.py").write_text(SAMPLER, "utf-8")
    printed = run("conform zero_sampler:sample --draws 100", status=3).out
    assert printed.startswith("zero_sampler:sample\n")
    assert "differs       temperature: temperature 0.1 changes nothing" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("127.0.0.1:8000", "MODULE:FUNCTION, got '127.0.0.1:8000'"),
        ("http://127.0.0.1:1/?a=b", "url must be http://HOST:PORT"),
        ("http://127.0.0.1 --draws 99", "--draws must be at least 100, got 99"),
        ("http://127.0.0.1 --timeout nan", "--timeout must be at least"),
        ("http://127.0.0.1 --concurrency 0", "--concurrency must be at least 1"),
        ("", "required: URL"),
    ],
)
def test_wrong_usage(arguments: str, message: str, run: Any) -> None:
    assert message in run(f"conform {arguments}", status=2).err


def test_no_server(run: Any) -> None:
    assert "cannot be reached" in run(f"conform http://127.0.0.1:{free_port()}", status=1).err
    assert main(["conform", "http://no-such-host.invalid"]) == 1
