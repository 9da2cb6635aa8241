"""Translates request bodies of Ollama's ``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.chat_api import (
    ENGINE_FIELDS,
    WITHOUT_HINT,
    ChatAPI,
    Translation,
    present_fields,
    read_text,
    renames,
    translator,
)
from nucleate.server.ollama.ollama_encoder import ChatLines, GenerateLines
from nucleate.server.ollama.ollama_messages import check_no_images, read_messages
from nucleate.server.ollama.ollama_options import RENAMED, option_names, read_format, read_options, read_think
from nucleate.server.openai.endpoints import TEXT
from nucleate.server.openai.fields import read_bool

CHAT_URL, GENERATE_URL = "/api/chat", "/api/generate"
_COMMON = frozenset({"model", "stream", "options", "format", "think", "logprobs", "top_logprobs", *ENGINE_FIELDS})
IGNORED = frozenset({"keep_alive", "truncate", "shift"})
"""Fields for loading models, and for prompts that do not fit the context, which are errors here."""
CHAT_FIELDS = _COMMON | IGNORED | {"messages", "tools"}
UNSUPPORTED = ("template", "context", "width", "height", "steps")
"""Unsupported fields of ``/api/generate``; empty values are accepted."""
GENERATE_FIELDS = _COMMON | IGNORED | {"prompt", "suffix", "system", "raw", "images", *UNSUPPORTED}


@translator
def translate_chat(body: Any) -> Translation:
    """Translate a body of ``/api/chat``. Raises ParameterError."""
    given = present_fields(body, CHAT_FIELDS)
    made = {**_common(given), **_chat(given), "messages": read_messages(given.get("messages"))}
    if made["messages"][-1]["role"] == "assistant":  # the response continues it
        made["continue_final_message"] = True
    if "tools" in given:
        made["tools"] = given["tools"]
    return Translation(made, ChatLines)


@translator
def translate_generate(body: Any) -> Translation:
    """Translate a body of ``/api/generate``: a chat, or with ``raw`` or ``suffix`` a completion.

    Raises ParameterError.
    """
    given = present_fields(body, GENERATE_FIELDS)
    for name in UNSUPPORTED:
        if given.get(name):
            raise ParameterError(name, f"{name} is not supported, got {shown(given[name])}")
    check_no_images(given, "", "images")
    if not given.get("prompt"):
        raise ParameterError("prompt", "prompt is missing; this server loads no models on request")
    prompt, system = read_text(given, "prompt"), read_text(given, "system", default="")
    suffix = read_text(given, "suffix", default="")
    made = _common(given)
    if not read_bool(given, "raw") and not suffix:
        messages = [{"role": "system", "content": system}] if system else []
        made["messages"] = [*messages, {"role": "user", "content": prompt}]
        return Translation({**made, **_chat(given)}, GenerateLines)
    if system or given.get("think"):
        name = "system" if system else "think"
        raise ParameterError(name, f"{name} cannot be combined with raw or suffix, which have no chat template")
    made |= {"prompt": prompt, "suffix": suffix or None}
    if read_bool(given, "logprobs"):
        made["logprobs"] = given.get("top_logprobs", 0)
    return Translation(made, GenerateLines, TEXT.url)


def _common(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {"stream": given.get("stream", True), **read_options(given.get("options", {}))}
    made |= {name: given[name] for name in ENGINE_FIELDS if name in given}
    model = given.get("model")
    made["model"] = model.removesuffix(":latest") if isinstance(model, str) else model
    return made | read_format(given.get("format", ""))


def _chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat only."""
    made = {name: given[name] for name in ("logprobs", "top_logprobs") if name in given}
    return made | (read_think(given["think"]) if "think" in given else {})


_RENAMES = renames(
    (r"response_format\.json_schema(\.schema)?", "format"),
    (r"response_format", "format"),
    (r"reasoning_effort", "think"),
    *((own, name) for name, own in RENAMED.items()),
)
CHAT_API = ChatAPI(CHAT_URL, translate_chat, (WITHOUT_HINT, *_RENAMES), CHAT_FIELDS, option_names())
GENERATE_API = ChatAPI(
    GENERATE_URL,
    translate_generate,
    (WITHOUT_HINT, *_RENAMES, *renames((r"messages", "prompt"))),
    GENERATE_FIELDS,
    option_names(),
)
