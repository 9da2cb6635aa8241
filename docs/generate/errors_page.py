"""Generates the page of errors: exceptions, HTTP statuses and exit statuses, from the code."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping

import nucleate as nc
from generate import ROOT
from nucleate.cli import main
from nucleate.server import http_errors
from nucleate.server.inspector_routes import STATUS
from nucleate.server.limits import ServerLimits
from nucleate.server.openapi_document import document

HTTP = """
## HTTP

A failed request has a body in the format of its API. OpenAI's has the members `message`, `type`, `param` (the field at
fault, or null) and `code` (or null):

```json
{example}
```
"""
SERVER = ROOT / "src" / "nucleate" / "server"
CODE = re.compile(r'code="(\w+)"|unavailable\(".+?", "(\w+)"')
"""An error code in a source of the server."""
CODES: Mapping[str, tuple[str, str]] = {
    "body_too_large": ("413", "the request body exceeds `--max-request-body-bytes`"),
    "context_length_exceeded": ("400", "the prompt, or the prompt with `max_tokens`, exceeds the context length"),
    "engine_stopped": ("503", "the engine has stopped"),
    "forbidden_host": ("403", "the Host or Origin header is not allowed"),
    "generation_failed": ("500", "a sequence ended with an error of the model"),
    "inspector_busy": ("503", "the inspector is at capacity; retry after `Retry-After` seconds"),
    "inspector_off": ("403", "the inspector is off, because the server watermarks its outputs"),
    "invalid_api_key": ("401", "the API key is missing or invalid"),
    "model_not_found": ("404", "the request names a model that the server does not have"),
    "no_chat_template": ("400", "the model has no chat template, and the server was started without `--chat-template`"),
    "pull_failed": ("502", "the download of a model from the hub failed"),
    "pull_in_progress": ("503", "another model is being downloaded; retry after `Retry-After` seconds"),
    "pull_not_allowed": ("403", "the server was started without `--allow-pull`"),
    "queue_full": ("503", "too many sequences are queued; retry after `Retry-After` seconds"),
    "run_not_found": ("404", "the inspector does not have this run, or has it for another client"),
    "shutting_down": ("503", "the server shuts down"),
    "step_not_stored": ("410", "the inspector no longer has the logits of this step"),
    "timeout": ("408, 504", "the request body (408) or the response (504) took too long"),
    "too_many_requests": ("503", "too many requests are in flight; retry after `Retry-After` seconds"),
}
"""Status and meaning of each error code."""

ABOUT = """\
# Errors

Nothing is silently dropped or clamped: a parameter that is unknown or not allowed is an error that names the field.

## Exceptions
"""


def errors_page() -> str:
    """Return the page."""
    parts = [ABOUT.rstrip()]
    for name in nc.__all__:
        thing = getattr(nc, name)
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            base = thing.__mro__[1].__name__
            about = " ".join((inspect.getdoc(thing) or "").split()).replace("``", "`")
            parts.append(f"[`nc.{name}`](api/errors.md) (a `{base}`)\n: {about}")
    made = document("model", nc.__version__, ServerLimits(), needs_key=True)
    responses = made["components"]["responses"]
    rows = [f"| {name[5:]} | {one['description']} |" for name, one in responses.items() if name.startswith("Error")]
    parts += [
        HTTP.strip().format(example=_example()),
        "\n".join(["| status | meaning |", "|---|---|", *rows]),
        "Errors of the server have the type `server_error`, the others `invalid_request_error`. The codes are:",
        _codes(),
        "The metric `nucleate_request_errors_total` counts errors of the server by kind:",
        _kinds(),
        "## Exit status",
        _exit_status(),
    ]
    return "\n\n".join(parts) + "\n"


def _example() -> str:
    """Return the body of the response to a request with an invalid field."""
    try:
        nc.SamplingParams(top_p=2)
    except nc.ParameterError as error:
        found = http_errors.http_error(error)
    return json.dumps(found and found.body, indent=1)


def _codes() -> str:
    """Return the table of codes. Raises ValueError if it lacks a code of the server."""
    text = "".join(path.read_text("utf-8") for path in SERVER.rglob("*.py"))
    found = {"".join(codes) for codes in CODE.findall(text)} | {*STATUS}
    if found != {*CODES}:
        odd = ", ".join(sorted(found ^ {*CODES}))
        raise ValueError(f"CODES in docs/generate/errors_page.py and the codes of the server differ: {odd}")
    rows = [f"| `{code}` | {status} | {about} |" for code, (status, about) in sorted(CODES.items())]
    return "\n".join(["| code | status | meaning |", "|---|---|---|", *rows])


def _kinds() -> str:
    """Return the list of kinds, which is in the docstring of the type ``ErrorKind``."""
    source = inspect.getsource(http_errors)
    text = re.search(r'"""Kinds of server errors\.\s+(.+?)"""', source, re.DOTALL)
    if text is None:
        raise ValueError("the kinds of errors are not described")
    kinds = re.findall(r"(\w+): ([^.]+)\.", " ".join(text[1].split()))
    return "\n".join(f"- `{kind}`: {about}" for kind, about in kinds)


def _exit_status() -> str:
    """Return the list of exit statuses, which is in the docstring of ``nucleate.cli.main``."""
    text = " ".join((main.__doc__ or "").split()).partition("Exit status: ")[2].partition(". ")[0]
    return "\n".join(f"- `{status}`: {about}" for status, _, about in (one.partition(" ") for one in text.split("; ")))
