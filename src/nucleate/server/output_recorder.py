"""Records the outputs of a generation request: metrics, log, failures."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from nucleate.outputs import EngineOutput, FinishReason, Usage
from nucleate.server.http_errors import HTTPError, generation_failed, shutting_down
from nucleate.server.metrics import Metrics
from nucleate.server.openai.responses import failure_message, total_usage
from nucleate.server.request_context import RequestContext
from nucleate.server.service import Service

Batch = list[tuple[int, EngineOutput]]
"""New outputs, each with the index of its prompt."""


class OutputRecorder:
    """Records the engine outputs of a request in metrics and log, and detects failures.

    release: frees the queue slots of a prompt. sequences: per prompt. structured_field: the body field with the
    structured-output constraint, if there is one.
    """

    def __init__(
        self,
        context: RequestContext,
        metrics: Metrics,
        release: Callable[[int], None],
        service: Service,
        prompts: int,
        sequences: int,
        structured_field: str | None,
    ) -> None:
        self.cached_tokens = [0] * prompts  #: prompt tokens from the prefix cache, by prompt
        self.usage = Usage(0, 0)
        self._log, self._start, self._metrics = context.log, context.start_time, metrics
        self._release, self._service, self._structured_field = release, service, structured_field
        self._last_token_times: dict[tuple[int, int], float] = {}  # by prompt and index of the output
        self._unfinished = dict.fromkeys(range(prompts), sequences)  # by prompt

    def record(self, batch: Batch) -> tuple[Batch, HTTPError | None]:
        """Record outputs. Returns all of them and None; or those before the first failed one, and its error."""
        now, last = perf_counter(), self._last_token_times
        for number, (prompt, output) in enumerate(batch):
            chunk = output.chunk
            key = prompt, chunk.index
            if key in last:
                self._metrics.observe_token(now - last[key])
            elif self._log.time_to_first_token_seconds is None:
                self._log.time_to_first_token_seconds = now - self._start
                self._metrics.observe_first_token(now - self._start)
            last[key] = now
            if chunk.finish_reason is not None:
                self._unfinished[prompt] -= 1
                failure = self._finish(chunk.finish_reason, chunk.stop_reason)
                if failure is not None:
                    return batch[:number], failure
            if output.usage is not None:
                self.usage = total_usage([self.usage, output.usage])
                self.cached_tokens[prompt] = output.usage.cached_tokens
                self._log.completion_tokens += output.usage.completion_tokens
                self._release(prompt)
                del self._unfinished[prompt]
        return batch, None

    def record_aborted(self) -> None:
        """Record the sequences that did not finish, because the client disconnected or another one failed."""
        for _ in range(sum(self._unfinished.values())):
            self._finish("abort", None)
        self._unfinished.clear()

    def _finish(self, reason: FinishReason, detail: str | int | None) -> HTTPError | None:
        self._metrics.count_finished_sequence(reason)
        self._log.finish_reasons.append(reason)
        if reason == "error":
            return generation_failed(failure_message(detail), self._structured_field)
        return shutting_down() if reason == "abort" and self._service.aborted else None
