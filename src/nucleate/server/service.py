"""Service: what all routes share: the model with its engine, the limits, and who is at work. Of HTTP it knows refusals.

What takes time before the first token (JSON, the chat template, tokenization) is done on a few threads, so that the
event loop is free for those who are being answered. Forms of text have a thread of their own, on which they wait for
each other only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TypeVar
from uuid import uuid4

from nucleate.engine.async_engine import AsyncEngine
from nucleate.engine.beam.params import BeamRequest
from nucleate.engine.beam.scheduling import ValidatedBeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.llm import LLM
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError, read_json
from nucleate.sampling_params import SamplingParams
from nucleate.server.http_errors import HTTPError, closing, late, no_model, overloaded, too_long
from nucleate.server.limits import ServerLimits
from nucleate.server.openai.requests import CHAT, ENDPOINTS, ParsedRequest, read_body
from nucleate.server.openai.response_format import named
from nucleate.server.openai.responses import ResponseHead
from nucleate.structured_output.spec import StructuredOutputs

T = TypeVar("T")

THREADS = 4
"""For what is done before the first token and after the last."""
PREPARE_SECONDS = 10.0
"""For a body to be read, the chat template to be filled and tokens to be made of it."""
REGEX_SECONDS = 0.1
"""For the stop patterns of an answer, see ``tokenize_routes.stop``: other answers wait for them."""


@dataclass(frozen=True)
class EngineCall:
    """A body that was read: what it asks for, and what the engine gets."""

    head: ResponseHead
    asked: ParsedRequest
    requests: Sequence[Request | BeamRequest]  #: one per prompt
    prepared: Sequence[
        ValidatedRequest | ValidatedBeamRequest
    ] = ()  #: the same, as soon as the engine has looked at them

    @property
    def prompts(self) -> list[Sequence[int]]:
        """The token ids of each prompt."""
        return [one.prompt_ids for one in self.requests]

    @property
    def form(self) -> str | None:
        """The kind of form that the answers are to have, one of ``spec.KINDS``; None: none."""
        structured_outputs = self.asked.params.structured_outputs
        return None if structured_outputs is None else structured_outputs.kind


class Service:
    """One model behind all routes.

    name: what requests call the model, and answers do. defaults: the parameters that a request does not say. The model
    is run once, so that nobody has to wait for what its first forward takes longer, and its vocabulary made ready for
    forms. Raises ModelError if it fails, ParameterError for defaults beyond the limits, or whose form cannot be held.
    """

    def __init__(self, llm: LLM, engine: Engine, name: str, defaults: SamplingParams, limits: ServerLimits) -> None:
        self.llm, self.name, self.limits = llm, name, limits
        self.max_model_len, self.vocab_size = engine.context_length, engine.vocab_size
        self._max_num_seqs = engine.max_num_seqs
        _try(engine)
        self.engine = AsyncEngine(engine)
        self.created = int(time.time())
        self.draining = False  #: no more requests
        self.cut = False  #: those at work are ended
        self.at_work = 0  #: requests
        self.answers = 0  #: at work and waiting
        self._defaults = defaults
        self._endpoints = {url: limits.endpoint(endpoint) for url, endpoint in ENDPOINTS.items()}
        limits.check_body(defaults.to_dict(), self.vocab_size)
        _try_forms(engine, defaults)
        self._threads = ThreadPoolExecutor(THREADS, "nucleate-text")
        self._forms = ThreadPoolExecutor(1, "nucleate-forms")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While the engine runs."""
        async with self.engine:
            try:
                yield
            finally:
                for threads in (self._threads, self._forms):
                    threads.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Take no more requests."""
        self.draining = True

    def end(self) -> None:
        """End the requests at work."""
        self.draining = self.cut = True
        self.engine.abort_all()

    def check(self) -> None:
        """Raise Refusal if requests cannot be taken."""
        if self.draining:
            raise closing()
        if self.engine.stopped is not None:
            raise self.engine.stopped

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests at work. Raises Refusal if there is none."""
        self.check()
        if self.at_work >= self.limits.streams:
            raise overloaded(f"{self.at_work} requests are at work; come again later", "too_many_requests")
        self.at_work += 1
        try:
            yield
        finally:
            self.at_work -= 1

    @contextmanager
    def queue(self, answers: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Places in the queue for so many answers to each of some prompts. Raises Refusal if there are none.

        What it gives is called with the number of a prompt whose answers have ended.
        """
        self.check()
        count, room = sum(answers), self._max_num_seqs + self.limits.queue
        if self.answers and self.answers + count > room:
            waiting = max(0, self.answers - self._max_num_seqs)
            raise overloaded(f"{waiting} answers wait for their turn; come again later", "queue_full")
        left = dict(enumerate(answers))
        self.answers += count

        def leave(place: int) -> None:
            self.answers -= left.pop(place)

        try:
            yield leave
        finally:
            self.answers -= sum(left.values())

    async def aside(self, work: Callable[[], T], *, form: bool = False) -> T:
        """Do something on another thread, within the time for that; form: on that of forms. Raises Refusal."""
        threads = self._forms if form else self._threads
        try:
            async with asyncio.timeout(PREPARE_SECONDS):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except TimeoutError:
            raise late("the text could not be worked on", PREPARE_SECONDS) from None

    def call(self, url: str, data: bytes) -> EngineCall:
        """Read a body. If it says a form, ``prepare`` is left to do. Raises ParameterError, ModelError, Refusal."""
        endpoint = self._endpoints[url]
        body = self.read(data)
        asked = read_body(endpoint, body, self._defaults)
        self.check_model(asked.model)
        if asked.messages is not None:
            prompts = [self.llm.encode_chat(asked.messages, asked.template)]
        else:
            prompts = [self.llm.encode(prompt) for prompt in asked.prompts]
        longest = max(map(len, prompts))
        if longest >= self.max_model_len:
            raise too_long("prompt" if asked.messages is None else "messages", longest, self.max_model_len)
        self.limits.check(asked, prompts, self.max_model_len)
        kind = "chatcmpl" if url == CHAT.url else "cmpl"
        head = ResponseHead(f"{kind}-{uuid4().hex}", int(time.time()), self.name)
        made = EngineCall(head, asked, [asked.request(ids) for ids in prompts])
        return self.prepare(made) if made.form is None else made

    def prepare(self, call: EngineCall) -> EngineCall:
        """The same call, ready for the engine. A form may take a second. Raises ParameterError."""
        with named(call.asked.format):
            return replace(call, prepared=[self.engine.prepare(request) for request in call.requests])

    def read(self, data: bytes) -> object:
        """The JSON of a body, which is not too large in any of its fields. Raises ParameterError, Refusal."""
        try:
            body = read_json(data.decode(), "body")
        except UnicodeDecodeError as error:
            raise HTTPError(400, f"the body must be UTF-8, but byte {error.start} is not", param="body") from None
        self.limits.check_body(body, self.vocab_size)
        return body

    def check_model(self, asked: str | None) -> None:
        """Raise Refusal if a request is for another model."""
        if asked not in (None, self.name):
            raise no_model(asked, self.name)


def _shortest(engine: Engine) -> list[int]:
    """A prompt that any model takes."""
    return [min(engine.tokenizer.eos_token_ids, default=0)]


def _try(engine: Engine) -> None:
    """Two answers side by side, since one alone may take another way through the model."""
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    engine.add(Request(_shortest(engine), params))
    while len(engine):
        for event in engine.step():
            if event.piece.finish_reason == "error":
                raise ModelError(f"the model cannot be run: {event.piece.stop_reason}")


def _try_forms(engine: Engine, defaults: SamplingParams) -> None:
    """A large vocabulary is made ready in seconds in which no other thread runs: now, not under streams."""
    with suppress(ParameterError):  # without the library, or for this tokenizer: requests are told
        engine.prepare(
            Request(_shortest(engine), SamplingParams(structured_outputs=StructuredOutputs(json_object=True)))
        )
    if defaults.structured_outputs is not None:
        engine.prepare(Request(_shortest(engine), defaults))
