"""Builds the frames of a stream in OpenAI's format.

A frame is a server-sent event with a JSON chunk. This runs for every token of every stream, so a frame that only adds
text is assembled from prepared parts; all others are encoded by ``json``. The chunks of a stream add up to the body of
the same request without streaming.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, ClassVar, final

from nucleate.outputs import (
    CompletionChunk,
    FinishReason,
    PromptLogprobs,
    StepLogprobs,
    ToolCallDelta,
    Usage,
    Validation,
)
from nucleate.server.http_errors import HTTPError
from nucleate.server.openai.json_encoding import dumps, json_parts, paced
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import (
    JSON,
    Echo,
    ResponseHead,
    TextOffsets,
    TokenBodies,
    end_of_choice,
    reasoning_body,
    tool_call_body,
    usage_body,
    without_output,
)
from nucleate.tokenization.tokenizer import Tokenizer

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, ignored by clients."""
DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


def error_frame(body: Mapping[str, Any]) -> bytes:
    """Return the end of a failed stream. body: see ``error_body``."""
    return _frame(body) + DONE


@dataclass(eq=False, slots=True)
class StreamChoice:
    """A choice of a stream, with the part that is not sent yet."""

    number: int  #: index in the response
    prompt: int  #: index of its prompt
    first: bool  #: whether it is the first choice of its prompt
    offset_counter: TextOffsets | None = None  #: if the token offsets are needed
    seed: int = 0
    started: bool = False  #: a frame was sent
    sent: int = 0  #: characters sent, without the echo
    sent_tokens: int = 0
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs] = field(default_factory=list)
    text_offsets: list[int] = field(default_factory=list)  #: offsets of these tokens
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    validation: Validation | None = None
    text_only: bool = False  #: frames only add text and token ids, between these parts:
    frame_start: str = ""
    frame_middle: str = ""

    def add(self, chunks: Sequence[CompletionChunk]) -> None:
        for chunk in chunks:
            self.token_ids += chunk.token_ids
            self.logprobs += chunk.logprobs or ()
            if self.offset_counter is not None:
                self.text_offsets += map(self.offset_counter.push, chunk.token_ids)
        last = chunks[-1]
        self.text += "".join([chunk.text for chunk in chunks])
        self.reasoning += "".join([chunk.reasoning for chunk in chunks])
        self.tool_calls += [call for chunk in chunks for call in chunk.tool_calls if call.name or call.arguments]
        self.seed, self.stop_reason, self.validation = last.seed, last.stop_reason, last.validation
        self.finish_reason = None if last.finish_reason == "error" else last.finish_reason

    def clear(self, count: int) -> None:
        """Remove the text, and so many of the tokens, after they were sent."""
        self.sent += len(self.text)
        self.sent_tokens += count
        self.started, self.text = True, ""
        del self.token_ids[:count], self.logprobs[:count], self.text_offsets[:count]


