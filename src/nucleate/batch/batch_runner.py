"""Runs the lines of a batch on an engine: submits their prompts, and returns a result per line."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from nucleate.batch.batch_records import BatchRequest, LineError, Record, error_record, success_record
from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.llm import LLM
from nucleate.models.protocol import ModelError
from nucleate.outputs import Completion, CompletionChunk
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.server.http_errors import HTTPError, generation_failed
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, PLAIN
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.response_format import translate_errors
from nucleate.server.service import EncodedPrompt, encode_prompts, with_fill_stops


class LineResult(NamedTuple):
    """A finished line. failure: why it failed; tokens: the generated ones."""

    entry: BatchRequest
    record: Record
    failure: LineError | None = None
    tokens: int = 0


def line_seed(line_id: str) -> int:
    """Return the seed of a line that sets none: a hash of its id, so that every attempt has the same output."""
    return int.from_bytes(blake2b(line_id.encode(), digest_size=8, person=b"nucleate-seed").digest())


@dataclass(eq=False)
class BatchJob:
    """A line in progress: one engine request per prompt."""

    entry: BatchRequest
    parsed: ParsedRequest
    prompts: Sequence[EncodedPrompt]
    chunks: Sequence[list[CompletionChunk]]  #: of each prompt
    cached_tokens: list[int]  #: of each prompt, those that the prefix cache served
    unfinished: int  #: unfinished prompts
    parser: ChunkParser | None = None  #: of the chunks of a chat
    tokens: int = 0  #: generated so far


class BatchRun:
    """The lines in progress.

    values: parameters from flags; those of a line take precedence, and the model's recommendations come last. name: the
    model name in requests. line_seeds: a line without a seed gets ``line_seed`` of its id, instead of a random one.
    Raises ParameterError for a constraint that cannot be enforced.
    """

    deliver: Callable[[LineResult], None]
    """Called with the result of each line."""

    def __init__(
        self,
        llm: LLM,
        engine: Engine,
        values: Mapping[str, Any],
        name: str,
        *,
        line_seeds: bool = False,
    ) -> None:
        self.llm, self.engine, self.name, self._line_seeds = llm, engine, name, line_seeds
        self.tokens = 0  #: generated so far
        self._params = llm.default_params.override(**values)
        if values.get("structured_outputs") is not None:  # an error now, instead of one per line
            engine.prepare(Request([0], SamplingParams(structured_outputs=values["structured_outputs"])))
        kinds = [COMPLETIONS, CHAT, PLAIN]
        if "max_tokens" in values:  # also none, which means the whole context
            kinds = [replace(kind, max_tokens=None) for kind in kinds]
        self._endpoints = {kind.url: replace(kind, vocab_size=engine.vocab_size) for kind in kinds}
        self._running: dict[str, tuple[BatchJob, int]] = {}  # by request id: the job and the index of the prompt

    def start(self, entry: BatchRequest) -> None:
        """Submit a line, or deliver its error."""
        failure = entry.failure or self._submit(entry)
        if failure is not None:
            self._fail(entry, failure)

    def step(self) -> None:
        """Run one engine step, and deliver the results of finished lines."""
        for output in self.engine.step():
            job, index = self._running[output.request_id]
            job.chunks[index].append(output.chunk if job.parser is None else job.parser.parse(output.chunk))
            count = len(output.chunk.token_ids)
            job.tokens += count
            self.tokens += count
            if output.usage is not None:
                job.cached_tokens[index] = output.usage.cached_tokens
                del self._running[output.request_id]
                job.unfinished -= 1
                if not job.unfinished:
                    self._finish(job)

    def _submit(self, entry: BatchRequest) -> LineError | None:
        """Submit a line to the engine, or return the error."""
        assert entry.endpoint is not None  # noqa: S101  # otherwise the entry has a failure
        try:
            parsed = read_body(self._endpoints[entry.endpoint.url], entry.body, self._params)
            parsed = with_fill_stops(self.llm, parsed)
            if self._line_seeds and parsed.params.seed is None and parsed.beam_params is None:
                parsed = replace(parsed, params=parsed.params.replace(seed=line_seed(entry.id)))
            if parsed.stream:
                raise ParameterError("stream", "stream must be false in a batch")
            if parsed.model not in (None, self.name):
                served = f"{shown(self.name)} (see --served-model-name)"
                message = f"the model {shown(parsed.model)} does not exist; this batch uses {served}"
                return LineError(message, "model_not_found", "model", 404)
            prompts = encode_prompts(self.llm, parsed, self.engine.context_length)
            with translate_errors(parsed.requested_format):
                chat = prompts[0].chat
                parser = None if chat is None else chat.chunk_parser(parsed.params.max_reasoning_tokens)
                count = len(prompts)
                chunks: list[list[CompletionChunk]] = [[] for _ in prompts]
                self._add_requests(BatchJob(entry, parsed, prompts, chunks, [0] * count, count, parser))
        except HTTPError as error:
            return LineError(error.message, error.code, error.param, error.status)
        except (ParameterError, ModelError) as error:
            return LineError(" ".join(str(error).split()), param=getattr(error, "field", None), status=400)
        return None

    def _add_requests(self, job: BatchJob) -> None:
        """Submit all prompts of a line, or none."""
        numbers: list[str] = []
        try:
            for prompt in job.prompts:
                numbers.append(self.engine.add(prompt.engine_request(job.parsed, self.engine.prepare)))
        except ParameterError:
            for number in numbers:
                self.engine.abort(number)
            raise
        self._running |= {number: (job, index) for index, number in enumerate(numbers)}

    def _finish(self, job: BatchJob) -> None:
        parts = zip(job.prompts, job.chunks, job.cached_tokens, strict=True)
        completions = [Completion.from_chunks(one.token_ids, own, cached_tokens=cached) for one, own, cached in parts]
        for output in (output for completion in completions for output in completion.outputs):
            if output.finish_reason == "error":
                field = None if job.parsed.params.structured_outputs is None else job.parsed.requested_format.field
                failure = generation_failed(str(output.stop_reason), field)
                body = failure.body["error"]
                error = LineError(body["message"], body["code"], body["param"], failure.status)
                self._fail(job.entry, error, job.tokens)
                return
        created, tokenizer = int(time.time()), self.llm.tokenizer
        record = success_record(job.entry, job.parsed, completions, tokenizer, created=created, model=self.name)
        self.deliver(LineResult(job.entry, record, tokens=job.tokens))

    def _fail(self, entry: BatchRequest, failure: LineError, tokens: int = 0) -> None:
        self.deliver(LineResult(entry, error_record(entry, failure), failure, tokens))
