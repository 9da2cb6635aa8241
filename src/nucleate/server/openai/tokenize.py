"""Bodies that ask for token ids, or for the text of some, as vLLM has them. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import are_ids, guarded, read_model, read_switch, unknown_field, wrong
from nucleate.server.openai.messages import read_messages, read_template

TOKENIZE = frozenset(
    {"model", "prompt", "messages", "add_special_tokens", "return_token_strs", "chat_template_kwargs"},
)
"""The fields of a body of ``/tokenize``."""
DETOKENIZE = frozenset({"model", "tokens"})
"""Those of ``/detokenize``."""


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a conversation whose token ids are wanted: one of the two is None."""

    prompt: str | None
    messages: Sequence[Mapping[str, str]] | None
    add_special_tokens: bool  #: what the tokenizer puts around a text; a chat template has it already
    return_token_strs: bool = False  #: whether the text of each token is wanted too
    model: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  #: what the chat template is told besides the messages


@dataclass(frozen=True)
class DetokenizeRequest:
    """Token ids whose text is wanted; they are not negative."""

    tokens: tuple[int, ...]
    model: str | None = None


@guarded
def read_tokenize(body: Any) -> TokenizeRequest:
    """What a body of ``/tokenize`` asks for. Raises ParameterError with the name of the field at fault."""
    given = _given(body, TOKENIZE)
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise ParameterError("prompt", "prompt or messages must be given, and not both")
    if prompt is not None and not isinstance(prompt, str):
        raise wrong("prompt", "a string", prompt)
    if prompt is not None and "chat_template_kwargs" in given:
        raise ParameterError("chat_template_kwargs", "chat_template_kwargs needs messages")
    return TokenizeRequest(
        prompt,
        None if messages is None else read_messages(messages),
        read_switch(given, "add_special_tokens", prompt is not None),
        read_switch(given, "return_token_strs"),
        read_model(given),
        read_template(given.get("chat_template_kwargs", {})),
    )


@guarded
def read_detokenize(body: Any) -> DetokenizeRequest:
    """What a body of ``/detokenize`` asks for. Raises ParameterError with the name of the field at fault."""
    given = _given(body, DETOKENIZE)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not are_ids(tokens) or (tokens and min(tokens) < 0):
        raise wrong("tokens", "a list of token ids", tokens)
    return DetokenizeRequest(tuple(tokens), read_model(given))


def _given(body: Any, known: frozenset[str]) -> Mapping[str, Any]:
    """The fields that say something."""
    if not isinstance(body, Mapping):
        raise wrong("body", "a JSON object", body)
    for name in body:
        if name not in known:
            raise unknown_field(name, known)
    return {name: value for name, value in body.items() if value is not None}
