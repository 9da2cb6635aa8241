"""The service behind all endpoints: the model, its engine, the limits and the requests in flight.

Work before the first token (JSON, chat template, tokenization) and after the last one runs on a few worker threads, so
that it does not block the event loop. Grammars are compiled on a separate thread.
"""

from __future__ import annotations

import asyncio
import json
import platform
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from nucleate import __version__
from nucleate.chat.chat_format import RenderedChat
from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.async_engine import AsyncEngine
from nucleate.engine.beam_params import BeamRequest
from nucleate.engine.beam_scheduler import ValidatedBeamRequest
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request, ValidatedRequest
from nucleate.llm import LLM
from nucleate.llm.chat_request import chat_request
from nucleate.models.protocol import ModelError
from nucleate.parameters.converters import shown
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError, read_json
from nucleate.sampling_params import SamplingParams
from nucleate.server.chat_api import ChatAPI, ChatEncoder, EncoderInput, drop_unknown
from nucleate.server.http_errors import HTTPError, shutting_down, timed_out, unavailable
from nucleate.server.limits import ServerLimits
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, ENDPOINTS, INVOCATIONS, LONG_NAMES_CHAT, TEXT
from nucleate.server.openai.fields import reject_deep_nesting
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.response_format import translate_errors
from nucleate.server.openai.responses import ResponseHead
from nucleate.structured_output.spec import StructuredOutputs


class EncodedPrompt(NamedTuple):
    """A prompt as token ids. chat: the chat that it was made from."""

    token_ids: Sequence[int]
    chat: RenderedChat | None = None

    def engine_request(self, parsed: ParsedRequest, prepare: Callable[[Request], object]) -> Request | BeamRequest:
        """Return the engine request. prepare: compiles a constraint, see ``chat_request``. Raises ParameterError."""
        if self.chat is None or parsed.beam_params is not None:
            return parsed.engine_request(self.token_ids)
        request = chat_request(self.chat, self.token_ids, parsed.engine_params, prepare)
        return replace(request, priority=parsed.priority) if parsed.priority else request


@dataclass(frozen=True)
class GenerationCall:
    """A parsed request body and the engine requests made from it."""

    head: ResponseHead
    parsed: ParsedRequest
    prompts: Sequence[EncodedPrompt]
    prepared: Sequence[ValidatedRequest | ValidatedBeamRequest] = ()  #: the request of each, validated by the engine
    ignored_fields: Sequence[str] = ()  #: names of unknown fields

    @property
    def prompt_token_ids(self) -> list[Sequence[int]]:
        return [one.token_ids for one in self.prompts]

    @property
    def constraint(self) -> tuple[str, str] | None:
        """The kind of structured output, one of ``spec.KINDS``, and the body field that sets it; or None."""
        use, spec = self.parsed.tool_use, self.parsed.params.structured_outputs
        if use.tools and use.callable_tools:
            return "structural_tag", "tools"
        return None if spec is None else (spec.kind, self.parsed.requested_format.field)

    def chunk_parser(self) -> ChunkParser | None:
        """Return a parser for the chunks of a chat; None if they are text only."""
        chat = self.prompts[0].chat
        return None if chat is None else chat.chunk_parser(self.parsed.params.max_reasoning_tokens)


def encode_prompts(llm: LLM, parsed: ParsedRequest, max_model_len: int) -> list[EncodedPrompt]:
    """Return the prompts, or the chat, as token ids.

    Raises HTTPError if a prompt fills the context, or if the body sets ``max_tokens`` to more than fits after it;
    ParameterError, ModelError.
    """
    if parsed.messages is not None:
        options = parsed.template_options
        chat = llm.render_chat(parsed.messages, parsed.tool_use, options)
        prompts = [EncodedPrompt(chat.encode(add_special_tokens=options.add_special_tokens), chat)]
    else:
        prompts = [EncodedPrompt(llm.encode(prompt, parsed.suffix)) for prompt in parsed.prompts]
    max_tokens, field = parsed.params.max_tokens, parsed.max_tokens_field
    if parsed.truncation is not None:
        room = max_model_len - (max_tokens or 1)
        prompts = [prompt._replace(token_ids=parsed.truncation.apply([*prompt.token_ids], room)) for prompt in prompts]
    limit = f"This model's maximum context length is {max_model_len} tokens for prompt and completion"
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest >= max_model_len + parsed.prompt_only:  # without an output, the prompt may fill the context
        # clients recognize the code, or words of OpenAI's and Anthropic's messages
        param = "prompt" if parsed.messages is None else "messages"
        message = f"{limit}, but the prompt is too long: {longest} tokens."
        raise HTTPError(400, message, code="context_length_exceeded", param=param)
    if field is not None and max_tokens is not None and longest + max_tokens > max_model_len:
        message = f"{limit}, but the prompt has {longest} tokens and {field} is {max_tokens}."
        hint = f"Set {field} to at most {max_model_len - longest}."
        raise HTTPError(400, f"{message} {hint}", code="context_length_exceeded", param=field)
    return prompts


