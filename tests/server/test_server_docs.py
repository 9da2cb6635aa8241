"""The pages about the server: their commands run, and they name every field, metric and limit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from server_process import Server

from nucleate.outputs import EngineStats
from nucleate.sampling_params import FIELDS
from nucleate.server import messages_api, ollama_api, ollama_routes, responses_api
from nucleate.server.limits import ServerLimits
from nucleate.server.metrics import VLLM_ALIASES, Metrics
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS
from nucleate.server.openai.messages import DETOKENIZE, TOKENIZE

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
ADDRESS = "http://127.0.0.1:8000"


def commands() -> list[tuple[str, Any]]:
    """The path and the body of every curl command."""
    words, found = shlex.split(SHELL.replace("\\\n", " "), comments=True), []
    for index, word in enumerate(words):
        if word == "curl":
            assert words[index + 1].startswith(ADDRESS)
            assert words[index + 2 : index + 5] == ["-H", "Content-Type: application/json", "-d"]
            found.append((words[index + 1].removeprefix(ADDRESS), json.loads(words[index + 5])))
    return found


def test_every_structured_output_field_has_an_example() -> None:
    fields = {name for _, body in commands() for name in body}
    assert {"response_format", "structured_outputs", "min_p", "stream"} <= fields
    assert len(commands()) >= 7


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize(("path", "body"), commands(), ids=lambda value: str(value)[:60])
def test_every_example_is_accepted(server: Server, path: str, body: Any) -> None:
    response = server.request("POST", path, {**body, "stream": False})
    assert response.status == 200, response.data
    for choice in response.json["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        schema = body.get("response_format", {}).get("json_schema", {})
        schema = schema.get("schema") or body.get("structured_outputs", {}).get("json_schema")
        if schema is not None:
            assert choice["finish_reason"] == "stop"
            assert isinstance(json.loads(text), dict | list | str | int)
            assert ("validation" in choice) == ("uniqueItems" in schema)
        outputs = body.get("structured_outputs", {})
        assert "choice" not in outputs or text in outputs["choice"]
        assert "regex" not in outputs or re.fullmatch(outputs["regex"], text)
    if body.get("stream"):
        assert server.request("POST", path, body).data.endswith(b"data: [DONE]\n\n")


def test_the_documented_validation_results_are_correct(server: Server) -> None:
    body = next(body for _, body in commands() if "uniqueItems" in str(body))
    [choice] = server.request("POST", "/v1/completions", body).json["choices"]
    assert choice["validation"]["ignored"] == ["uniqueItems"]
    numbers = json.loads(choice["text"])
    assert bool(choice["validation"]["errors"]) == (len(set(numbers)) < 3)


def test_the_page_lists_all_metrics_and_limits() -> None:
    stats = EngineStats(*(0,) * 14)
    names = {family.name for family in Metrics("x", lambda: stats).collect()}
    documented = {name.removesuffix("_total") for name in re.findall(r"`(nucleate_\w+)`", PAGE)}
    assert documented == {name for name in names if name.startswith("nucleate_")}
    aliases = {name.removesuffix("_total") for name in re.findall(r"`(nucleate_\w+)` \*", PAGE)}
    assert aliases == VLLM_ALIASES
    table = PAGE.partition("## Limits")[2].partition("## ")[0]
    flags = {name.replace("-", "_") for name in re.findall(r"^\| `--([\w-]+)`", table, re.MULTILINE)}
    assert flags == ServerLimits.PARAMETERS.keys()


DOCS = Path(__file__).parents[2] / "docs"
OPENAI, OTHERS = ("server", "tools", "batch"), ("protocols",)
FIELDS_OF: dict[str, tuple[Collection[str], tuple[str, ...]]] = {
    COMPLETIONS.url: (COMPLETIONS.field_names, OPENAI),
    CHAT.url: (CHAT.field_names, OPENAI),
    "/tokenize": (TOKENIZE, OPENAI),
    "/detokenize": (DETOKENIZE, OPENAI),
    "/v1/responses": (responses_api.RESPONSE_FIELDS, OTHERS),
    "/v1/messages": (messages_api.MESSAGE_FIELDS, OTHERS),
    "/v1/messages/count_tokens": (messages_api.COUNT_FIELDS, OTHERS),
    "/api/chat": (ollama_api.CHAT_FIELDS, OTHERS),
    "/api/generate": (ollama_api.GENERATE_FIELDS, OTHERS),
    "options of /api/chat": (ollama_api.OPTIONS, OTHERS),
    "/api/show": (ollama_routes.SHOW, OTHERS),
}


def documented(pages: Collection[str]) -> set[str]:
    """The words in code of these pages, without the examples."""
    texts = [re.sub(r"```.*?```", "", (DOCS / f"{page}.md").read_text("utf-8"), flags=re.DOTALL) for page in pages]
    return {word for text in texts for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("endpoint", FIELDS_OF)
def test_every_field_is_documented(endpoint: str) -> None:
    fields, pages = FIELDS_OF[endpoint]
    assert {*fields} - {*FIELDS} - documented(pages) == set()


def test_every_sampling_parameter_is_documented() -> None:
    assert {*FIELDS} - documented(("stages", "semantics", "structured", "tools", "server")) == set()
