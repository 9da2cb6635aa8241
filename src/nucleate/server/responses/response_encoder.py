"""Builds responses of the Responses API: one object, or events that end with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from nucleate.outputs import StepLogprobs, Usage
from nucleate.server.chat_blocks import Block, BlockEvent
from nucleate.server.chat_encoder import ChatEncoder, EncoderInput
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps, json_parts
from nucleate.server.openai.logprobs import JSON, step_body
from nucleate.server.openai.responses import validation_body

ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@final
class ResponseEncoder(ChatEncoder):
    """echoed: the fields of the request that the response repeats.

    They are encoded once, because a request may have megabytes of tools, and a stream repeats them three times.
    """

    def __init__(self, echoed: Mapping[str, Any], given: EncoderInput) -> None:
        super().__init__(given)
        self._number = 0  # of the next event
        self._id = given.head.id.rpartition("-")[2]
        params, use = given.request.params, given.request.tool_use
        request: JSON = {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": given.head.created,
            "model": given.head.model,
            "instructions": None,
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": None, "summary": None},
            **echoed,
            "parallel_tool_calls": use.parallel,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "max_output_tokens": params.max_tokens,
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }
        self._request = dumps(request)[:-1]
        asked = request["reasoning"]  # for a summary: the reasoning then takes its place
        self._summarizes = any(asked.get(name) is not None for name in ("summary", "generate_summary"))
        self._reasoning_text = "reasoning_summary_text" if self._summarizes else "reasoning_text"

    def body(self, usage: Usage) -> Iterator[str]:
        return self._response(self._final(usage))

    def error(self, error: HTTPError) -> bytes:
        found = error.body["error"]
        failure = {"code": "server_error" if error.kind else "invalid_prompt", "message": found["message"]}
        return (self._begin() + self._lifecycle("failed", {**_state("failed"), "error": failure})).encode()

    def _start(self) -> str:
        state = _state("in_progress")
        return self._lifecycle("created", state) + self._lifecycle("in_progress", state)

    def _idle(self) -> str:
        return ": keep-alive\n\n"

    def _event(self, event: BlockEvent) -> str:
        block = event.block
        where = {"item_id": self._item_id(block), "output_index": block.index}
        if event.kind == "add":
            return self._delta(event, where)
        made = []
        part = None if block.kind == "call" else self._part(block, empty=event.kind == "open")
        part_event = {**where, **self._part_index(block), "part": part}
        part_kind = "reasoning_summary_part" if self._is_summary(block) else "content_part"
        if event.kind == "open":
            item = self._item(block, "in_progress", empty=True)
            made.append(self._frame("output_item.added", {"output_index": block.index, "item": item}))
            if part is not None:
                made.append(self._frame(f"{part_kind}.added", part_event))
        else:
            made.append(self._done(block, where))
            if part is not None:
                made.append(self._frame(f"{part_kind}.done", part_event))
            item = self._item(block, self._status(block))
            made.append(self._frame("output_item.done", {"output_index": block.index, "item": item}))
        return "".join(made)

    def _delta(self, event: BlockEvent, where: JSON) -> str:
        if event.block.kind == "call":
            return self._frame("function_call_arguments.delta", {**where, "delta": event.text})
        content = {**where, **self._part_index(event.block), "delta": event.text}
        if event.block.kind == "reasoning":
            return self._frame(f"{self._reasoning_text}.delta", content)
        return self._frame("output_text.delta", {**content, "logprobs": self._logprobs(event.logprobs)})

    def _done(self, block: Block, where: JSON) -> str:
        if block.kind == "call":
            names = {"name": block.name, "arguments": block.text}
            return self._frame("function_call_arguments.done", {**where, **names})
        content = {**where, **self._part_index(block), "text": block.text}
        if block.kind == "reasoning":
            return self._frame(f"{self._reasoning_text}.done", content)
        return self._frame("output_text.done", {**content, "logprobs": self._logprobs(block.logprobs)})

    def _end(self, usage: Usage) -> str:
        state = self._final(usage)
        return self._lifecycle(state["status"], state)

    def _lifecycle(self, kind: str, state: JSON) -> str:
        """Return an event with the whole response."""
        name, number = f"response.{kind}", self._number
        self._number += 1
        response = "".join(self._response(state))
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},"response":{response}}}\n\n'

    def _frame(self, kind: str, fields: JSON) -> str:
        name, number = f"response.{kind}", self._number
        self._number += 1
        body = {"type": name, "sequence_number": number, **fields}
        return f"event: {name}\ndata: {''.join(json_parts(body))}\n\n"

    def _is_summary(self, block: Block) -> bool:
        return self._summarizes and block.kind == "reasoning"

    def _part_index(self, block: Block) -> JSON:
        return {"summary_index" if self._is_summary(block) else "content_index": 0}

    def _response(self, state: JSON) -> Iterator[str]:
        yield self._request
        yield ","
        parts = json_parts(state)
        yield next(parts)[1:]  # the opening brace
        yield from parts

    def _final(self, usage: Usage) -> JSON:
        """Return what a response has at its end."""
        last = self.blocks.last
        cut = last is not None and last.finish_reason == "length"
        made = _state("incomplete" if cut else "completed")
        if cut:
            made["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            made["completed_at"] = int(time.time())
        made["output"] = iter([self._item(block, self._status(block)) for block in self.blocks.all])
        made["usage"] = _usage(usage)
        if last is not None:
            made["seed"] = last.seed
            if last.validation is not None:
                made["validation"] = validation_body(last.validation)
        return made

    def _status(self, block: Block) -> str:
        return "incomplete" if self.blocks.is_cut(block) else "completed"

    def _item(self, block: Block, status: str, *, empty: bool = False) -> JSON:
        """Return an output item. empty: as it is when it is added."""
        made: JSON = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            arguments = "" if empty else block.text
            return {**made, "type": "function_call", "call_id": block.id, "name": block.name, "arguments": arguments}
        content = iter(() if empty else (self._part(block),))
        if self._is_summary(block):
            return {**made, "type": "reasoning", "summary": content}
        if block.kind == "reasoning":
            return {**made, "type": "reasoning", "summary": [], "content": content}
        return {**made, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block, *, empty: bool = False) -> JSON:
        """Return the content part of an item."""
        text = "" if empty else block.text
        if block.kind == "reasoning":
            return {"type": "summary_text" if self._summarizes else "reasoning_text", "text": text}
        logprobs = self._logprobs(() if empty else block.logprobs)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, steps: Sequence[StepLogprobs]) -> Iterator[JSON]:
        return iter([step_body(step, self.given.tokenizer) for step in steps])

    def _item_id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._id}_{block.index}"


def _state(status: str) -> JSON:
    """Return the fields of a response that change."""
    nothing = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    return {"status": status, "output": [], **nothing}


def _usage(usage: Usage) -> JSON:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
