"""``ChatEncoder``: builds the responses of another API from the chunks of a chat completion."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

from nucleate.outputs import CompletionChunk, Usage
from nucleate.server.chat_blocks import BlockEvent, ChatBlocks
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead
from nucleate.tokenization.tokenizer import Tokenizer

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
