"""``ChatEncoder``: builds the responses of another API from the chunks of a chat completion.

``ChatBlocks`` splits the chunks into blocks (reasoning, text, tool calls), one after another: OpenAI's chat completions
have text and calls side by side, other APIs have them as a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, final

from nucleate.chat.reader import completed_object
from nucleate.outputs import CompletionChunk, StepLogprobs, ToolCallDelta, Usage
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead
from nucleate.tokenization.tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class Block:
    """A part of an output. incomplete: the call ends before its arguments do."""

    kind: Literal["reasoning", "text", "call"]
    index: int  #: among the blocks
    call_index: int = -1
    id: str = ""  #: of the call
    name: str = ""  #: of the function
    parts: list[str] = field(default_factory=list)
    logprobs: list[StepLogprobs] = field(default_factory=list)  #: of the tokens of a text, if requested
    incomplete: bool = False

    @property
    def text(self) -> str:
        """The reasoning, the text, or the arguments of the call."""
        return "".join(self.parts)

    @property
    def arguments(self) -> str:
        """The arguments of the call as a JSON object: of an incomplete call, those that are complete."""
        return completed_object(self.text) if self.incomplete else self.text


class BlockEvent(NamedTuple):
    """What happens to a block: "open", "add" or "close"."""

    kind: Literal["open", "add", "close"]
    block: Block
    text: str = ""  #: what is added
    logprobs: Sequence[StepLogprobs] = ()  #: of its tokens


class ChatBlocks:
    """The blocks of one output so far. last: its last chunk, once it has ended."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.last: CompletionChunk | None = None
        self._current: Block | None = None
        self._logprobs: list[StepLogprobs] = []  # of tokens whose text is held back

    def is_cut(self, block: Block) -> bool:
        """Whether a call is incomplete, or the output has ended within this block because of its length."""
        if block.kind == "call":
            return block.incomplete
        return self.last is not None and self.last.finish_reason == "length" and block is self.all[-1]

    def push(self, chunk: CompletionChunk) -> Iterator[BlockEvent]:
        """Add a chunk."""
        open_call, calls = split_calls(chunk.tool_calls)
        for call in open_call:
            yield from self._call(call)
        if chunk.reasoning:
            yield from self._add("reasoning", chunk.reasoning)
        self._logprobs += chunk.logprobs or ()
        if chunk.text:
            logprobs, self._logprobs = self._logprobs, []
            yield from self._add("text", chunk.text, logprobs)
        elif chunk.reasoning or chunk.tool_calls:
            self._logprobs = []
        for call in calls:
            yield from self._call(call)
        if chunk.finish_reason is not None:
            self.last = chunk
            yield from self._close()

    def _call(self, call: ToolCallDelta) -> Iterator[BlockEvent]:
        current = self._current
        if call.name is not None:
            yield from self._open(Block("call", len(self.all), call.index, call.id or "", call.name))
            current = self._current
        if current is None or current.call_index != call.index:
            current = next((block for block in self.all if block.call_index == call.index), None)
        if current is None:
            return
        current.incomplete |= call.incomplete
        if call.arguments:
            current.parts.append(call.arguments)
            yield BlockEvent("add", current, call.arguments)

    def _add(
        self, kind: Literal["reasoning", "text"], text: str, logprobs: Sequence[StepLogprobs] = ()
    ) -> Iterator[BlockEvent]:
        if self._current is None or self._current.kind != kind:
            yield from self._open(Block(kind, len(self.all)))
        block = self._current
        if block is not None:
            block.parts.append(text)
            block.logprobs += logprobs
            yield BlockEvent("add", block, text, logprobs)

    def _open(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._close()
        self._current = block
        self.all.append(block)
        yield BlockEvent("open", block)

    def _close(self) -> Iterator[BlockEvent]:
        if self._current is not None:
            block, self._current = self._current, None
            yield BlockEvent("close", block)


def split_calls(calls: Sequence[ToolCallDelta]) -> tuple[Sequence[ToolCallDelta], Sequence[ToolCallDelta]]:
    """Split the deltas of a chunk: those of the call that is open come before its text, those of new calls after it."""
    count = next((number for number, call in enumerate(calls) if call.name is not None), len(calls))
    return calls[:count], calls[count:]


EVENT_STREAM = "text/event-stream; charset=utf-8"


class Timing(NamedTuple):
    """Seconds since the request arrived: until now, and until the first token."""

    total: float
    first_token: float


@dataclass(frozen=True)
class EncoderInput:
    """What an encoder needs to know of a request. timing: returns the times so far."""

    head: ResponseHead
    request: ParsedRequest
    prompt_tokens: int
    tokenizer: Tokenizer
    timing: Callable[[], Timing]


class ChatEncoder(ABC):
    """The response to one request with one output, as a stream or as a whole; both from the same blocks."""

    content_type: ClassVar[str] = EVENT_STREAM

    def __init__(self, given: EncoderInput) -> None:
        self.given = given
        self.blocks = ChatBlocks()
        self._started = False

    @abstractmethod
    def body(self, usage: Usage) -> Iterator[str]:
        """Yield the JSON of a whole response in parts. The blocks are complete."""

    @abstractmethod
    def error(self, error: HTTPError) -> bytes:
        """Return the last frame of a stream that fails."""

    @abstractmethod
    def _start(self) -> str:
        """Return the first frames of a stream."""

    @abstractmethod
    def _event(self, event: BlockEvent) -> str:
        """Return the frames of an event."""

    @abstractmethod
    def _end(self, usage: Usage) -> str:
        """Return the last frames of a stream."""

    @abstractmethod
    def _idle(self) -> str:
        """Return a frame without content, which keeps the connection open."""

    @final
    def frames(self, prompt: int, chunks: Sequence[CompletionChunk]) -> bytes:
        """Return the frames for new chunks. prompt: 0, because there is one."""
        made = [self._begin(), *(self._event(event) for chunk in chunks for event in self.blocks.push(chunk))]
        return "".join(made).encode()

    @final
    def keep_alive(self) -> bytes:
        """Return what is sent while there is no new text."""
        return (self._begin() + self._idle()).encode()

    @final
    def end(self, usage: Usage) -> bytes:
        """Return the end of a complete stream."""
        return (self._begin() + self._end(usage)).encode()

    @final
    def whole(self, chunks: Iterable[CompletionChunk], usage: Usage) -> Iterator[str]:
        """Yield the JSON of the response for all chunks, in parts."""
        for chunk in chunks:
            for _ in self.blocks.push(chunk):
                pass
        return self.body(usage)

    @final
    def has_large_frame(self, chunks: Iterable[CompletionChunk]) -> bool:
        """Whether frames may be large, because all logprobs are repeated at the end."""
        return self.given.request.returns_logprobs

    @final
    def _begin(self) -> str:
        if self._started:
            return ""
        self._started = True
        return self._start()


def with_json(body: Mapping[str, Any], name: str, text: str) -> str:
    """Return the JSON of an object with one more field, whose value is JSON already."""
    return f"{dumps(body)[:-1]},{dumps(name)}:{text}}}"


def event_frame(kind: str, body: Mapping[str, Any]) -> str:
    """Return a server-sent event with a name."""
    return f"event: {kind}\ndata: {dumps(body)}\n\n"
