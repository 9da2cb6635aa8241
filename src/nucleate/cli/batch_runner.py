"""Lines in, records out, through an engine: what ``nucleate batch`` does with a line. Knows no files and no flags."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nucleate.cli.batch_output import BatchOutput
from nucleate.cli.batch_records import BatchRecord, RecordError, answered, failed, read_line
from nucleate.cli.jsonl import JsonLine
from nucleate.engine.engine import Engine
from nucleate.llm import LLM
from nucleate.models.protocol import ModelError
from nucleate.outputs import Completion, CompletionChunk
from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError
from nucleate.server.http_errors import answer_failed
from nucleate.server.openai.requests import CHAT, COMPLETIONS, PLAIN, ParsedRequest, read_body
from nucleate.server.openai.response_format import named

SHOWN_EVERY = 0.2  # seconds


@dataclass(eq=False)
class BatchJob:
    """A line whose answers are being made: a request to the engine for each of its prompts."""

    entry: BatchRecord
    asked: ParsedRequest
    prompts: Sequence[Sequence[int]]
    pieces: Sequence[list[CompletionChunk]]  #: of the answers to each prompt
    left: int  #: prompts that are not answered


class BatchRun:
    """The lines at work, and the figures of those that were.

    values: parameters where a line says nothing; what it says goes before them, and they before what the model
    recommends. name: what requests call the model. progress: a bar of lines.
    """

    def __init__(
        self, llm: LLM, engine: Engine, values: Mapping[str, Any], name: str, journal: BatchOutput, progress: Any
    ) -> None:
        self.llm, self.engine, self.name, self.journal, self._progress = llm, engine, name, journal, progress
        self.done = self.failed = self.tokens = 0
        self._params = llm.default_params.override(**values)
        kinds = [COMPLETIONS, CHAT, PLAIN]
        if "max_tokens" in values:  # also if it is none: then it means the whole context
            kinds = [replace(kind, max_tokens=None) for kind in kinds]
        self._endpoints = {kind.url: kind for kind in kinds}
        self._custom_ids: set[str] = set()
        self._at_work: dict[str, tuple[BatchJob, int]] = {}  # by request: the line, and which of its prompts
        self._start, self._shown = time.perf_counter(), 0.0

    @property
    def rate(self) -> float:
        """Tokens written per second, over the whole run."""
        return self.tokens / max(time.perf_counter() - self._start, 1e-9)

    def skip(self, line: JsonLine) -> None:
        """A line that has its record already."""
        self._claim(read_line(line))
        self._progress.update(1)

    def begin(self, line: JsonLine) -> None:
        """Take a line, or write why it cannot be answered."""
        entry = read_line(line)
        new = self._claim(entry)
        failure = entry.failure
        if failure is None and not new:
            message = f"an earlier line has the custom_id {shown(entry.custom_id)} too"
            failure = RecordError(message, "duplicate_custom_id", "custom_id")
        if failure is None:
            failure = self._admit(entry)
        if failure is not None:
            self._fail(entry, failure)

    def step(self) -> None:
        """Move all lines at work on, and write the records of those that are answered."""
        for event in self.engine.step():
            work, place = self._at_work[event.request_id]
            work.pieces[place].append(event.piece)
            self.tokens += len(event.piece.token_ids)
            if event.last:
                del self._at_work[event.request_id]
                work.left -= 1
                if not work.left:
                    self._finish(work)
        now = time.perf_counter()
        if now > self._shown + SHOWN_EVERY:
            self._shown = now
            self._progress.set_postfix_str(f"{self.rate:.0f} tokens/s, {self.failed} failed")

    def _claim(self, entry: BatchRecord) -> bool:
        """Whether a line is the first with its custom_id."""
        new = entry.custom_id not in self._custom_ids
        if entry.custom_id is not None:
            self._custom_ids.add(entry.custom_id)
        return new

    def _admit(self, entry: BatchRecord) -> RecordError | None:
        """Hand a line to the engine, or say why not."""
        assert entry.endpoint is not None  # noqa: S101  # what cannot be told has a failure
        try:
            asked = read_body(self._endpoints[entry.endpoint.url], entry.body, self._params)
            if asked.stream:
                raise ParameterError("stream", "stream must be false in a batch")
            if asked.model not in (None, self.name):
                message = (
                    f"there is no model {shown(asked.model)} here, but {shown(self.name)} (see --served-model-name)"
                )
                return RecordError(message, "model_not_found", "model", 404)
            if asked.messages is not None:
                prompts = [self.llm.encode_chat(asked.messages, asked.template)]
            else:
                prompts = [self.llm.encode(prompt) for prompt in asked.prompts]
            with named(asked.format):
                self._add(BatchJob(entry, asked, prompts, [[] for _ in prompts], len(prompts)))
        except (ParameterError, ModelError) as error:
            return RecordError(" ".join(str(error).split()), param=getattr(error, "field", None), status=400)
        return None

    def _add(self, work: BatchJob) -> None:
        """Ask the engine for all prompts of a line, or for none."""
        numbers: list[str] = []
        try:
            for prompt_ids in work.prompts:
                numbers.append(self.engine.add(work.asked.request(prompt_ids)))
        except ParameterError:
            for number in numbers:
                self.engine.abort(number)
            raise
        self._at_work |= {number: (work, place) for place, number in enumerate(numbers)}

    def _finish(self, work: BatchJob) -> None:
        completions = [Completion.of(ids, pieces) for ids, pieces in zip(work.prompts, work.pieces, strict=True)]
        for output in (output for completion in completions for output in completion.outputs):
            if output.finish_reason == "error":
                form = None if work.asked.params.structured_outputs is None else work.asked.format.field
                refusal = answer_failed(str(output.stop_reason), form)
                told = refusal.body["error"]
                self._fail(work.entry, RecordError(told["message"], told["code"], told["param"], refusal.status))
                return
        created, tokenizer = int(time.time()), self.llm.tokenizer
        self.journal.write(answered(work.entry, work.asked, completions, tokenizer, created=created, model=self.name))
        self.done += 1
        self._progress.update(1)

    def _fail(self, entry: BatchRecord, failure: RecordError) -> None:
        self.journal.write(failed(entry, failure))
        self.failed += 1
        short = textwrap.shorten(failure.message, 200, placeholder=" ...")  # the record has all of it
        self._progress.write(f"nucleate: line {entry.number}: {short}", file=sys.stderr)
        self._progress.update(1)
