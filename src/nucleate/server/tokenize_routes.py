"""The endpoints ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.tokenize import DETOKENIZE, TOKENIZE, read_detokenize, read_tokenize
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service


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
