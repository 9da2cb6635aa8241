"""Processes the lines of a batch: submits their prompts to an engine and writes a record per line."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nucleate.chat.chunk_parser import ChunkParser
from nucleate.cli.batch_output import BatchOutput
from nucleate.cli.batch_records import BatchRequest, LineError, error_record, read_line, success_record
from nucleate.cli.jsonl import JsonLine
from nucleate.engine.engine import Engine
from nucleate.llm import LLM
from nucleate.models.protocol import ModelError
from nucleate.outputs import Completion, CompletionChunk
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.http_errors import HTTPError, generation_failed
from nucleate.server.openai.endpoints import CHAT, COMPLETIONS, PLAIN
from nucleate.server.openai.requests import ParsedRequest, read_body
from nucleate.server.openai.response_format import translate_errors
from nucleate.server.service import EncodedPrompt, encode_prompts, with_fill_stops

PROGRESS_SECONDS = 0.2  # between updates of the progress bar


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


class BatchRun:
    """The lines in progress, and the statistics of those that are finished.

    values: parameters from flags; those of a line take precedence, and the model's recommendations come last. name: the
    model name in requests. progress: a progress bar that counts lines.
    """

    def __init__(
        self, llm: LLM, engine: Engine, values: Mapping[str, Any], name: str, output: BatchOutput, progress: Any
    ) -> None:
        self.llm, self.engine, self.name, self.output, self._progress = llm, engine, name, output, progress
        self.done = self.failed = self.tokens = 0
        self._params = llm.default_params.override(**values)
        kinds = [COMPLETIONS, CHAT, PLAIN]
        if "max_tokens" in values:  # also none, which means the whole context
            kinds = [replace(kind, max_tokens=None) for kind in kinds]
        self._endpoints = {kind.url: replace(kind, vocab_size=engine.vocab_size) for kind in kinds}
        self._custom_ids: set[str] = set()
        self._running: dict[str, tuple[BatchJob, int]] = {}  # by request id: the job and the index of the prompt
        self._start, self._updated = time.perf_counter(), 0.0

    @property
    def rate(self) -> float:
        """Generated tokens per second, over the whole run."""
        return self.tokens / max(time.perf_counter() - self._start, 1e-9)

    def skip(self, line: JsonLine) -> None:
        """Skip a line that has a record."""
        self._register(read_line(line))
        self._progress.update(1)

    def start(self, line: JsonLine) -> None:
        """Submit a line, or write its error record."""
        entry = read_line(line)
        new = self._register(entry)
        failure = entry.failure
        if failure is None and not new:
            message = f"an earlier line has the same custom_id {shown(entry.custom_id)}"
            failure = LineError(message, "duplicate_custom_id", "custom_id")
        if failure is None:
            failure = self._submit(entry)
        if failure is not None:
            self._fail(entry, failure)

    def step(self) -> None:
        """Run one engine step, and write the records of finished lines."""
        for output in self.engine.step():
            job, index = self._running[output.request_id]
            job.chunks[index].append(output.chunk if job.parser is None else job.parser.parse(output.chunk))
            self.tokens += len(output.chunk.token_ids)
            if output.usage is not None:
                job.cached_tokens[index] = output.usage.cached_tokens
                del self._running[output.request_id]
                job.unfinished -= 1
                if not job.unfinished:
                    self._finish(job)
        now = time.perf_counter()
        if now > self._updated + PROGRESS_SECONDS:
            self._updated = now
            self._progress.set_postfix_str(f"{self.rate:.0f} tokens/s, {self.failed} failed")

    def _register(self, entry: BatchRequest) -> bool:
        """Remember the custom_id of a line. Returns whether it is new."""
        new = entry.custom_id not in self._custom_ids
        if entry.custom_id is not None:
            self._custom_ids.add(entry.custom_id)
        return new

    def _submit(self, entry: BatchRequest) -> LineError | None:
        """Submit a line to the engine, or return the error."""
        assert entry.endpoint is not None  # noqa: S101  # otherwise the entry has a failure
        try:
            parsed = read_body(self._endpoints[entry.endpoint.url], entry.body, self._params)
            parsed = with_fill_stops(self.llm, parsed)
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
        completions = [
            Completion.from_chunks(prompt.token_ids, own, cached_tokens=cached) for prompt, own, cached in parts
        ]
        for output in (output for completion in completions for output in completion.outputs):
            if output.finish_reason == "error":
                field = None if job.parsed.params.structured_outputs is None else job.parsed.requested_format.field
                failure = generation_failed(str(output.stop_reason), field)
                body = failure.body["error"]
                self._fail(job.entry, LineError(body["message"], body["code"], body["param"], failure.status))
                return
        created, tokenizer = int(time.time()), self.llm.tokenizer
        self.output.write(
            success_record(job.entry, job.parsed, completions, tokenizer, created=created, model=self.name)
        )
        self.done += 1
        self._progress.update(1)

    def _fail(self, entry: BatchRequest, failure: LineError) -> None:
        self.output.write(error_record(entry, failure))
        self.failed += 1
        short = textwrap.shorten(failure.message, 200, placeholder=" ...")  # the record has the full message
        self._progress.write(f"nucleate: line {entry.number}: {short}", file=sys.stderr)
        self._progress.update(1)
