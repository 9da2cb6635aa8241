"""The commands in docs/server.md, run against a server."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from server_process import Server

from nucleate.engine.stats import EngineStats
from nucleate.server.limits import ServerLimits
from nucleate.server.metrics import VLLM_ALIASES, Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
ADDRESS = "http://127.0.0.1:8000"


def commands() -> list[tuple[str, Any]]:
    """The path and the body of every call of curl."""
    words, found = shlex.split(SHELL.replace("\\\n", " "), comments=True), []
    for place, word in enumerate(words):
        if word == "curl":
            assert words[place + 1].startswith(ADDRESS)
            assert words[place + 2 : place + 5] == ["-H", "Content-Type: application/json", "-d"]
            found.append((words[place + 1].removeprefix(ADDRESS), json.loads(words[place + 5])))
    return found


def test_there_are_examples_of_every_structured_output_field() -> None:
    said = {name for _, body in commands() for name in body}
    assert {"response_format", "structured_outputs", "min_p", "stream"} <= said
    assert len(commands()) >= 7


@pytest.mark.parametrize(("path", "body"), commands(), ids=lambda value: str(value)[:60])
def test_an_example_is_answered(server: Server, path: str, body: Any) -> None:
    answer = server.request("POST", path, {**body, "stream": False})
    assert answer.status == 200, answer.data
    for choice in answer.json["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        form = body.get("response_format", {}).get("json_schema", {})
        form = form.get("schema") or body.get("structured_outputs", {}).get("json_schema")
        if form is not None:
            assert choice["finish_reason"] == "stop"
            assert isinstance(json.loads(text), dict | list | str | int)
            assert ("validation" in choice) == ("uniqueItems" in form or "oneOf" in form)
        outputs = body.get("structured_outputs", {})
        assert "choice" not in outputs or text in outputs["choice"]
        assert "regex" not in outputs or re.fullmatch(outputs["regex"], text)
    if body.get("stream"):
        assert server.request("POST", path, body).data.endswith(b"data: [DONE]\n\n")


def test_what_the_page_says_of_validation_is_so(server: Server) -> None:
    body = next(body for _, body in commands() if "uniqueItems" in str(body))
    [choice] = server.request("POST", "/v1/completions", body).json["choices"]
    assert choice["validation"]["ignored"] == ["uniqueItems"]
    numbers = json.loads(choice["text"])
    assert bool(choice["validation"]["errors"]) == (len(set(numbers)) < 3)


def test_the_page_lists_all_metrics_and_limits() -> None:
    stats = EngineStats(*(0,) * 14)
    names = {family.name for family in Metrics("x", lambda: stats).collect()}
    written = {name.removesuffix("_total") for name in re.findall(r"`(nucleate_\w+)`", PAGE)}
    assert written == {name for name in names if name.startswith("nucleate_")}
    aliases = {name.removesuffix("_total") for name in re.findall(r"`(nucleate_\w+)` \*", PAGE)}
    assert aliases == VLLM_ALIASES
    table = PAGE.partition("## Limits")[2].partition("## ")[0]
    flags = {name.replace("-", "_") for name in re.findall(r"^\| `--([\w-]+)`", table, re.MULTILINE)}
    assert flags == ServerLimits.PARAMETERS.keys()
