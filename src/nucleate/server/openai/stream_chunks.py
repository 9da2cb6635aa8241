"""Pieces of answers to the frames of a stream, as OpenAI's clients expect them. Knows no sockets and no clocks.

A frame is a server-sent event whose data is JSON, a *chunk*. This runs for every token of every stream, so a frame that
only brings more text is put together from parts that are ready; every other one is written by ``json``. Put together,
the chunks of a stream say what the whole body would.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, ClassVar, final

from nucleate.outputs import CompletionChunk, FinishReason, PromptLogprobs, StepLogprobs, Usage, Validation
from nucleate.server.openai.echo import Echo
from nucleate.server.openai.logprobs import JSON, Offsets, columns, prompt_body, step_body
from nucleate.server.openai.requests import ParsedRequest
from nucleate.server.openai.responses import ResponseHead, unsaid, usage_body, validation_body
from nucleate.tokenization.tokenizer import Tokenizer

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over."""
DONE = b"data: [DONE]\n\n"
"""The last frame of every stream."""


def error_frame(body: Mapping[str, Any]) -> bytes:
    """The end of a stream that failed. body: see ``error_body``."""
    return _frame(body) + DONE


@dataclass(eq=False, slots=True)
class StreamChoice:
    """One answer on its way out, and what of it waits to be told."""

    number: int  #: in the whole answer
    place: int  #: which prompt
    first: bool  #: of those to this prompt
    offsets: Offsets | None = None  #: where tokens have to tell where they begin
    seed: int = 0
    begun: bool = False  #: whether a frame of it is out
    shown: int = 0  #: characters of its own in frames, as far as ``offsets`` needs them
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    steps: list[StepLogprobs] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  #: where these tokens begin, see ``offsets``
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    validation: Validation | None = None
    plain: bool = False  #: whether a frame brings nothing but text and token ids, between these parts:
    before: str = ""
    between: str = ""

    def take(self, pieces: Sequence[CompletionChunk]) -> None:
        """What is new."""
        for piece in pieces:
            self.token_ids += piece.token_ids
            self.steps += piece.logprobs or ()
            if self.offsets is not None:
                self.places += map(self.offsets.push, piece.token_ids)
        last = pieces[-1]
        self.text += "".join([piece.text for piece in pieces])
        self.seed, self.stop_reason, self.validation = last.seed, last.stop_reason, last.validation
        self.finish_reason = None if last.finish_reason == "error" else last.finish_reason

    def leave(self, count: int) -> None:
        """The text, and so many of the tokens, are told."""
        self.shown += len(self.text)
        self.begun, self.text = True, ""
        del self.token_ids[:count], self.steps[:count], self.places[:count]


class ResponseStream(ABC):
    """The stream of one request.

    prompts: the token ids of each prompt, in order. Making one reads the prompts if the request asks for echo, or for
    logprobs in completions: of long ones, not where others wait.
    """

    kind: ClassVar[str]
    opening: ClassVar[str]  #: what a choice has before a quoted text
    closing: ClassVar[str]  #: and after it

    def __init__(
        self, head: ResponseHead, asked: ParsedRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        self._asked, self._tokenizer, n = asked, tokenizer, asked.params.n
        self._prompt_logprobs: list[PromptLogprobs | None] = [None] * len(prompts)
        self._head = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model}
        self._usage = {"usage": None} if asked.include_usage else {}
        self._close = ']}],"usage":null}\n\n' if asked.include_usage else "]}]}\n\n"
        self._choices = [
            [StreamChoice(place * n + index, place, index == 0, self._offsets(ids)) for index in range(n)]
            for place, ids in enumerate(prompts)
        ]

    @abstractmethod
    def _offsets(self, prompt_ids: Sequence[int]) -> Offsets | None:
        """What says where the tokens of an answer begin, if that is to be told."""

    @abstractmethod
    def _tell(self, choice: StreamChoice) -> Iterator[JSON]:
        """The choice in each of the frames that it is time for. What is in them waits no longer."""

    @final
    def pieces(self, place: int, pieces: Sequence[CompletionChunk]) -> bytes:
        """The frames for new pieces of the answers to a prompt, those of an answer in their order.

        place: which prompt. Several pieces of an answer make one frame; token ids without text wait for the next one.
        An error does not end a choice: ``error_frame`` ends the stream.
        """
        if len(pieces) == 1:
            piece = pieces[0]
            choice = self._choices[place][piece.index]
            if choice.plain and piece.finish_reason is None:
                choice.token_ids += piece.token_ids
                return self._plain(choice, piece.text) if piece.text else b""
            return self._frames(choice, pieces)
        answers: dict[int, list[CompletionChunk]] = {}
        for piece in pieces:
            answers.setdefault(piece.index, []).append(piece)
        return b"".join([self._frames(self._choices[place][index], own) for index, own in answers.items()])

    @final
    def end(self, usage: Usage) -> bytes:
        """The end of a stream whose answers are all told. usage: tokens that were read and made."""
        if not self._asked.include_usage:
            return DONE
        usage = Usage(usage.prompt_tokens, 0) if self._asked.silent else usage
        return _frame({**self._head, "choices": [], "usage": usage_body(usage)}) + DONE

    @final
    def _choice(self, choice: StreamChoice, said: JSON, count: int, logprobs: JSON | None, *, last: bool) -> JSON:
        """A choice as a frame has it. said: its text; count: tokens that are in; last: whether it ends here."""
        made = {
            "index": choice.number,
            **said,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if last else None,
            "seed": choice.seed,
            "token_ids": choice.token_ids[:count],
        }
        if last:
            made |= {"stop_reason": choice.stop_reason, **validation_body(choice.validation)}
        told, top = self._prompt_logprobs[choice.place], self._asked.params.prompt_logprobs
        if choice.first and not choice.begun and told is not None and top is not None:
            made["prompt_logprobs"] = prompt_body(told, top, self._tokenizer)
        return made

    def _frames(self, choice: StreamChoice, pieces: Sequence[CompletionChunk]) -> bytes:
        if pieces[0].prompt_logprobs is not None:
            self._prompt_logprobs[choice.place] = pieces[0].prompt_logprobs
        choice.take([unsaid(piece) for piece in pieces] if self._asked.silent else pieces)
        frames = [_frame({**self._head, "choices": [made], **self._usage}) for made in self._tell(choice)]
        if choice.begun and not (choice.plain or self._asked.tells_logprobs or self._asked.silent):
            choice.plain = True
            choice.before = f'data: {_json(self._head)[:-1]},"choices":[{{"index":{choice.number},{self.opening}'
            choice.between = f'{self.closing},"logprobs":null,"finish_reason":null,"seed":{choice.seed},"token_ids":['
        return b"".join(frames)

    def _plain(self, choice: StreamChoice, text: str) -> bytes:
        ids = choice.token_ids
        said = ids[0] if len(ids) == 1 else ",".join(map(str, ids))
        choice.token_ids = []
        return f"{choice.before}{quoted(text)}{choice.between}{said}{self._close}".encode()


