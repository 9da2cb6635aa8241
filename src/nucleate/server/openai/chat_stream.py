"""The stream of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from nucleate.outputs import ToolCallDelta
from nucleate.server.chat_blocks import split_calls
from nucleate.server.openai.logprobs import JSON, TextOffsets, step_body
from nucleate.server.openai.responses import reasoning_body, tool_call_body
from nucleate.server.openai.stream_chunks import ResponseStream, StreamChoice


@final
class ChatStream(ResponseStream):
    """The stream of ``/v1/chat/completions``: for each choice its role, its content and its end."""

    kind = "chat.completion.chunk"
    text_prefix, text_suffix, prompt_in_choice = '"delta":{"content":', "}", False

    def _offset_counter(self, prompt_ids: Sequence[int]) -> TextOffsets | None:
        return None

    def _flush(self, choice: StreamChoice) -> Iterator[JSON]:
        last = choice.finish_reason is not None
        steps = choice.logprobs if self._request.returns_logprobs else []
        deltas = self._deltas(choice)
        if steps and not deltas:
            deltas = [{"content": ""}]
        if not (deltas or last):
            return
        if not choice.started:
            delta = {"role": "assistant", "content": self._request.echoed_message}
            yield self._choice(choice, {"delta": delta}, 0, None, last=False)
            choice.started = True
        for delta in deltas:
            content = [
                step_body(step, self._tokenizer, as_ids=self._request.tokens_as_ids)
                for step in (choice.logprobs if steps else [])
            ]
            logprobs = {"content": content, "refusal": None} if content else None
            yield self._choice(choice, {"delta": delta}, len(choice.token_ids), logprobs, last=False)
            choice.clear(len(choice.token_ids))
        if last:
            yield self._choice(choice, {"delta": {}}, len(choice.token_ids), None, last=True)
            choice.clear(len(choice.token_ids))

    @staticmethod
    def _deltas(choice: StreamChoice) -> list[JSON]:
        """Take what is to be sent, each part as a delta."""
        open_call, calls = split_calls(choice.tool_calls)
        deltas = [_call(call) for call in open_call]
        if choice.reasoning:
            deltas.append(reasoning_body(choice.reasoning))
        if choice.text:
            deltas.append({"content": choice.text})
        deltas += map(_call, calls)
        choice.reasoning, choice.tool_calls = "", []
        return deltas


def _call(call: ToolCallDelta) -> JSON:
    body = {"function": {"arguments": call.arguments}}
    if call.name is not None:
        body = tool_call_body(call.id, call.name, call.arguments)
    return {"tool_calls": [{"index": call.index, **body}]}
