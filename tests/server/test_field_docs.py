"""The pages about the server name every field of every endpoint."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from nucleate.sampling_params import FIELDS
from nucleate.server import messages_api, ollama_api, responses_api
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS
from nucleate.server.openai.messages import DETOKENIZE, TOKENIZE

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
    "/api/show": (ollama_api.SHOW, OTHERS),
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