@final
class CompletionStream(ResponseStream):
    """The stream of a request for completions: the prompt first, if it asks for echo."""

    kind = "text_completion"
    opening, closing = '"text":', ""

    def __init__(
        self, head: ResponseHead, asked: ParsedRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
    ) -> None:
        super().__init__(head, asked, prompts, tokenizer)
        self._echoes = [Echo(asked, place, ids, tokenizer) for place, ids in enumerate(prompts)]

    def _offsets(self, prompt_ids: Sequence[int]) -> Offsets | None:
        return Offsets(self._asked, prompt_ids, self._tokenizer) if self._asked.tells_logprobs else None

    def _tell(self, choice: StreamChoice) -> Iterator[JSON]:
        echo, last, tells = self._echoes[choice.place], choice.finish_reason is not None, self._asked.tells_logprobs
        text = choice.text if choice.begun else echo.text + choice.text
        most = choice.shown + len(choice.text)
        # A token beyond the text that is out may still turn out to begin at its end, so it waits too.
        count = bisect_right(choice.places, most) if tells and not last else len(choice.token_ids)
        if not (text or last or (tells and count)):
            return
        logprobs = None
        if tells and (count or not choice.begun):
            places = [len(echo.text) + min(place, most) for place in choice.places[:count]]
            logprobs = columns(self._asked, choice.token_ids[:count], choice.steps[:count], places, self._tokenizer)
            if not choice.begun:
                logprobs = echo.before(logprobs, self._prompt_logprobs[choice.place])
        yield self._choice(choice, {"text": text}, count, logprobs, last=last)
        choice.leave(count)


@final
class ChatStream(ResponseStream):
    """The stream of a request for an answer to a conversation: of each choice its role, its content, its end."""

    kind = "chat.completion.chunk"
    opening, closing = '"delta":{"content":', "}"

    def _offsets(self, prompt_ids: Sequence[int]) -> Offsets | None:
        return None

    def _tell(self, choice: StreamChoice) -> Iterator[JSON]:
        last = choice.finish_reason is not None
        told = choice.steps if self._asked.tells_logprobs else []
        says = bool(choice.text or told)
        if not (says or last):
            return
        if not choice.begun:
            yield self._choice(choice, {"delta": {"role": "assistant", "content": ""}}, 0, None, last=False)
            choice.begun = True
        if says:
            content = [step_body(step, self._tokenizer) for step in told]
            logprobs = {"content": content, "refusal": None} if content else None
            said = {"delta": {"content": choice.text}}
            yield self._choice(choice, said, len(choice.token_ids), logprobs, last=False)
            choice.leave(len(choice.token_ids))
        if last:
            yield self._choice(choice, {"delta": {}}, len(choice.token_ids), None, last=True)
            choice.leave(len(choice.token_ids))


def _frame(body: Mapping[str, Any]) -> bytes:
    return f"data: {_json(body)}\n\n".encode()


_json = json.JSONEncoder(separators=(",", ":")).encode
