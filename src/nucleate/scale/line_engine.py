"""One engine that several threads give lines of a batch, as the concurrent calls of a Ray actor do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from nucleate.batch.batch_records import BatchRequest
from nucleate.batch.batch_runner import BatchRun, LineResult
from nucleate.engine.request import Request
from nucleate.llm import LLM
from nucleate.sampling_params import SamplingParams


class LineEngine:
    """A model and its engine, for lines of a batch from several threads.

    llm: keyword arguments of ``LLM``; engine: those of ``LLM.new_engine``; values: sampling parameters that a line does
    not set; name: the model name in requests. A line without a seed gets ``line_seed`` of its id. Raises ParameterError
    and ModelError.
    """

    def __init__(self, llm: Mapping[str, Any], engine: Mapping[str, Any], values: Mapping[str, Any], name: str) -> None:
        model = LLM(**llm)
        new = model.new_engine(**engine)
        if values.get("structured_outputs") is not None:  # an error now, instead of one per line
            new.prepare(Request([0], SamplingParams(structured_outputs=values["structured_outputs"])))
        self._run = BatchRun(model, new, values, name, self._deliver, line_seeds=True)
        self._results: dict[int, LineResult] = {}  # by the identity of the line
        self._lock = Lock()

    def run(self, entries: Sequence[BatchRequest]) -> list[LineResult]:
        """Return the results of lines, in their order. The lines of concurrent calls share the steps of the engine."""
        with self._lock:
            for entry in entries:
                self._run.start(entry)
        missing = [id(entry) for entry in entries]
        while True:
            with self._lock:
                while missing and missing[-1] in self._results:
                    missing.pop()
                if not missing:
                    return [self._results.pop(id(entry)) for entry in entries]
                self._run.step()

    def _deliver(self, result: LineResult) -> None:
        self._results[id(result.entry)] = result
