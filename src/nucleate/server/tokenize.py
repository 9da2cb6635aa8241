"""The endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nucleate.chat.chat_format import NO_TOOLS
from nucleate.chat.tools import ToolUse
from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.fields import (
    are_token_ids,
    invalid_value,
    read_bool,
    read_model,
    reject_deep_nesting,
    unknown_field,
)
from nucleate.server.openai.messages import TEMPLATE_FIELDS, read_messages, read_template_options
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service
from nucleate.tokenization.chat_template import ChatTemplateOptions

TOKENIZE = frozenset({"model", "prompt", "messages", "return_token_strs", "tools", *TEMPLATE_FIELDS})
"""The fields of a body of ``/tokenize``."""
DETOKENIZE = frozenset({"model", "tokens"})
"""The fields of a body of ``/detokenize``."""


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a chat to tokenize: one of the two is None."""

    prompt: str | None
    messages: Sequence[Mapping[str, Any]] | None
    template_options: ChatTemplateOptions  #: for a text, only add_special_tokens matters
    return_token_strs: bool = False  #: also return the tokens as strings
    model: str | None = None
    tool_use: ToolUse = NO_TOOLS


@dataclass(frozen=True)
class DetokenizeRequest:
    """Token ids to convert to text; none is negative."""

    tokens: tuple[int, ...]
    model: str | None = None


@reject_deep_nesting
def read_tokenize(body: Any) -> TokenizeRequest:
    """Parse a body of ``/tokenize``. Raises ParameterError, which names the field."""
    given = _present_fields(body, TOKENIZE)
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise ParameterError("prompt", "prompt or messages must be set, but not both")
    if prompt is not None and not isinstance(prompt, str):
        raise invalid_value("prompt", "a string", prompt)
    if prompt is not None:
        for name in (*TEMPLATE_FIELDS, "tools"):
            if name in given and name != "add_special_tokens":
                raise ParameterError(name, f"{name} needs messages")
        given = {"add_special_tokens": True, **given}
    return TokenizeRequest(
        prompt,
        None if messages is None else read_messages(messages),
        read_template_options(given),
        read_bool(given, "return_token_strs"),
        read_model(given),
        ToolUse.read(given["tools"]) if "tools" in given else NO_TOOLS,
    )


@reject_deep_nesting
def read_detokenize(body: Any) -> DetokenizeRequest:
    """Parse a body of ``/detokenize``. Raises ParameterError, which names the field."""
    given = _present_fields(body, DETOKENIZE)
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not are_token_ids(tokens) or (tokens and min(tokens) < 0):
        raise invalid_value("tokens", "a list of token ids", tokens)
    return DetokenizeRequest(tuple(tokens), read_model(given))


def _present_fields(body: Any, known: frozenset[str]) -> Mapping[str, Any]:
    """Return the fields that are not null."""
    if not isinstance(body, Mapping):
        raise invalid_value("body", "a JSON object", body)
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name not in known:
            raise unknown_field(name, known)
    return given


class TokenizeRoutes:
    """The handlers of these endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, context: RequestContext) -> None:
        await self._reply(context, self._tokenize)

    async def detokenize(self, context: RequestContext) -> None:
        await self._reply(context, self._detokenize)

    async def info(self, context: RequestContext) -> None:
        tokenizer = self._service.llm.tokenizer
        info = {
            "tokenizer_class": tokenizer.config.get("tokenizer_class") or "PreTrainedTokenizerFast",
            "vocab_size": self._service.vocab_size,
            "max_model_len": self._service.max_model_len,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "bos_token_id": tokenizer.bos_token_id,
            "chat_template": tokenizer.chat_template,
        }
        await context.reply(200, {**tokenizer.config, **tokenizer.special_tokens, **info})

    async def _reply(self, context: RequestContext, convert: Callable[[RequestContext, bytes], dict[str, Any]]) -> None:
        with self._service.request_slot():
            data = await context.body(self._service.limits.max_request_body_bytes)
            await context.reply(200, await self._service.run_in_thread(partial(convert, context, data)))

    def _tokenize(self, context: RequestContext, data: bytes) -> dict[str, Any]:
        service, tokenizer = self._service, self._service.llm.tokenizer
        body, ignored = service.decode_fields(data, TOKENIZE)
        context.report_ignored_fields(ignored)
        request = read_tokenize(body)
        service.check_model(request.model)
        if request.messages is not None:
            ids = service.llm.encode_chat(request.messages, request.template_options, request.tool_use)
        else:
            ids = tokenizer.encode(request.prompt or "", request.template_options.add_special_tokens)
        strings = [tokenizer.pieces.tokens[token] for token in ids] if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": strings}

    def _detokenize(self, context: RequestContext, data: bytes) -> dict[str, Any]:
        service = self._service
        body, ignored = service.decode_fields(data, DETOKENIZE)
        context.report_ignored_fields(ignored)
        request = read_detokenize(body)
        service.check_model(request.model)
        try:
            return {"prompt": service.llm.tokenizer.decode(request.tokens, skip_special_tokens=False)}
        except ValueError as error:
            raise ParameterError("tokens", str(error)) from None
