"""Narrow the OpenAPI document for schemathesis to what the bundled model supports, so that many requests succeed."""

from __future__ import annotations

from typing import Any

import schemathesis

MODEL, VOCABULARY = "nucleate-tiny", 4096
ROLES = ["system", "user", "assistant"]


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    schemas = raw_schema["components"]["schemas"]
    for name in (name for name in schemas if name.endswith("Request")):
        fields = schemas[name]["properties"]
        fields["model"] = {"enum": [MODEL, None]}
        if "stream_options" in fields:
            fields["stream_options"] = {"type": "null"}  # the other fields need stream, and most bodies do not set it
        if "order" in fields:
            fields["order"] = {"enum": [None, *fields["order"]["anyOf"][0]["enum"]]}
        if "messages" in fields:
            message = fields["messages"].get("items") or fields["messages"]["anyOf"][0]["items"]
            message.setdefault("properties", {})["role"] = {"enum": ROLES}
        for field in ("prompt", "tokens", "allowed_token_ids", "suppress_token_ids", "stop_token_ids"):
            bound(fields.get(field, {}))


def bound(schema: dict[str, Any]) -> None:
    """Token ids are those of the vocabulary, and a text has at least one token."""
    if schema.get("type") == "integer":
        schema["maximum"] = VOCABULARY - 1
    if schema.get("type") == "string":
        schema["minLength"] = 1
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        bound(inner)
