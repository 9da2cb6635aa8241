"""The pages /, /docs and /inspector: their files, policy, access, errors and limits, and /docs in a browser."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe import Axe
from chromium import PageErrors, chromium
from served_apps import ask, toy_app
from server_process import Server

import nucleate as nc
from nucleate.inspector.page import page_files
from nucleate.sampling_params import FIELDS
from nucleate.server.inspector_routes import HEADERS
from nucleate.server.limits import ServerLimits
from nucleate.server.openapi_document import document

FOLDER = Path(nc.__file__).parent / "server" / "api_page"


@toy_app()
async def test_the_page_loads_only_its_own_files_under_a_strict_policy(app: Any) -> None:
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


@toy_app()
async def test_only_the_files_of_the_pages_are_sent(app: Any) -> None:
    for name in ("none.js", "..%2fapp.py", "..%2fsession.py", "%2e%2e", "index.html%00", "../app.py", "session.py"):
        for folder in ("docs", "inspector"):
            assert (await ask(app, f"/{folder}/{name}")).status == 404


@toy_app(keys=["secret"])
async def test_the_page_is_open_but_its_content_needs_a_key(app: Any) -> None:
    assert (await ask(app, "/docs")).status == 200
    assert (await ask(app, "/docs/api_page.js")).status == 200
    assert (await ask(app, "/docs/a/b")).status == 401
    assert (await ask(app, "/openapi.json")).status == 401
    found = await ask(app, "/openapi.json", headers=((b"authorization", b"Bearer secret"),))
    assert found.json["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }


BROWSER = ((b"accept", b"text/html,application/xhtml+xml,*/*;q=0.8"),)


@toy_app(keys=["secret"])
async def test_the_front_page_is_the_chat_page_for_browsers(app: Any) -> None:
    page = await ask(app, "/", headers=BROWSER)
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "unsafe" not in page.headers["content-security-policy"]
    text = page.data.decode()
    assert not re.search(r"https?:|<style| style=|<script(?! type=\"module\" src=)", text)
    linked = re.findall(r'(?:href|src)="([^"]+)"', text)
    assert all(not re.match(r"[a-z]+:|/", name) for name in linked)  # relative: they work behind a path prefix
    sources, seen = [name for name in linked if name != "docs"], set[str]()
    while sources:
        name = sources.pop()
        found = await ask(app, f"/{name}")
        assert (found.status, name) == (200, name)
        assert found.headers.items() >= HEADERS.items()
        seen.add(name)
        if name.endswith(".js"):
            assert "innerHTML" not in found.data.decode()
            imports = re.findall(r'^import .* from "\./(.+)";$', found.data.decode(), re.MULTILINE)
            sources += [f"chat/{each}" for each in imports if f"chat/{each}" not in seen]
    assert {"chat/chat.js", "chat/controls.js", "chat/inspector.css"} <= seen
    assert (await ask(app, "/chat/none.js")).status == 404
    assert (await ask(app, "/chat/api/settings")).status == 401


@toy_app(keys=["secret"])
async def test_programs_get_a_line_that_says_the_server_runs(app: Any) -> None:
    for headers in ((), ((b"accept", b"*/*"),), ((b"accept", b"application/json"),)):
        found = await ask(app, "/", headers=headers)
        assert (found.status, found.data) == (200, b"Ollama is running")
        assert found.headers["vary"] == "accept"
    assert (await ask(app, "/", method="HEAD")).status == 200
    assert (await ask(app, "/", {}, method="POST")).status in (401, 405)


KEYS = tuple({"authorization": f"Bearer {key}"} for key in ("a-key-of-this-test", "another-key"))
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with Server("--api-key", KEY, "--api-key", "another-key") as running:
        yield running


@pytest.mark.slow
def test_the_page_in_a_browser(server: Server, keyed: Server) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        errors = PageErrors(page)
        page.goto(f"{server.url}/docs")
        page.wait_for_selector("details")
        paths = document("tiny", "1", ServerLimits())["paths"]
        titles = page.locator("details > summary h2").all_inner_texts()
        assert sorted({title.split()[1] for title in titles}) == sorted(paths)
        chat = page.locator("details").filter(has_text="/v1/chat/completions")
        assert not chat.locator("table").is_visible()
        chat.locator("summary").click()
        assert "messages" in chat.locator("tbody tr").first.inner_text()
        assert Axe(page).violations() == []
        assert f"curl {server.url}/v1/chat/completions" in chat.locator("pre").inner_text()
        chat.locator("input").fill("top_p cumulative")
        assert [row.split()[0] for row in chat.locator("tbody tr:visible").all_inner_texts()] == ["top_p"]
        for width in (320, 1200):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

        errors.allow("401")
        page.goto(f"{keyed.url}/docs")
        page.locator("#key-value").wait_for()
        assert Axe(page).violations() == []
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


START = {"prompt": "Once upon a time", "params": {"seed": 3, "max_tokens": 12, "temperature": 0.9}}
GENERATE, TRACE, DRAWS, SETTINGS = (f"/inspector/api/{name}" for name in ("generate", "trace", "draws", "settings"))


def events(server: Server, body: Any, headers: Any = None) -> list[Any]:
    answer = server.request("POST", GENERATE, body, headers)
    assert answer.status == 200, answer.data.decode()
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = [frame for frame in answer.data.decode().split("\n\n") if frame.startswith("data: ")]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_the_page_has_a_strict_policy_and_loads_nothing_from_elsewhere(server: Server) -> None:
    page = server.request("GET", "/inspector")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'self'" in policy
    text = page.data.decode()
    assert "http://" not in text
    assert "https://" not in text
    assert "<style" not in text
    assert " style=" not in text
    for name in [part.split('"')[0] for part in text.split('="inspector/')[1:]]:
        found = server.request("GET", f"/inspector/{name}")
        assert found.status == 200
        assert found.headers.items() >= HEADERS.items()


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("gzip; q=0", False), ("identity", False), ("x-gzip", False)],
)
def test_files_are_compressed_for_clients_that_accept_it(accepted: str, compressed: bool, server: Server) -> None:
    plain = server.request("GET", "/inspector/inspector.js")
    assert "content-encoding" not in plain.headers
    found = server.request("GET", "/inspector/inspector.js", headers={"accept-encoding": accepted})
    assert (found.headers.get("content-encoding") == "gzip") is compressed
    assert (gzip.decompress(found.data) if compressed else found.data) == plain.data


def test_the_page_and_its_modules_are_small() -> None:
    found = page_files("nucleate.inspector", "assets")
    assert {"index.html", "page.js", "inspector.css"} <= {*found}
    assert sum(len(gzip.compress(content)) for content, _ in found.values()) < 100_000
    chat = page_files("nucleate.server", "chat_page").values()
    assert sum(len(gzip.compress(content)) for content, _ in chat) < 60_000


def test_the_chat_page_is_told_what_the_model_can_do(server: Server) -> None:
    found, settings = server.request("GET", "/chat/api/settings").json, server.request("GET", SETTINGS).json
    assert (found["stages"], found["defaults"]) == (settings["stages"], settings["defaults"])
    able = {name: found["model"][name] for name in ("chat", "tools", "reasoning", "bundled", "ends")}
    assert able == {"chat": True, "tools": True, "reasoning": False, "bundled": True, "ends": able["ends"]}
    assert "<|end|>" in able["ends"]
    named = {each["name"] for stage in found["stages"] for each in stage["parameters"]}
    named |= {each["name"] for each in found["parameters"]} | {"seed", "draw", "order", "max_tokens", "stop"}
    unused = {"n", "logprobs", "logprob_token_ids", "prompt_logprobs", "logprobs_mode", "pipeline"}
    assert {*FIELDS} - named - unused == {"contrastive_beta", "contrastive_alpha", "contrastive_temperature"}
    assert found["limits"]["max_logprobs"] == 20
    assert found["inspector"] is True


def test_a_prompt_may_be_token_ids(server: Server) -> None:
    text = {"prompt": "Once upon a time", "params": {"seed": 3, "max_tokens": 5}}
    first, *_, end = events(server, text)
    start, *_, again = events(server, {**text, "prompt": [token["id"] for token in first["prompt"]]})
    assert (start["prompt"], again["text"]) == (first["prompt"], end["text"])
    assert server.request("POST", GENERATE, {**text, "prompt": [1, "a"]}).json["error"]["param"] == "prompt"


def test_an_answer_and_questions_about_it(server: Server) -> None:
    start, *middle, end = events(server, START)
    tokens = [token for event in middle for token in event["tokens"]]
    completion = server.request(
        "POST",
        "/v1/completions",
        {"prompt": START["prompt"], **START["params"]},  # type: ignore[dict-item]
    )
    assert end["text"] == completion.json["choices"][0]["text"]
    view = server.request("POST", TRACE, {"run": start["run"], "step": 4})
    assert view.status == 200
    assert view.json["picked"]["id"] == tokens[4]["id"]
    assert view.headers["cache-control"] == "no-store"
    draws = server.request("POST", DRAWS, {"run": start["run"], "step": 4, "count": 200})
    assert draws.json["drawn"] == 200
    branch = events(server, {"parent": {"run": start["run"], "step": 2, "token": 402}, "params": {"max_tokens": 6}})
    assert branch[0]["given"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (GENERATE, {}, 400, "prompt"),
        (GENERATE, [], 400, "body"),
        (GENERATE, b"{", 400, "body"),
        (GENERATE, {"prompt": "a", "params": {"n": 3}}, 400, "n"),
        (GENERATE, {"prompt": "a", "params": {"stop": ["x"] * 2000}}, 400, "stop"),
        (GENERATE, {"prompt": "a", "params": {"top_p": -0.1}}, 400, "top_p"),
        (GENERATE, {"parent": {"run": "a", "step": 0, "token": 1}}, 404, None),
        (TRACE, {"run": "a", "step": 0}, 404, None),
        (TRACE, {"run": "a"}, 400, "step"),
        (DRAWS, {"run": "a", "step": 0, "count": 10**9}, 400, "count"),
    ],
)
def test_errors_name_the_field(server: Server, path: str, body: Any, status: int, param: str | None) -> None:
    answer = server.request("POST", path, body)
    assert answer.status == status, answer.data
    assert answer.json["error"]["param"] == param


def test_a_step_beyond_the_end_is_gone(server: Server) -> None:
    start, *_ = events(server, START)
    answer = server.request("POST", TRACE, {"run": start["run"], "step": 500})
    assert (answer.status, answer.json["error"]["code"]) == (410, "step_not_stored")


@pytest.mark.slow
def test_the_page_needs_no_key_but_everything_below_it_does(keyed: Server) -> None:
    for path in ("/inspector", "/inspector/page.js", "/inspector/inspector.css"):
        assert keyed.request("GET", path).status == 200
    assert keyed.request("GET", SETTINGS).status == 401
    assert keyed.request("GET", SETTINGS, headers=KEYS[0]).json["needs_key"] is True
    for path in (GENERATE, TRACE, DRAWS):
        assert keyed.request("POST", path, START).status == 401


def test_no_client_reads_the_runs_of_another(keyed: Server) -> None:
    start, *_ = events(keyed, START, KEYS[0])
    body = {"run": start["run"], "step": 1}
    assert keyed.request("POST", TRACE, body, KEYS[0]).status == 200
    for path in (TRACE, DRAWS):
        answer = keyed.request("POST", path, body, KEYS[1])
        assert (answer.status, answer.json["error"]["code"]) == (404, "run_not_found")
    parent = {"parent": {"run": start["run"], "step": 1, "token": 5}}
    assert keyed.request("POST", GENERATE, parent, KEYS[1]).status == 404


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}])
def test_pages_of_other_origins_cannot_reach_it(server: Server, headers: dict[str, str]) -> None:
    for method, path in (("GET", SETTINGS), ("GET", "/inspector"), ("POST", GENERATE)):
        assert server.request(method, path, START if method == "POST" else None, headers).status == 403


@pytest.mark.slow
def test_it_can_be_turned_off_and_is_off_with_a_watermark(tmp_path: Any) -> None:
    with Server("--max-inspector-bytes", "0") as off:
        assert off.request("GET", "/inspector").status == 404
        assert off.request("POST", GENERATE, START).status == 404
        assert off.request("GET", "/chat/api/settings").json["inspector"] is False
        assert off.request("GET", "/chat/inspector.css").status == 200
    key = tmp_path / "key"
    key.write_bytes(b"a secret key of some length")
    key.chmod(0o600)
    with Server("--watermark", "kgw", "--watermark-key", str(key)) as marked:
        for method, path in (("GET", SETTINGS), ("POST", GENERATE), ("POST", TRACE), ("POST", DRAWS)):
            answer = marked.request(method, path, START if method == "POST" else None)
            assert (answer.status, answer.json["error"]["code"]) == (403, "inspector_off")
        settings = marked.request("GET", "/chat/api/settings").json
        assert settings["inspector"] is False
        assert settings["stages"]


@pytest.mark.slow
def test_stored_logits_are_bounded() -> None:
    with Server("--max-inspector-bytes", str(5 * 4096 * 4)) as small:
        start, *middle, _ = events(small, START)
        count = sum(len(event["tokens"]) for event in middle)
        statuses = [small.request("POST", TRACE, {"run": start["run"], "step": i}).status for i in range(count)]
        assert statuses == [410] * (count - 5) + [200] * 5