class ResponseStream(ABC):
    """The stream of one request.

    prompts: the token ids of each prompt. With echo, or logprobs of completions, the constructor processes the whole
    prompts: run it on a worker thread.
    """

    content_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    kind: ClassVar[str]
    text_prefix: ClassVar[str]  #: text of a choice before the quoted text
    text_suffix: ClassVar[str]  #: and after it
    prompt_in_choice: ClassVar[bool]  #: whether the parts about the prompt belong to a choice, or to the frame

    def __init__(
        self, head: ResponseHead, request: ParsedRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        self._request, self._tokens, n = request, TokenBodies(request, tokenizer), request.params.n
        self._prompts = prompts
        self._prompt_logprobs: list[PromptLogprobs | None] = [None] * len(prompts)
        self._unsent_prompts = len(prompts) * n if request.return_token_ids else 0
        self._head = head.body(self.kind)
        self._usage = {"usage": None} if request.include_usage else {}
        self._frame_end = ']}],"usage":null}\n\n' if request.include_usage else "]}]}\n\n"
        self._choices = [
            [StreamChoice(prompt * n + index, prompt, index == 0, self._offset_counter(ids)) for index in range(n)]
            for prompt, ids in enumerate(prompts)
        ]

    @abstractmethod
    def _offset_counter(self, prompt_ids: Sequence[int]) -> TextOffsets | None:
        """Return a counter of text offsets, if the response has them."""

    @abstractmethod
    def _flush(self, choice: StreamChoice) -> Iterator[JSON]:
        """Yield the choice of each frame that can be sent now, and clear what was sent."""

    @final
    def frames(self, prompt: int, chunks: Sequence[CompletionChunk]) -> bytes:
        """Return the frames for new chunks of a prompt's choices, in order.

        prompt: the index of the prompt. Several chunks of a choice make one frame; token ids without text wait for the
        next one. An error does not end a choice: ``error_frame`` ends the stream.
        """
        if len(chunks) == 1:
            chunk = chunks[0]
            choice = self._choices[prompt][chunk.index]
            if choice.text_only and not (chunk.finish_reason or chunk.reasoning or chunk.tool_calls):
                choice.token_ids += chunk.token_ids
                return self._text_frame(choice, chunk.text) if chunk.text else b""
            return self._choice_frames(choice, chunks)
        groups: dict[int, list[CompletionChunk]] = {}
        for chunk in chunks:
            groups.setdefault(chunk.index, []).append(chunk)
        return b"".join([self._choice_frames(self._choices[prompt][index], own) for index, own in groups.items()])

    @final
    def keep_alive(self) -> bytes:
        """Return what is sent while there is no new text."""
        return KEEP_ALIVE

    @final
    def error(self, error: HTTPError) -> bytes:
        """Return the end of a stream that fails."""
        return error_frame(error.body)

    @final
    def end(self, usage: Usage) -> bytes:
        """Return the end of a complete stream."""
        if not self._request.include_usage:
            return DONE
        usage = replace(usage, completion_tokens=0) if self._request.prompt_only else usage
        return _frame({**self._head, "choices": [], "usage": usage_body(usage)}) + DONE

    @final
    def _choice(self, choice: StreamChoice, content: JSON, count: int, logprobs: JSON | None, *, last: bool) -> JSON:
        """Return a choice of a frame. content: its text; count: its tokens; last: whether the choice ends."""
        return {"index": choice.number, **content, **end_of_choice(choice, logprobs, count, last=last)}

    @final
    def has_large_frame(self, outputs: Iterable[CompletionChunk]) -> bool:
        """Whether a frame of these outputs may have megabytes: build it on a worker thread."""
        return self._unsent_prompts > 0 or any(chunk.prompt_logprobs is not None for chunk in outputs)

    def _choice_frame(self, choice: StreamChoice, made: JSON) -> str:
        """Return a frame with a choice; the first one also has the requested parts about the prompt."""
        body, of_prompt = {**self._head, "choices": [made], **self._usage}, dict[str, Any]()
        if self._request.continuous_usage:
            tokens = choice.sent_tokens + len(made["token_ids"])
            body["usage"] = usage_body(Usage(len(self._prompts[choice.prompt]), tokens), final=False)
        logprobs = self._prompt_logprobs[choice.prompt]
        if not choice.started and self._request.return_token_ids:
            of_prompt["prompt_token_ids"] = iter(self._prompts[choice.prompt])
            self._unsent_prompts -= 1
        if not choice.started and choice.first and logprobs is not None:
            of_prompt |= self._tokens.prompt(logprobs, iter) if self._request.params.prompt_logprobs is not None else {}
            if not self._request.echo:
                self._prompt_logprobs[choice.prompt] = None
        if not of_prompt:
            return f"data: {dumps(body)}\n\n"
        (made if self.prompt_in_choice else body).update(of_prompt)
        body["choices"] = iter((made,))  # encoded piece by piece
        return f"data: {''.join(paced(json_parts(body)))}\n\n"

    def _choice_frames(self, choice: StreamChoice, chunks: Sequence[CompletionChunk]) -> bytes:
        if chunks[0].prompt_logprobs is not None:
            self._prompt_logprobs[choice.prompt] = chunks[0].prompt_logprobs
        choice.add([without_output(chunk) for chunk in chunks] if self._request.prompt_only else chunks)
        frames = [self._choice_frame(choice, made) for made in self._flush(choice)]
        request = self._request
        has_more = request.returns_logprobs or request.prompt_only or request.continuous_usage  # than text, later
        if choice.started and not has_more and not choice.text_only:
            choice.text_only, head, seed = True, dumps(self._head)[:-1], choice.seed
            choice.frame_start = f'data: {head},"choices":[{{"index":{choice.number},{self.text_prefix}'
            choice.frame_middle = f'{self.text_suffix},"logprobs":null,"finish_reason":null,"seed":{seed},"token_ids":['
        return "".join(frames).encode()

    def _text_frame(self, choice: StreamChoice, text: str) -> bytes:
        ids = choice.token_ids
        joined = ids[0] if len(ids) == 1 else ",".join(map(str, ids))
        choice.token_ids = []
        return f"{choice.frame_start}{quoted(text)}{choice.frame_middle}{joined}{self._frame_end}".encode()


def _frame(body: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(body)}\n\n".encode()


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
            content = [self._tokens.step(step) for step in (choice.logprobs if steps else [])]
            logprobs = {"content": content, "refusal": None} if content else None
            yield self._choice(choice, {"delta": delta}, len(choice.token_ids), logprobs, last=False)
            choice.clear(len(choice.token_ids))
        if last:
            yield self._choice(choice, {"delta": {}}, len(choice.token_ids), None, last=True)
            choice.clear(len(choice.token_ids))

    def _deltas(self, choice: StreamChoice) -> list[JSON]:
        """Take what is to be sent, each part as a delta."""
        open_call, calls = split_calls(choice.tool_calls)
        deltas = [_call(call) for call in open_call]
        if choice.reasoning and self._request.include_reasoning:
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


@final
class CompletionStream(ResponseStream):
    """The stream of ``/v1/completions``; with echo it starts with the prompt."""

    kind = "text_completion"
    text_prefix, text_suffix, prompt_in_choice = '"text":', "", True

    def __init__(
        self, head: ResponseHead, request: ParsedRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        super().__init__(head, request, prompts, tokenizer)
        self._echoes = [Echo(self._tokens, index, ids) for index, ids in enumerate(prompts) if request.echo]

    def _offset_counter(self, prompt_ids: Sequence[int]) -> TextOffsets | None:
        return TextOffsets(self._tokens, prompt_ids) if self._request.returns_logprobs else None

    def _flush(self, choice: StreamChoice) -> Iterator[JSON]:
        last, with_logprobs = choice.finish_reason is not None, self._request.returns_logprobs
        echo = self._echoes[choice.prompt] if self._echoes else None
        prefix = "" if echo is None else echo.text
        text = choice.text if choice.started else prefix + choice.text
        end = choice.sent + len(choice.text)
        # A token beyond the final text may still turn out to start at its end, so it is not sent yet.
        count = bisect_right(choice.text_offsets, end) if with_logprobs and not last else len(choice.token_ids)
        if not (text or last or (with_logprobs and count)):
            return
        logprobs = None
        if with_logprobs and (count or not choice.started):
            offsets = [len(prefix) + min(start, end) for start in choice.text_offsets[:count]]
            logprobs = self._tokens.columns(choice.token_ids[:count], choice.logprobs[:count], offsets)
            if echo is not None and not choice.started:
                logprobs = echo.prepend_logprobs(logprobs, self._prompt_logprobs[choice.prompt])
        yield self._choice(choice, {"text": text}, count, logprobs, last=last)
        choice.clear(count)


def split_calls(calls: Sequence[ToolCallDelta]) -> tuple[Sequence[ToolCallDelta], Sequence[ToolCallDelta]]:
    """Split the deltas of a chunk: those of the call that is open come before its text, those of new calls after it."""
    count = next((number for number, call in enumerate(calls) if call.name is not None), len(calls))
    return calls[:count], calls[count:]