def with_fill_stops(llm: LLM, parsed: ParsedRequest) -> ParsedRequest:
    """Return a request; one with a suffix also ends at the model's fill-in-the-middle tokens. Raises ParameterError."""
    return parsed if parsed.suffix is None else replace(parsed, params=llm.fill_params(parsed.params))


T = TypeVar("T")

WORKER_THREADS = 4
"""Threads for work before the first token and after the last."""
PREPARE_TIMEOUT_SECONDS = 10.0
"""Maximum time for parsing, the chat template, tokenization and grammar compilation, each."""
IDLE_SECONDS = 1.0
"""How long to wait after the start, and between looks, for a moment without requests."""
REGEX_SECONDS = 0.1
"""Time budget of a sequence for its stop patterns: other sequences wait for them."""


@with_suggestions
@dataclass(frozen=True)
class ServiceOptions:
    """What the operator decides about requests, besides the limits.

    aliases: further names of the model. root: the name under which the model was loaded. ignore_unknown_fields: report
    unknown fields of a body instead of rejecting it. allow_priority: requests may set ``priority``. allow_pull: clients
    may download models from the Hugging Face hub to the cache.
    """

    aliases: Sequence[str] = ()
    root: str | None = None
    ignore_unknown_fields: bool = False
    allow_priority: bool = False
    allow_pull: bool = False


