"""Builds messages of the Messages API: one object, or the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from nucleate.outputs import CompletionChunk, Usage
from nucleate.server.anthropic.message_errors import error_body
from nucleate.server.chat_blocks import Block, BlockEvent
from nucleate.server.chat_encoder import ChatEncoder, EncoderInput, event_frame, with_json
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps
from nucleate.server.openai.logprobs import JSON

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""By finish reason; all others are "end_turn"."""


@final
class MessageEncoder(ChatEncoder):
    """shows_thinking: whether the text of the reasoning is sent."""

    def __init__(self, shows_thinking: bool, given: EncoderInput) -> None:
        super().__init__(given)
        self._shows_thinking = shows_thinking

    def body(self, usage: Usage) -> Iterator[str]:
        content = ",".join([self._content(block) for block in self.blocks.all])
        message = {**self._message(usage), **_stop(self.blocks.last)}
        del message["content"]
        yield with_json(message, "content", f"[{content}]")

    def error(self, error: HTTPError) -> bytes:
        return event_frame("error", error_body(error)).encode()

    def _start(self) -> str:
        message = self._message(Usage(self.given.prompt_tokens, 0))
        return _frame("message_start", {"message": message})

    def _idle(self) -> str:
        return _frame("ping", {})

    def _event(self, event: BlockEvent) -> str:
        index = {"index": event.block.index}
        if event.kind == "open":
            return _frame("content_block_start", {**index, "content_block": _empty(event.block)})
        if event.kind == "close":
            return _frame("content_block_stop", index)
        if event.block.kind == "text":
            delta = {"type": "text_delta", "text": event.text}
        elif event.block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": event.text}
        elif self._shows_thinking:
            delta = {"type": "thinking_delta", "thinking": event.text}
        else:
            return ""
        return _frame("content_block_delta", {**index, "delta": delta})

    def _end(self, usage: Usage) -> str:
        delta = _frame("message_delta", {"delta": _stop(self.blocks.last), "usage": _usage(usage)})
        return delta + _frame("message_stop", {})

    def _message(self, usage: Usage) -> JSON:
        """Return a message without content."""
        head = self.given.head
        return {
            "id": f"msg_{head.id.rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _content(self, block: Block) -> str:
        """Return the JSON of a content block."""
        made = _empty(block)
        if block.kind == "call":
            del made["input"]
            return with_json(made, "input", block.arguments)
        if block.kind == "text":
            made["text"] = block.text
        elif self._shows_thinking:
            made["thinking"] = block.text
        return dumps(made)


def _empty(block: Block) -> JSON:
    """Return a content block as it is when it starts."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
    return {"type": "thinking", "thinking": "", "signature": ""}


def _stop(last: CompletionChunk | None) -> JSON:
    """Return why an output ended."""
    found, text = (None, None) if last is None else (last.finish_reason, last.stop_reason)
    if found == "stop" and isinstance(text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": text}
    return {"stop_reason": STOP_REASONS.get(found or "", "end_turn"), "stop_sequence": None}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _frame(kind: str, fields: dict[str, Any]) -> str:
    return event_frame(kind, {"type": kind, **fields})
