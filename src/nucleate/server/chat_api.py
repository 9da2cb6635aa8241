"""``ChatAPI``: another API for chats, whose requests become OpenAI's and whose responses are made from their chunks.

``ChatEncoder`` makes the responses. ``ChatBlocks`` splits the chunks into blocks (reasoning, text, tool calls), one
after another: OpenAI's chat completions have text and calls side by side, other APIs have them as a sequence.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar, Literal, NamedTuple, final

from nucleate.chat.chat_format import read_arguments
from nucleate.chat.reader import completed_object
from nucleate.outputs import CompletionChunk, StepLogprobs, ToolCallDelta, Usage
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import FIELDS
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.endpoints import LONG_NAMES_CHAT
from nucleate.server.openai.fields import COMMON, Declared, Value, reject_deep_nesting
from nucleate.server.openai.json_encoding import dumps, json_parts
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.response_format import RENAMED
from nucleate.server.openai.responses import JSON, ResponseHead, TokenBodies
from nucleate.server.openai.streams import split_calls
from nucleate.tokenization.tokenizer import Tokenizer

WITHOUT_HINT = (re.compile(r'; set on_unsupported="ignore" to ignore it( \(.*\))?'), "")
"""Removes from errors what the API has no field for."""

ENGINE_FIELDS = {name: COMMON[name] for name in ("priority", "truncate_prompt_tokens", "truncation_side")}
"""Fields of completions that the other APIs have too, by the same names."""
_UNUSED = ("n", "max_tokens", "logprobs", "prompt_logprobs")  # there is one output, and other fields set these


class TranslationError(ParameterError):
    """A body cannot be translated. The error names its own fields."""


@dataclass(frozen=True)
class Translation:
    """A request as a body of one of OpenAI's endpoints. new_encoder: makes the encoder of the response."""

    body: Mapping[str, Any]
    new_encoder: Callable[[EncoderInput], ChatEncoder]
    url: str = LONG_NAMES_CHAT.url


@dataclass(frozen=True)
class ChatAPI:
    """An endpoint of another API.

    translate: translates a decoded body; raises TranslationError. renamed: patterns and replacements for the names of
    OpenAI's fields in later errors. known: the names of all fields. known_options: those of the field ``options``.
    """

    url: str
    translate: Callable[[Any], Translation]
    renamed: Sequence[tuple[re.Pattern[str], str]]
    known: Collection[str]
    known_options: Collection[str] = ()

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Within this context, errors name the fields of this API."""
        try:
            yield
        except TranslationError:
            raise
        except ParameterError as error:
            raise ParameterError(self._own(error.field), self._own_message(str(error))) from None
        except HTTPError as error:
            param = None if error.param is None else self._own(error.param)
            message = self._own_message(error.message)
            raise HTTPError(
                error.status, message, code=error.code, param=param, kind=error.kind, headers=error.headers
            ) from None

    def _own_message(self, message: str) -> str:
        text, got, value = message.partition(", got ")  # the value is the client's
        return self._own(text) + got + value

    def _own(self, text: str) -> str:
        for pattern, replacement in self.renamed:
            text = pattern.sub(replacement, text)
        return text


def translator(read: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """Decorate a function that translates a body: it raises TranslationError, also for deep nesting."""

    @wraps(read)
    def wrapper(body: Any) -> Value:
        try:
            return reject_deep_nesting(read)(body)
        except ParameterError as error:
            raise TranslationError(error.field, str(error)) from None

    return wrapper


def sampling_fields(*without: str) -> dict[str, Declared]:
    """Return the sampling parameters that are fields of these APIs. without: names of those that are not."""
    return {name: parameter for name, parameter in FIELDS.items() if name not in (*_UNUSED, *without)}


def renames(*pairs: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Compile patterns of names, which match whole names only."""
    return tuple((re.compile(rf"(?<![\w.]){pattern}(?!\w)"), replacement) for pattern, replacement in pairs)


def drop_unknown(body: Any, known: Collection[str], known_options: Collection[str] = ()) -> tuple[Any, list[str]]:
    """Return a body without its unknown fields and options, and their names.

    Constraints of older versions of vLLM stay, and are errors.
    """
    if not isinstance(body, Mapping):
        return body, []
    unknown = [name for name, value in body.items() if value is not None and name not in known and name not in RENAMED]
    body = {name: value for name, value in body.items() if name in known or name in RENAMED}
    if known_options and "options" in body:
        body["options"], names = drop_unknown(body["options"], known_options)
        unknown += [f"options.{name}" for name in names]
    return body, unknown


def read_call(call_id: str, name: str, arguments: Any, where: str, field: str) -> dict[str, Any]:
    """Return a tool call of a message. where: the place of its arguments, an object or its JSON text."""
    try:
        function = {"name": name, "arguments": read_arguments(arguments, where)}
    except ParameterError as error:
        raise ParameterError(field, str(error)) from None
    return {"id": call_id, "function": function}


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
        if call.name is not None:
            yield from self._open(Block("call", len(self.all), call.index, call.id or "", call.name))
        current = next((block for block in reversed(self.all) if block.call_index == call.index), None)
        if current is None:
            return
        current.incomplete |= call.incomplete
        if call.arguments:
            current.parts.append(call.arguments)
            yield BlockEvent("add", current, call.arguments)

    def _add(
        self, kind: Literal["reasoning", "text"], text: str, logprobs: Sequence[StepLogprobs] = ()
    ) -> Iterator[BlockEvent]:
        block = self._current
        if block is None or block.kind != kind:
            block = Block(kind, len(self.all))
            yield from self._open(block)
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
        self.blocks, self.tokens = ChatBlocks(), TokenBodies(given.request, given.tokenizer)
        self._started = False

    @abstractmethod
    def body(self, usage: Usage) -> JSON:
        """Return a whole response, as ``json_parts`` encodes it. The blocks are complete."""

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
        return json_parts(self.body(usage))

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


def event_frame(kind: str, body: Mapping[str, Any]) -> str:
    """Return a server-sent event with a name."""
    return f"event: {kind}\ndata: {dumps(body)}\n\n"