@with_suggestions
class Service:
    """One model behind all endpoints.

    name: the model name in responses, and one of those in requests. defaults: the parameters that a request does not
    set. The model runs once during construction, so that no request pays for its first, slower forward pass. Raises
    ModelError if the model fails, and ParameterError for defaults beyond the limits or that cannot be enforced.
    """

    def __init__(
        self,
        llm: LLM,
        engine: Engine,
        name: str,
        defaults: SamplingParams,
        limits: ServerLimits,
        options: ServiceOptions = ServiceOptions(),  # immutable
    ) -> None:
        self.llm, self.name, self.limits, self.options = llm, name, limits, options
        self.names = (name, *options.aliases)
        self.fingerprint = system_fingerprint(llm, defaults, batch_invariant=engine.batch_invariant)
        self.max_model_len, self.vocab_size = engine.context_length, engine.vocab_size
        self._max_num_seqs = engine.max_num_seqs
        warm_up(engine)
        self.engine = AsyncEngine(engine)
        self.created = int(time.time())
        self.draining = False  #: new requests are rejected
        self.aborted = False  #: requests in flight were aborted
        self.num_requests = 0  #: in flight
        self.num_sequences = 0  #: running and queued
        self.defaults = defaults
        self._endpoints = {
            url: limits.cap_max_tokens(endpoint, self.vocab_size)
            for url, endpoint in {**ENDPOINTS, TEXT.url: TEXT, LONG_NAMES_CHAT.url: LONG_NAMES_CHAT}.items()
        }
        limits.check_body(defaults.to_dict(), self.vocab_size)
        if defaults.structured_outputs is not None:
            engine.prepare(Request(_shortest_prompt(engine), defaults))
        self._workers = ThreadPoolExecutor(WORKER_THREADS, "nucleate-text")
        self._compiler = ThreadPoolExecutor(1, "nucleate-grammars")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine within this context."""
        async with self.engine:
            preparing = asyncio.create_task(self._prepare_grammars())
            try:
                yield
            finally:
                preparing.cancel()
                for threads in (self._workers, self._compiler):
                    threads.shutdown(wait=False, cancel_futures=True)

    async def _prepare_grammars(self) -> None:
        """Prepare the vocabulary for grammars when no request is in flight: a large one blocks all threads for seconds.

        A first request with a constraint does not wait for that moment.
        """
        busy = True
        while busy:
            await asyncio.sleep(IDLE_SECONDS)
            busy = self.num_requests > 0
        request = Request([0], SamplingParams(structured_outputs=StructuredOutputs(json_object=True)))
        with suppress(ParameterError, HTTPError):  # requests get the error, such as that llguidance is missing
            await self.run_in_thread(lambda: self.engine.prepare(request), compiling=True, has_timeout=False)

    def drain(self) -> None:
        self.draining = True

    def abort(self) -> None:
        self.draining = self.aborted = True
        self.engine.abort_all()

    def check_available(self) -> None:
        """Raise HTTPError or EngineStoppedError if requests cannot be accepted."""
        if self.draining:
            raise shutting_down()
        if self.engine.stopped is not None:
            raise self.engine.stopped

    @contextmanager
    def request_slot(self) -> Iterator[None]:
        """Count a request as in flight within this context. Raises HTTPError if there are too many."""
        self.check_available()
        if self.num_requests >= self.limits.max_concurrent_requests:
            most = self.limits.max_concurrent_requests
            message = f"Server is at capacity: {most} requests are in flight. Retry after 1 s."
            raise unavailable(message, code="too_many_requests")
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextmanager
    def queue_slots(self, counts: Sequence[int]) -> Iterator[Callable[[int], None]]:
        """Count the sequences of a request as running or queued. Raises HTTPError if there are too many.

        counts: sequences of each prompt. Yields a function that frees the slots of one prompt.
        """
        self.check_available()
        count = sum(counts)
        most = self._max_num_seqs + self.limits.max_queued_seqs
        if self.num_sequences and self.num_sequences + count > most:
            running = min(self.num_sequences, self._max_num_seqs)
            own = "1 sequence" if count == 1 else f"{count} sequences"
            now = f"{running} are running and {self.num_sequences - running} queued, of at most {most}"
            message = f"Server is at capacity: the request needs {own}, but {now}. Retry after 1 s."
            raise unavailable(message, code="queue_full")
        left = dict(enumerate(counts))
        self.num_sequences += count

        def release(prompt: int) -> None:
            self.num_sequences -= left.pop(prompt)

        try:
            yield release
        finally:
            self.num_sequences -= sum(left.values())

    async def run_in_thread(self, work: Callable[[], T], *, compiling: bool = False, has_timeout: bool = True) -> T:
        """Run a function on a worker thread, or on the grammar thread. Raises HTTPError if it takes too long."""
        threads = self._compiler if compiling else self._workers
        try:
            async with asyncio.timeout(PREPARE_TIMEOUT_SECONDS if has_timeout else None):
                return await asyncio.get_running_loop().run_in_executor(threads, reject_deep_nesting(work))
        except TimeoutError:
            raise timed_out("Grammar compilation" if compiling else "Processing", PREPARE_TIMEOUT_SECONDS) from None

    def parse(self, url: str, data: bytes) -> GenerationCall:
        """Parse a body. With structured output, ``prepare`` remains to be called.

        Raises ParameterError, ModelError, HTTPError.
        """
        decoded = self.decode_body(data)
        if url == INVOCATIONS:
            url = CHAT.url if isinstance(decoded, Mapping) and "messages" in decoded else COMPLETIONS.url
        body, ignored = self.known_fields(decoded, self._endpoints[url].field_names)
        return replace(self._parse_body(url, body), ignored_fields=ignored)

    def parse_other(self, api: ChatAPI, data: bytes) -> tuple[GenerationCall, Callable[[EncoderInput], ChatEncoder]]:
        """Parse a body of another API as one of OpenAI's. Returns the call, and what makes the encoder of its response.

        Raises ParameterError, ModelError, HTTPError.
        """
        body, ignored = self.known_fields(_decode(data), api.known, api.known_options)
        translation = api.translate(body)
        self.limits.check_body(translation.body, self.vocab_size)
        call = self._parse_body(translation.url, {**translation.body, "n": 1})  # also if the defaults have more
        return replace(call, ignored_fields=ignored), translation.new_encoder

    def known_fields(
        self, body: object, known: Collection[str], known_options: Collection[str] = ()
    ) -> tuple[object, list[str]]:
        """Return a body without its unknown fields and options, if they are ignored, and their names."""
        return drop_unknown(body, known, known_options) if self.options.ignore_unknown_fields else (body, [])

    def count_chat_tokens(self, body: object) -> int:
        """Return the number of tokens in the prompt of a chat. Raises ParameterError, ModelError, HTTPError."""
        parsed = read_body(self._endpoints[LONG_NAMES_CHAT.url], body, self.defaults)
        self.check_model(parsed.model)
        return len(self.llm.encode_chat(parsed.messages or (), parsed.template_options, parsed.tool_use))

    def _parse_body(self, url: str, body: object) -> GenerationCall:
        parsed = read_body(self._endpoints[url], body, self.defaults)
        parsed = with_fill_stops(self.llm, parsed)
        self.check_model(parsed.model)
        if parsed.priority and not self.options.allow_priority:
            message = f"priority must be 0 on this server (see --scheduling-policy), got {shown(parsed.priority)}"
            raise ParameterError("priority", message)
        prompts = encode_prompts(self.llm, parsed, self.max_model_len)
        self.limits.check_request(parsed, [prompt.token_ids for prompt in prompts], self.max_model_len)
        prefix = "cmpl" if parsed.messages is None else "chatcmpl"
        head = ResponseHead(f"{prefix}-{uuid4().hex}", int(time.time()), self.name, self.fingerprint)
        call = GenerationCall(head, parsed, prompts)
        return self.prepare(call) if call.constraint is None else call

    def prepare(self, call: GenerationCall) -> GenerationCall:
        """Validate the requests of a call and compile its grammar, which may take a second. Raises ParameterError."""
        with nullcontext() if call.constraint is None else translate_errors(call.parsed.requested_format):
            prepare = self.engine.prepare
            requests = [prompt.engine_request(call.parsed, prepare) for prompt in call.prompts]
            return replace(call, prepared=[prepare(request) for request in requests])

    def decode_body(self, data: bytes) -> object:
        """Decode the JSON of a body and check its sizes. Raises ParameterError, HTTPError."""
        body = _decode(data)
        self.limits.check_body(body, self.vocab_size)
        return body

    def check_model(self, model: str | None) -> None:
        """Raise HTTPError if a request names another model."""
        if model is not None and model not in self.names:
            served = " or ".join(map(shown, self.names))
            message = f"The model {shown(model)} does not exist. This server serves {served}."
            raise HTTPError(404, message, code="model_not_found", param="model")


def _decode(data: bytes) -> object:
    """Decode the JSON of a body. Raises ParameterError, HTTPError."""
    try:
        return read_json(data.decode(), "body")
    except UnicodeDecodeError as error:
        message = f"The request body must be UTF-8; byte {error.start} is invalid."
        raise HTTPError(400, message, param="body") from None


def system_fingerprint(llm: LLM, defaults: SamplingParams, *, batch_invariant: bool) -> str:
    """Identify what the output of a request depends on besides its fields and its seed.

    Covers the version and those of the libraries that run models, the processor, the files of the model by name and
    size, how it runs, and the default parameters. defaults: the parameters that a request does not set.
    batch_invariant: whether the output does not depend on other requests; if not, they are what is not covered.
    """
    model, folder, speculation = llm.model, llm.folder, llm.speculative_config
    files = [] if folder is None else sorted(folder.iterdir()) if folder.is_dir() else [folder]
    parts = [
        *(type(model).__name__, model.runtime, model.vocab_size, model.context_length),
        [(file.name, file.stat().st_size) for file in files if file.is_file()],
        *(str(getattr(model, name, None)) for name in ("dtype", "device")),
        None if speculation is None or speculation.acceptance_rule == "coupled" else repr(speculation),
        repr(llm.watermark),
        llm.tokenizer.chat_template,
        defaults.to_json(),
        _processor(),
        [version(package) for package in PACKAGES.get(model.runtime.partition(" ")[0], ())],
        [getattr(model, name, None) for name in ("row_multiple", "least_rows")] if batch_invariant else None,
        getattr(model, "properties", None),
        _text_options(getattr(model, "options", None)),
    ]
    digest = sha256(json.dumps(parts, default=str).encode(errors="replace")).hexdigest()
    return f"nucleate-{__version__}-{digest[:8]}"


PACKAGES = {
    "numpy": ("numpy",),
    "torch": ("torch", "transformers"),
    "llama.cpp": ("llama-cpp-python",),
    "openvino": ("openvino",),
}
"""The packages of each runtime."""


def _processor() -> str:
    """The model of the processor: kernels differ between them."""
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
        if found:
            return found[1]
    return f"{platform.machine()} {platform.processor()}"


def _text_options(options: Any) -> list[Any]:
    """The options of a GGUF model that its logits depend on."""
    names = ("n_gpu_layers", "cache_type_k", "cache_type_v", "flash_attn")
    return [getattr(options, name, None) for name in names]


def _shortest_prompt(engine: Engine) -> list[int]:
    """Return a prompt that is valid for any model."""
    return [min(engine.tokenizer.eos_token_ids, default=0)]


def warm_up(engine: Engine) -> None:
    """Generate two sequences in one batch: a single one may take another code path in the model."""
    params = SamplingParams(n=2, max_tokens=2, ignore_eos=True)
    engine.add(Request(_shortest_prompt(engine), params))
    while len(engine):
        for output in engine.step():
            if output.chunk.finish_reason == "error":
                raise ModelError(f"the model cannot be run: {output.chunk.stop_reason}")
