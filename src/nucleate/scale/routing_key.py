"""The routing key of a request: equal for requests with the same prefix, so that they reach the same replica."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

KEY_CHARACTERS = 1024
"""Characters of each part of a prompt that count, from its beginning."""
_LEADING_ROLES = ("system", "developer")
_INSTRUCTIONS = ("instructions", "system")  # of the Responses API; of Anthropic's and Ollama's
_SUBJECTS = ("messages", "input", "prompt")


def routing_key(body: bytes) -> str | None:
    """Return the routing key of a request body; None if it has no prompt.

    It is a hash of the beginning of the instructions (or system messages) and of the beginning of the first message
    after them, or of the prompt. So the turns of a conversation have one key, as have questions about one document;
    different conversations with the same system message have different ones, and spread over the replicas.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    parts = [json.dumps(part)[:KEY_CHARACTERS] for part in _parts(value)]
    return blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest() if parts else None


def _parts(body: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the parts of a prompt that make the key."""
    subject = next((body[name] for name in _SUBJECTS if body.get(name)), None)
    if subject is None:
        return
    yield from (body[name] for name in _INSTRUCTIONS if body.get(name))
    if isinstance(subject, list) and subject and isinstance(subject[0], dict):
        yield from _opening(subject)
    elif isinstance(subject, list) and subject and isinstance(subject[0], str | list):
        yield subject[0]  # the first of several prompts
    else:
        yield subject


def _opening(messages: Sequence[Any]) -> Iterator[Any]:
    """Yield the content of the system messages at the beginning, and of the first message after them."""
    for message in messages:
        if not isinstance(message, dict):
            return
        yield message.get("content")
        if message.get("role") not in _LEADING_ROLES:
            return
