"""The endpoint ``/v1/messages/count_tokens``."""

from __future__ import annotations

from functools import partial
from typing import Any

from nucleate.server.anthropic.message_request import IGNORED, MESSAGES, PROMPT_FIELDS, translate_prompt
from nucleate.server.chat_api import present_fields, translator
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service

URL = "/v1/messages/count_tokens"
FIELDS = PROMPT_FIELDS | IGNORED


async def count_tokens(service: Service, context: RequestContext) -> None:
    """Count the tokens of the prompt that ``/v1/messages`` would make."""

    async def respond(data: bytes) -> None:
        await context.reply(200, await service.run_in_thread(partial(_count, service, context, data)))

    with service.request_slot():
        await MESSAGES.with_own_names(respond)(await context.body(service.limits.max_request_body_bytes))


def _count(service: Service, context: RequestContext, data: bytes) -> dict[str, int]:
    body, ignored = service.decode_fields(data, FIELDS)
    context.report_ignored_fields(ignored)
    return {"input_tokens": service.count_chat_tokens(_translate(body))}


@translator
def _translate(body: Any) -> dict[str, Any]:
    given = present_fields(body, FIELDS)
    made = translate_prompt(given)
    return {**made, "model": given.get("model")}
