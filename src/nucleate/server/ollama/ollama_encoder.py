"""Builds responses of Ollama's API: one object, or lines with an object each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import ClassVar, final

from nucleate.outputs import StepLogprobs, Usage
from nucleate.server.chat_blocks import Block, BlockEvent
from nucleate.server.chat_encoder import ChatEncoder, with_json
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps, json_parts
from nucleate.server.openai.logprobs import JSON, step_body

NANOSECONDS = 10**9


class OllamaEncoder(ChatEncoder):
    """The part that both endpoints share. The subclasses say where text, reasoning and calls are."""

    content_type: ClassVar[str] = "application/x-ndjson"

    @abstractmethod
    def _content(self, text: str, reasoning: str, calls: Sequence[Block]) -> str:
        """Return the JSON of an object's fields for the content, without braces."""

    @final
    def body(self, usage: Usage) -> Iterator[str]:
        texts = {kind: [b.text for b in self.blocks.all if b.kind == kind] for kind in ("text", "reasoning")}
        calls = [block for block in self.blocks.all if block.kind == "call"]
        content = self._content("".join(texts["text"]), "".join(texts["reasoning"]), calls)
        yield f"{dumps(self._head())[:-1]},{content}"
        steps = [step for block in self.blocks.all for step in block.logprobs]
        if steps:
            yield ',"logprobs":'
            yield from json_parts(self._logprobs(steps))
        yield f",{dumps(self._totals(usage))[1:]}"

    @final
    def error(self, error: HTTPError) -> bytes:
        return (dumps({"error": error.body["error"]["message"]}) + "\n").encode()

    @final
    def _start(self) -> str:
        return ""

    @final
    def _idle(self) -> str:
        return self._line("", "", ())

    @final
    def _event(self, event: BlockEvent) -> str:
        block = event.block
        if block.kind == "call":
            return self._line("", "", [block]) if event.kind == "close" else ""
        if event.kind != "add":
            return ""
        text, reasoning = (event.text, "") if block.kind == "text" else ("", event.text)
        return self._line(text, reasoning, (), event.logprobs)

    @final
    def _end(self, usage: Usage) -> str:
        return f"{dumps(self._head())[:-1]},{self._content('', '', ())},{dumps(self._totals(usage))[1:]}\n"

    @final
    def _line(self, text: str, reasoning: str, calls: Sequence[Block], logprobs: Sequence[StepLogprobs] = ()) -> str:
        steps = f',"logprobs":{dumps([*self._logprobs(logprobs)])}' if logprobs else ""
        return f'{dumps(self._head())[:-1]},{self._content(text, reasoning, calls)}{steps},"done":false}}\n'

    @final
    def _head(self) -> JSON:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.given.head.model, "created_at": now}

    @final
    def _totals(self, usage: Usage) -> JSON:
        """Return the fields of the last object. Durations are in nanoseconds."""
        last, (total, first) = self.blocks.last, self.given.timing()
        return {
            "done": True,
            "done_reason": "length" if last is not None and last.finish_reason == "length" else "stop",
            "total_duration": int(total * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(first * NANOSECONDS),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((total - first) * NANOSECONDS),
        }

    @final
    def _logprobs(self, steps: Sequence[StepLogprobs]) -> Iterator[JSON]:
        return (step_body(step, self.given.tokenizer) for step in steps)


@final
class ChatLines(OllamaEncoder):
    """Responses of ``/api/chat``."""

    def _content(self, text: str, reasoning: str, calls: Sequence[Block]) -> str:
        message: JSON = {"role": "assistant", "content": text}
        if reasoning:
            message["thinking"] = reasoning
        made = dumps(message)
        if calls:
            made = with_json(message, "tool_calls", f"[{','.join(map(_call, calls))}]")
        return f'"message":{made}'


@final
class GenerateLines(OllamaEncoder):
    """Responses of ``/api/generate``."""

    def _content(self, text: str, reasoning: str, calls: Sequence[Block]) -> str:
        return dumps({"response": text, **({"thinking": reasoning} if reasoning else {})})[1:-1]


def _call(block: Block) -> str:
    function = with_json({"index": block.call_index, "name": block.name}, "arguments", block.arguments)
    return with_json({"id": block.id}, "function", function)
