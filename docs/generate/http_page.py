"""Generates the page of the HTTP API from the server's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import nucleate as nc
from nucleate.sampling_params import FIELDS
from nucleate.server.limits import ServerLimits
from nucleate.server.openapi_document import document

ABOUT = """\
# HTTP API

Generated from the OpenAPI document that a server returns at `/openapi.json`; `/docs` shows it as a page. The guides
[Server](../server.md) and [Other APIs](../protocols.md) explain the endpoints.
"""


def http_page() -> str:
    """Return the page."""
    made = document("model", nc.__version__, ServerLimits(), needs_key=True)
    parts = [ABOUT.rstrip(), made["info"]["description"].partition("\n\n")[2].strip(), "## Endpoints"]
    for path, operations in made["paths"].items():
        for method, operation in operations.items():
            parts += [f"### {method.upper()} {path}", f"{operation['summary']}.", _operation(operation)]
    parts.append("## Request bodies")
    parts.append("A field without a type takes any value.")
    for name, schema in made["components"]["schemas"].items():
        if not name.endswith("Error"):
            parts += [f"### {name}", *_body(schema)]
    return "\n\n".join(parts) + "\n"


def _operation(operation: Mapping[str, Any]) -> str:
    rows = []
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        rows.append(f"Request body: [{schema}](#{schema.lower()})")
    rows += [f"Parameter `{p['name']}`: {p['description']}" for p in operation.get("parameters", ())]
    content = " or ".join(f"`{kind}`" for kind in operation["responses"]["200"]["content"])
    errors = ", ".join(status for status in operation["responses"] if status != "200")
    rows += [f"Response: {content}", f"[Errors](errors.md#http): {errors}"]
    if operation.get("security") == []:
        rows.append("Needs no API key")
    return "\n".join(f"- {row}" for row in rows)


def _body(schema: Mapping[str, Any]) -> Iterator[str]:
    own = {name: field for name, field in schema["properties"].items() if name not in FIELDS}
    shared = [name for name in FIELDS if name in schema["properties"]]
    missing = [name for name in FIELDS if name not in schema["properties"]]
    if len(shared) > len(missing):
        without = f", except {', '.join(f'`{name}`' for name in missing)}" if missing else ""
        yield f"All [sampling parameters](parameters.md){without}, and:"
    else:
        own = {**{name: schema["properties"][name] for name in shared}, **own}
    lines = ["| field | type | description |", "|---|---|---|"]
    for name, field in sorted(own.items()):
        required = " (required)" if name in schema.get("required", ()) else ""
        about = " ".join(field.get("description", "").split()).replace("|", r"\|").replace("<", r"\<")
        lines.append(f"| `{name}`{required} | {_type(field)} | {about} |")
    yield "\n".join(lines)


def _type(field: Mapping[str, Any]) -> str:
    """Return the JSON types that a field accepts, without null, which counts as absent."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value not in (None, ""))
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(filter(None, map(_type, field["anyOf"]))))
    kinds = field.get("type", [])
    return " or ".join(kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null")
