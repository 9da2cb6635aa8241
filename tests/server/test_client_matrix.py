"""The clients of docs/clients.md against a server process: features, examples, and the page itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_box import CLIENTS as PROGRAMS
from client_box import Box, ClientError, missing_node
from server_process import Server

sys.path.insert(0, str(PROGRAMS))
from matrix import CLIENTS, DEFAULT_URL, FLAGS, PAGE, Client

pytestmark = pytest.mark.slow
TASK = f"nucleate_story --include_path {PROGRAMS.parent / 'data' / 'lm_eval'}"
EACH = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name.replace(" ", "_"))


@pytest.fixture(scope="module")
def scripted() -> Iterator[Server]:
    with Server(*FLAGS) as running:
        yield running


@EACH
def test_a_client_has_the_features_of_the_page(scripted: Server, tmp_path: Path, client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    report = client.report(scripted.url, Box(tmp_path))
    failures = {name: result for name, result in report["results"].items() if result["status"] == "failed"}
    assert not failures
    assert sum(result["status"] == "passed" for result in report["results"].values()) >= 4
    page = PAGE.read_text("utf-8")
    update = "docs/clients.md is out of date: python tests/server/clients/matrix.py"
    assert client.row(report) in page, update
    assert client.section(report) in page, update


@EACH
def test_the_example_of_a_client_runs(server: Server, tmp_path: Path, client: Client) -> None:
    if client.missing:
        pytest.skip(client.missing)
    code = (PROGRAMS / "snippets" / client.snippet).read_text("utf-8").replace(DEFAULT_URL, server.url)
    if client.snippet.endswith(".mjs"):
        command, folder = ("node", "--input-type=module", "--eval", code), PROGRAMS / "js"
    elif client.snippet.endswith(".sh"):
        command, folder = ("sh", "-c", code.replace("lambada_openai", TASK)), PROGRAMS.parent / "data" / "lm_eval"
    else:
        command, folder = (sys.executable, "-c", code), tmp_path
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_DATASETS_OFFLINE": "1"}
    assert len(Box(tmp_path).run_program(*command, cwd=folder, **variables)) > 8


def test_without_the_script_no_call_is_made_by_choice(server: Server, tmp_path: Path) -> None:
    """The checks can fail: the bundled model tells a story."""
    client = CLIENTS[0]
    if client.missing:
        pytest.skip(client.missing)
    results = client.report(server.url, Box(tmp_path))["results"]
    failed = {name for name, result in results.items() if result["status"] == "failed"}
    assert failed == {"auto", "parallel", "streamed call", "loop", "reasoning", "responses"}


def test_the_sandbox_of_node_has_no_network(tmp_path: Path) -> None:
    if reason := missing_node():
        pytest.skip(reason)
    code = "await fetch('http://example.org').catch(() => {})"
    with pytest.raises(ClientError, match=r"it tried to use the network:\s+connect example\.org"):
        Box(tmp_path).run_program("node", "--input-type=module", "--eval", code)


def test_no_address_of_a_registry_is_in_the_lock_file() -> None:
    assert '"resolved"' not in (PROGRAMS / "js" / "package-lock.json").read_text("utf-8")
