"""The page /docs: its files, its policy, access, and what it shows in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgi_client import ask
from chromium import PageErrors, chromium
from server_process import Server
from test_app import serve

import nucleate as nc
from nucleate.server.limits import ServerLimits
from nucleate.server.openapi_document import document
from nucleate.server.service import Service

FOLDER = Path(nc.__file__).parent / "server" / "api_page"
KEY = "a-key-of-this-test"


def test_the_page_loads_only_its_own_files_under_a_strict_policy(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        page = await ask(app, "/docs")
        text = page.data.decode()
        linked = re.findall(r'(?:href|src)="([^"]+)"', text)
        assert {f"docs/{file.name}" for file in FOLDER.glob("*.*")} >= {name for name in linked if "docs/" in name}
        assert all(not re.match(r"[a-z]+:|/", name) for name in linked)  # relative: they work behind a path prefix
        for path in ("docs", *linked, "docs/schema_text.js"):
            found = await ask(app, f"/{path}")
            assert found.status == 200
            if path != "openapi.json":
                policy = found.headers["content-security-policy"]
                assert "default-src 'self'" in policy
                assert "unsafe" not in policy
                assert found.headers["x-content-type-options"] == "nosniff"
        for file in (file for file in FOLDER.iterdir() if file.suffix != ".svg"):
            content = file.read_text("utf-8")
            assert "http://" not in content
            assert "https://" not in content
            assert "innerHTML" not in content
            assert " style=" not in content

    serve(llm, use)


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e", "index.html%00", "../app.py"])
def test_only_the_files_of_the_page_are_sent(llm: nc.LLM, name: str) -> None:
    async def use(app: Any, service: Service) -> None:
        assert (await ask(app, f"/docs/{name}")).status == 404

    serve(llm, use)


def test_the_page_is_open_but_its_content_needs_a_key(llm: nc.LLM) -> None:
    async def use(app: Any, service: Service) -> None:
        assert (await ask(app, "/docs")).status == 200
        assert (await ask(app, "/docs/api_page.js")).status == 200
        assert (await ask(app, "/docs/a/b")).status == 401
        assert (await ask(app, "/openapi.json")).status == 401
        found = await ask(app, "/openapi.json", headers=((b"authorization", b"Bearer secret"),))
        assert found.json["components"]["securitySchemes"] == {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }

    serve(llm, use, keys=["secret"])


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with Server() as open_, Server("--api-key", KEY) as locked:
        yield open_, locked


@pytest.mark.slow
def test_the_page_in_a_browser(servers: tuple[Server, Server]) -> None:
    open_, locked = servers
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        errors = PageErrors(page)
        page.goto(f"{open_.url}/docs")
        page.wait_for_selector("details")
        paths = document("tiny", "1", ServerLimits())["paths"]
        titles = page.locator("details > summary h2").all_inner_texts()
        assert sorted({title.split()[1] for title in titles}) == sorted(paths)
        chat = page.locator("details").filter(has_text="/v1/chat/completions")
        assert not chat.locator("table").is_visible()
        chat.locator("summary").click()
        assert "messages" in chat.locator("tbody tr").first.inner_text()
        assert f"curl {open_.url}/v1/chat/completions" in chat.locator("pre").inner_text()
        chat.locator("input").fill("top_p cumulative")
        assert [row.split()[0] for row in chat.locator("tbody tr:visible").all_inner_texts()] == ["top_p"]
        for width in (320, 1200):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        errors.allow("401")
        page.goto(f"{locked.url}/docs")
        page.locator("#key-value").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("did not accept this API key").wait_for()
        page.locator("#key-value").fill(KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("details")
        without_key = [title for title in page.locator("summary").all_inner_texts() if "needs no API key" in title]
        assert sorted(title.split()[1] for title in without_key) == ["/docs", "/health", "/ping", "/ping"]
        assert "Bearer $API_KEY" in page.locator("details pre").first.text_content()
        assert KEY not in page.content()
        assert errors.unexpected() == []
