"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``: text to token ids and back, as the model has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nucleate.parameters.parameter import ParameterError
from nucleate.server.openai.tokenize import read_detokenize, read_tokenize
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service


class TokenizeRoutes:
    """The handlers of these paths."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, exchange: RequestContext) -> None:
        await self._answer(exchange, self._tokens)

    async def detokenize(self, exchange: RequestContext) -> None:
        await self._answer(exchange, self._text)

    async def info(self, exchange: RequestContext) -> None:
        tokenizer = self._service.llm.tokenizer
        own = {
            "vocab_size": self._service.vocab_size,
            "max_model_len": self._service.max_model_len,
            "eos_token_ids": sorted(tokenizer.eos_token_ids),
            "bos_token_id": tokenizer.bos_token_id,
            "chat_template": tokenizer.chat_template,
        }
        await exchange.reply(200, {**tokenizer.special_tokens, **own})

    async def _answer(self, exchange: RequestContext, make: Callable[[bytes], dict[str, Any]]) -> None:
        with self._service.place():
            data = await exchange.body(self._service.limits.max_body)
            await exchange.reply(200, await self._service.aside(partial(make, data)))

    def _tokens(self, data: bytes) -> dict[str, Any]:
        service, tokenizer = self._service, self._service.llm.tokenizer
        asked = read_tokenize(service.read(data))
        service.check_model(asked.model)
        if asked.messages is not None:
            ids = service.llm.encode_chat(asked.messages, asked.template)
        else:
            ids = tokenizer.encode(asked.prompt or "", asked.add_special_tokens)
        made = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            made["token_strs"] = [tokenizer.pieces.tokens[token] for token in ids]
        return made

    def _text(self, data: bytes) -> dict[str, Any]:
        service = self._service
        asked = read_detokenize(service.read(data))
        service.check_model(asked.model)
        try:
            return {"prompt": service.llm.tokenizer.decode(asked.tokens, skip_special_tokens=False)}
        except ValueError as error:
            raise ParameterError("tokens", str(error)) from None
