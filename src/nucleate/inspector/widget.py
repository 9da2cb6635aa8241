"""The inspector as a notebook widget: the modules of the page, with the messages of anywidget in place of HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, final

import anywidget
import traitlets

from nucleate.inspector.page import STYLE, asset, bundle, offline_page
from nucleate.inspector.session import InspectorSession
from nucleate.inspector.store import InspectorError
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError

PATHS: Final = ("generate", "trace", "draws", "template")


@final
class InspectorWidget(anywidget.AnyWidget):
    """The inspector of a session. Its first answer is part of the widget, so that saved notebooks show it.

    A message of the front end is ``{"id": ..., "path": one of PATHS, "body": JSON text}``, and its replies are
    ``{"id": ..., "event": JSON text}`` for each event of ``generate``, then ``{"id": ..., "result": JSON text}`` or
    ``{"id": ..., "error": {...}}``. JSON is sent as text because seeds have more digits than JavaScript's numbers.
    """

    _esm = f"{bundle('widget.js')}\nexport default {{ render }};\n"
    _css = asset(STYLE)

    document = traitlets.Unicode().tag(sync=True)
    """The saved document of the first answer, as JSON text."""

    def __init__(self, session: InspectorSession, body: Mapping[str, Any]) -> None:
        self._session = session
        super().__init__(document=_to_json(_document(session, body)))
        self.on_msg(self._answer)

    def _answer(self, _: object, message: Any, __: object) -> None:
        """Answer one message of the front end."""
        number = message.get("id")
        try:
            result = None
            for result in self._replies(message.get("path"), json.loads(message.get("body") or "null")):
                if message["path"] == "generate":
                    self.send({"id": number, "event": _to_json(result)})
            self.send({"id": number, "result": "null" if message["path"] == "generate" else _to_json(result)})
        except (InspectorError, ParameterError, ModelError) as error:
            self.send({"id": number, "error": _error(error)})
        except Exception as error:
            self.send({"id": number, "error": _error(error)})
            raise  # the front end shows it, and so does the notebook's log

    def _replies(self, path: Any, body: Any) -> Iterable[Any]:
        match path:
            case "generate":
                return self._session.generate(body)
            case "trace":
                return [self._session.trace(body)]
            case "draws":
                return [self._session.draws(body)]
            case "template":
                return [offline_page()]
        raise ParameterError("path", f"path must be one of {', '.join(PATHS)}, got {path!r:.60}")


def _document(session: InspectorSession, body: Mapping[str, Any]) -> dict[str, Any]:
    """Generate, and return the saved document of the answer with the trace of its first token."""
    source = {"prompt": body.get("prompt", ""), "messages": body.get("messages")}
    run: dict[str, Any] = {"start": None, "tokens": [], "end": None, "input": source}
    for event in session.generate(dict(body)):
        kind = event["type"]
        if kind == "tokens":
            run["tokens"] += event["tokens"]
        else:
            run[kind] = event
    traces, settings = {}, session.settings()
    if run["tokens"] and run["tokens"][0]["origin"] == "sampled":
        traces["0"] = session.trace({"run": run["start"]["run"], "step": 0})
    return {
        "format": "nucleate-trace",
        "version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "nucleate": settings["nucleate"],
        "settings": settings,
        "run": run,
        "traces": traces,
        "branches": [],
    }


def _error(error: Exception) -> dict[str, Any]:
    """The fields of an error of the HTTP API."""
    code = error.code if isinstance(error, InspectorError) else None
    param = error.field if isinstance(error, ParameterError) else None
    known = isinstance(error, (InspectorError, ParameterError, ModelError))
    return {"message": str(error) if known else f"{type(error).__name__}: {error}", "code": code, "param": param}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
