"""Save and share: files, pages without a server, links, and programs that give the output again."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from chromium import PageErrors
from inspector_page import InspectorPage, hash_of
from server_process import Server

import nucleate as nc

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.slow

SEED = 2**63 - 1  # beyond the integers that a JavaScript number holds
PROMPT = "Once upon a time </script><img src=x onerror='window.attacked=1'> 'there' was"
GIVEN = {"temperature": 0.9, "top_p": 0.95, "seed": SEED, "max_tokens": 16}
STEP = 4


@pytest.fixture
def inspector(inspector: InspectorPage) -> InspectorPage:
    inspector.go(STEP)
    return inspector


@pytest.fixture(scope="module")
def completion(llm: nc.LLM) -> nc.Output:
    """What the library generates."""
    [found] = llm.generate(PROMPT, **GIVEN)
    return found.outputs[0]


def test_a_trace_is_saved_and_opened_again(
    inspector: InspectorPage, completion: nc.Output, server: Server, tmp_path: Path
) -> None:
    before, tokens, columns = inspector.ladder(), inspector.tokens(), inspector.columns()
    path = inspector.save("Trace as JSON", tmp_path)
    saved = json.loads(path.read_text("utf-8"))
    assert [saved["format"], saved["version"], saved["run"]["start"]["seed"]] == ["nucleate-trace", 1, SEED]
    assert [token["id"] for token in saved["run"]["tokens"]] == list(completion.token_ids)
    assert saved["run"]["end"]["text"] == completion.text
    assert sorted(map(int, saved["traces"])) == list(range(16))

    inspector.open(server.url)
    inspector.root.locator("input[type=file]").set_input_files(path)
    inspector.root.get_by_text("A saved trace").first.wait_for()
    inspector.go(STEP)
    assert inspector.tokens() == tokens
    assert inspector.columns() == columns
    assert inspector.ladder() == before
    assert inspector.root.get_by_role("slider").first.is_disabled()


def test_a_file_that_is_no_trace_is_explained(inspector: InspectorPage, tmp_path: Path) -> None:
    for name, text, message in (
        ("a.json", "{", "This file is not JSON."),
        ("b.json", "{}", "This file is not a trace saved by the inspector."),
        (
            "c.json",
            '{"format": "nucleate-trace", "version": 2}',
            "This trace has version 2; this page reads version 1.",
        ),
        ("d.json", '{"format": "nucleate-trace", "version": 1, "run": {}}', "This trace is incomplete."),
    ):
        path = tmp_path / name
        path.write_text(text, "utf-8")
        inspector.root.locator("input[type=file]").set_input_files(path)
        inspector.root.get_by_role("alert").get_by_text(message).wait_for()
    assert inspector.ladder()


def test_a_saved_page_needs_no_server(
    inspector: InspectorPage, context: BrowserContext, completion: nc.Output, tmp_path: Path
) -> None:
    before, tokens = inspector.ladder(), inspector.tokens()
    path = inspector.save("Trace as a page", tmp_path)
    context.set_offline(True)
    page = context.new_page()
    errors, requests = PageErrors(page), list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    opened = InspectorPage(page)
    opened.go(STEP)
    assert opened.ladder() == before
    assert opened.tokens() == tokens
    opened.ribbon.press("ArrowRight")
    opened.settle()
    assert opened.step() == STEP + 1
    assert opened.ladder() != before
    for tab in ("Many draws", "Compare", "Branches", "Stages"):
        opened.tab(tab)
    again = json.loads(opened.save("Trace as JSON", tmp_path).read_text("utf-8"))
    assert again["run"]["end"]["text"] == completion.text
    assert [url for url in requests if not url.startswith(("file:", "blob:"))] == []
    assert page.locator("img").count() == 0
    assert page.evaluate("() => window.attacked") is None
    assert errors.unexpected() == []


def test_a_step_as_table_and_pictures(inspector: InspectorPage, tmp_path: Path) -> None:
    rows = list(csv.reader(io.StringIO(inspector.save("This step as CSV", tmp_path).read_text("utf-8"))))
    ladder = inspector.ladder()
    assert len(rows[0]) == 3 + len(ladder)
    assert len(rows) == 41
    by_id = {int(row[0]): row for row in rows[1:]}
    assert all(token in by_id for token in inspector.columns())
    last = [float(row[-2] or 0) for row in rows[1:]]
    assert 0.5 < sum(last) <= 1 + 1e-9

    picture = ET.parse(inspector.save("Stages as SVG", tmp_path)).getroot()
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert all(any(text and text.startswith(row.name) for text in texts) for row in ladder[:-1])
    assert f"seed {SEED}, step {STEP}" in str(texts[-1])

    data = inspector.save("Stages as PNG", tmp_path).read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(data[16:20]) == 2 * int(picture.attrib["width"])


def test_the_programs_give_the_output_again(
    inspector: InspectorPage, completion: nc.Output, server: Server, tmp_path: Path
) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(inspector.code("Python"), {})
    assert printed.getvalue() == f"{completion.text}\n"

    answer = subprocess.run(["bash", "-c", inspector.code("curl")], capture_output=True, check=True, cwd=tmp_path)
    assert json.loads(answer.stdout)["choices"][0]["text"] == completion.text


def test_a_link_holds_prompt_and_settings(inspector: InspectorPage, browser: Browser) -> None:
    inspector.slider("temperature").fill("1.3")
    inspector.settle()
    inspector.menu("Copy a link").click()
    inspector.root.get_by_text("The link is in the clipboard.").wait_for()
    link = inspector.page.evaluate("() => navigator.clipboard.readText()")
    assert link == inspector.page.url
    inspector.root.get_by_role("button", name="Generate with these settings").click()
    inspector.settle()
    tokens = inspector.tokens()
    other = browser.new_context(viewport={"width": 1280, "height": 900})
    page = other.new_page()
    opened, errors = InspectorPage(page), PageErrors(page)
    page.goto(link)
    opened.ribbon.locator("[data-step]").first.wait_for()
    opened.settle()
    assert opened.root.get_by_label("Prompt", exact=True).input_value() == PROMPT
    assert opened.field("temperature").input_value() == "1.3"
    assert opened.field("seed").input_value() == str(SEED)
    assert opened.tokens() == tokens
    assert errors.unexpected() == []
    other.close()


@pytest.mark.parametrize("contents", ["#s=!!!!", "#s=bm90IEpTT04", hash_of({"prompt": 5})])
def test_a_damaged_link_shows_the_first_page(contents: str, page: Page, server: Server) -> None:
    inspector = InspectorPage(page)
    page.goto(f"{server.url}/inspector{contents}")
    inspector.ribbon.locator("[data-step]").first.wait_for()
    inspector.settle()
    assert inspector.root.get_by_label("Prompt", exact=True).input_value() == "Once upon a time"


def test_a_link_with_unknown_parameters_is_explained(page: Page, server: Server, errors: PageErrors) -> None:
    errors.allow("status of 400")
    given: dict[str, Any] = {"prompt": "Once", "params": {"tempreature": 1, "__proto__": 2}}
    page.goto(f"{server.url}/inspector{hash_of(given)}")
    page.get_by_role("alert").get_by_text("tempreature").wait_for()
