"""The notebook widget, without a browser: its document, and its replies to the messages of a front end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import nucleate as nc

pytest.importorskip("anywidget", reason="needs the extra 'notebook'")

from nucleate.inspector.widget import InspectorWidget

PROMPT, PARAMS = "Once upon a time", {"temperature": 0.8, "top_p": 0.9, "seed": 2**63 - 1, "max_tokens": 6}


@pytest.fixture(scope="module")
def widget(llm: nc.LLM) -> Iterator[InspectorWidget]:
    made = nc.inspect(llm, PROMPT, **PARAMS)
    yield made
    made.close()


@pytest.fixture
def replies(widget: InspectorWidget, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the widget sends to the front end."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(widget, "send", sent.append)
    return sent


def ask(widget: InspectorWidget, path: str, body: Any = None) -> None:
    """Deliver a message as the kernel does."""
    widget._handle_custom_msg({"id": "a-1", "path": path, "body": json.dumps(body)}, [])


def test_the_widget_holds_the_first_answer(widget: InspectorWidget, llm: nc.LLM) -> None:
    saved = json.loads(widget.document)
    assert (saved["format"], saved["version"], saved["branches"]) == ("nucleate-trace", 1, [])
    assert saved["settings"]["example"]
    run = saved["run"]
    assert run["end"]["text"] == llm.generate(PROMPT, **PARAMS)[0].outputs[0].text
    assert [token["step"] for token in run["tokens"]] == list(range(6))
    assert run["start"]["seed"] == 2**63 - 1
    assert run["input"] == {"prompt": PROMPT, "messages": None}  # what the page needs to generate again
    assert saved["traces"]["0"]["sampled"]["id"] == run["tokens"][0]["id"]


def test_the_module_is_what_anywidget_needs(widget: InspectorWidget) -> None:
    assert widget._esm.rstrip().endswith("export default { render };")
    assert widget._esm.count("export ") == 1
    assert ".nci-" in widget._css


def test_a_step_is_traced_under_other_settings(widget: InspectorWidget, replies: list[dict[str, Any]]) -> None:
    run = json.loads(widget.document)["run"]["start"]["run"]
    ask(widget, "trace", {"run": run, "step": 2, "params": {"top_k": 3, "seed": 5}})
    [reply] = replies
    view = json.loads(reply["result"])
    assert reply["id"] == "a-1"
    assert view["step"] == 2
    assert [stage["kept"] for stage in view["stages"] if stage["name"] == "top_k"] == [3]


def test_a_generation_streams_its_events(widget: InspectorWidget, replies: list[dict[str, Any]]) -> None:
    ask(widget, "generate", {"prompt": "The cat", "params": {"seed": 1, "max_tokens": 4}})
    events = [json.loads(reply["event"]) for reply in replies[:-1]]
    assert [events[0]["type"], events[-1]["type"]] == ["start", "end"]
    assert sum(len(event["tokens"]) for event in events if event["type"] == "tokens") == 4
    assert replies[-1] == {"id": "a-1", "result": "null"}


def test_tokens_are_drawn(widget: InspectorWidget, replies: list[dict[str, Any]]) -> None:
    run = json.loads(widget.document)["run"]["start"]["run"]
    ask(widget, "draws", {"run": run, "step": 0, "count": 50})
    found = json.loads(replies[0]["result"])
    assert sum(token["count"] for token in found["tokens"]) + found["rest"]["count"] == found["drawn"] == 50


def test_the_template_of_a_saved_page_is_sent(widget: InspectorWidget, replies: list[dict[str, Any]]) -> None:
    ask(widget, "template")
    assert json.loads(replies[0]["result"]).startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("trace", {"run": "no-such-run", "step": 0}, {"code": "run_not_found", "param": None}),
        ("generate", {"prompt": "A", "params": {"temperature": -1}}, {"code": None, "param": "temperature"}),
        ("generate", {"prompt": 5}, {"code": None, "param": "prompt"}),
        ("delete", None, {"code": None, "param": "path"}),
    ],
)
def test_an_error_is_sent_with_its_reason(
    path: str, body: Any, error: dict[str, Any], widget: InspectorWidget, replies: list[dict[str, Any]]
) -> None:
    ask(widget, path, body)
    [reply] = replies
    assert reply["error"].pop("message")
    assert reply["error"] == error


def test_a_defect_is_shown_and_raised(
    widget: InspectorWidget, replies: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widget._session, "trace", lambda body: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        widget._answer(widget, {"id": "a-1", "path": "trace", "body": "{}"}, [])
    assert replies[0]["error"]["message"] == "ZeroDivisionError: division by zero"


def test_parameters_are_checked(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="give either params or top_k, not both"):
        nc.inspect(llm, PROMPT, nc.SamplingParams(), top_k=3)
    with pytest.raises(nc.ParameterError, match="params must be a SamplingParams, got dict"):
        nc.inspect(llm, PROMPT, {"top_k": 3})  # type: ignore[arg-type]
    with pytest.raises(nc.ParameterError, match="temperature"):
        nc.inspect(llm, PROMPT, temperature=-1)
