"""Offline inference with Ray Data: a class for ``Dataset.map_batches``, and the actors of ``nucleate batch --ray``.

Each actor has a model and an engine, which all its calls share.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any

from nucleate.batch.batch_records import BatchRequest, JsonLine, LineError, error_record, read_line
from nucleate.batch.batch_runner import BatchRun, LineResult
from nucleate.llm import LLM
from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling_params import SamplingParams
from nucleate.scale.ray_extra import require_ray, start_ray, threads_option

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "nucleate"
"""The model name in requests, unless one is given."""
CONCURRENT_CALLS = 2
"""Batches that an actor processes at a time: the next one fills the engine while the first one ends."""


@with_suggestions
def pool_options(actors: int, *, threads: int | None = None, num_gpus: float = 0.0) -> dict[str, Any]:
    """Return the options of ``Dataset.map_batches`` for a pool of ``Generate``.

    actors: number of engines. threads: CPU threads of each. num_gpus: of each. Actors reserve half a CPU each, so that
    two of them and Ray Data's own tasks fit on two cores. Raises ParameterError if Ray is not installed.
    """
    require_ray()
    from ray.data import ActorPoolStrategy

    options: dict[str, Any] = {
        "compute": ActorPoolStrategy(
            size=actors, max_concurrent_calls_per_actor=CONCURRENT_CALLS, enable_true_multi_threading=True
        ),
        "num_cpus": 0.5,
        "batch_format": "pyarrow",
    }
    return options | threads_option(threads) | ({"num_gpus": num_gpus} if num_gpus else {})


@with_suggestions
class Generate:
    """Generates for the rows of a table: ``dataset.map_batches(Generate, **pool_options(2))``.

    fields: columns that make a request: ``prompt`` or ``messages`` and any field of SamplingParams, or those of
    OpenAI's batch format (``custom_id``, ``method``, ``url``, ``body``). lines: instead, a column with requests as JSON
    text, in any format of ``nucleate batch``. params: what a request does not set. llm, engine: keyword arguments of
    ``LLM`` and ``LLM.new_engine``. name: the model name in requests.

    It adds three columns: ``generated_text`` (the text of the first output; null for a failed row), ``error`` (null or
    a message) and ``record`` (the record of ``nucleate batch`` as JSON). A request without a seed gets one from its
    content and from the column ``key``, so that a row that is processed again after a failure has the same output.
    Without ``key``, equal requests have equal outputs. Raises ParameterError and ModelError.
    """

    def __init__(
        self,
        *,
        fields: Sequence[str] = ("prompt",),
        lines: str | None = None,
        key: str | None = None,
        params: SamplingParams | Mapping[str, Any] | None = None,
        llm: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
        name: str = NAME,
    ) -> None:
        values = params.to_dict() if isinstance(params, SamplingParams) else dict(params or {})
        self._fields, self._lines, self._key = tuple(fields), lines, key
        self._engine = LineEngine(llm or {}, engine or {}, values, name)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Return the table with the three columns. Raises ParameterError for a missing or existing column."""
        import pyarrow as pa

        if not isinstance(batch, pa.Table):
            message = f"batches must be tables: map_batches(..., batch_format='pyarrow'), got {type(batch).__name__}"
            raise ParameterError("batch_format", message)
        needed = [*(self._fields if self._lines is None else [self._lines]), *([self._key] if self._key else [])]
        for name in needed:
            if name not in batch.column_names:
                raise ParameterError(name, f"there is no column {name}; the columns are {batch.column_names}")
        entries = [self._entry(row) for row in batch.select(needed).to_pylist()]
        for name, values in _columns(self._engine.run(entries)).items():
            if name in batch.column_names:
                raise ParameterError(name, f"the table already has a column {name}: rename it")
            batch = batch.append_column(name, pa.array(values, pa.string()))
        return batch

    def _entry(self, row: Mapping[str, Any]) -> BatchRequest:
        if self._lines is None:
            given = {name: row[name] for name in self._fields if row[name] is not None}
            data = json.dumps(given, sort_keys=True).encode()
        else:
            data = str(row[self._lines]).encode()
        digest = blake2b(data, digest_size=8).hexdigest()
        number = digest if self._key is None else f"{row[self._key]}-{digest}"
        return replace(read_line(JsonLine(0, 0, data)), id=f"row-{number}")


def _columns(results: Sequence[LineResult]) -> dict[str, list[str | None]]:
    return {
        "generated_text": [None if result.failure else _text(result.record) for result in results],
        "error": [result.failure.message if result.failure else None for result in results],
        "record": [json.dumps(result.record, allow_nan=False) for result in results],
    }


def _text(record: Mapping[str, Any]) -> str:
    """Return the text of the first output of a record."""
    if "response" not in record:
        return str(record["outputs"][0]["text"] if "outputs" in record else record["text"])
    choice = record["response"]["body"]["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


class LineEngine:
    """A model and its engine, for lines of a batch from several threads.

    llm: keyword arguments of ``LLM``; engine: those of ``LLM.new_engine``; values: sampling parameters that a line does
    not set; name: the model name in requests. A line without a seed gets ``line_seed`` of its id. Raises ParameterError
    and ModelError.
    """

    def __init__(self, llm: Mapping[str, Any], engine: Mapping[str, Any], values: Mapping[str, Any], name: str) -> None:
        model = LLM(**llm)
        self._run = BatchRun(model, model.new_engine(**engine), values, name, line_seeds=True)
        self._run.deliver = self._deliver
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


LINES_PER_BLOCK = 64
"""Lines that travel together. An actor has two blocks at a time; if it dies, they are processed again."""


class BatchActors:
    """Ray actors that process lines. Joins or starts Ray.

    llm, engine: keyword arguments of ``LLM`` and ``LLM.new_engine``; values: sampling parameters that a line does not
    set; name: the model name in requests; address: of ``ray.init``; count: number of actors, by default one per GPU, or
    one per machine without GPUs. Raises ParameterError if Ray is not installed, ConnectionError for a wrong address.
    """

    def __init__(
        self,
        llm: Mapping[str, Any],
        engine: Mapping[str, Any],
        values: Mapping[str, Any],
        name: str,
        *,
        address: str = "local",
        count: int | None = None,
    ) -> None:
        start_ray(address)
        import ray

        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        machines = sum(key.startswith("node:") and "__" not in key for key in resources)
        self.count = count or gpus or machines
        threads = max(1, int(resources.get("CPU", 1) // self.count))
        self._options = pool_options(self.count, threads=threads, num_gpus=min(1.0, gpus / self.count))
        self._options["fn_constructor_args"] = (llm, engine, values, name)

    def process(self, lines: Iterable[tuple[JsonLine, BatchRequest]]) -> Iterator[LineResult]:
        """Yield the result of each line, in the order of completion.

        The lines are copied to Ray's object store, which moves what exceeds the memory to disk. Raises RuntimeError if
        Ray returns other lines than those that it was given.
        """
        import ray.data

        failed: list[LineResult] = []
        waiting = bytearray()  # by line number: 1 without a result
        valid = _valid(lines, failed, waiting)
        blocks = [ray.put(_table(block)) for block in iter(lambda: list(islice(valid, LINES_PER_BLOCK)), [])]
        yield from failed
        if not blocks:
            return
        ray.data.DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an exception has what it would say
        dataset = ray.data.from_arrow_refs(blocks).map_batches(_Worker, batch_size=None, **self._options)
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for number, line_id, record, error, tokens in zip(*table.to_pydict().values(), strict=True):
                if not waiting[number]:
                    raise RuntimeError(f"Ray returned line {number} twice")
                waiting[number] = 0
                failure = None if error is None else LineError(error)
                yield LineResult(BatchRequest(line_id, number), json.loads(record), failure, tokens)
        if any(waiting):
            raise RuntimeError(f"Ray returned no result for {sum(waiting)} lines")


class _Worker(LineEngine):
    """Processes blocks of lines in an actor."""

    def __call__(self, table: pa.Table) -> pa.Table:
        import pyarrow as pa

        rows = zip(*table.to_pydict().values(), strict=True)
        results = self.run([read_line(JsonLine(number, digest, data)) for number, digest, data in rows])
        return pa.table(
            {
                "number": [result.entry.number for result in results],
                "id": [result.entry.id for result in results],
                "record": [json.dumps(result.record, allow_nan=False) for result in results],
                "error": pa.array([result.failure and result.failure.message for result in results], "string"),
                "tokens": [result.tokens for result in results],
            }
        )


def _valid(
    lines: Iterable[tuple[JsonLine, BatchRequest]], failed: list[LineResult], waiting: bytearray
) -> Iterator[JsonLine]:
    """Yield the valid lines and mark them as waiting; add the results of the others to ``failed``."""
    for line, entry in lines:
        if entry.failure is not None:
            failed.append(LineResult(entry, error_record(entry, entry.failure), entry.failure))
            continue
        waiting.extend(bytes(max(0, line.number + 1 - len(waiting))))
        waiting[line.number] = 1
        yield line


def _table(lines: Iterable[JsonLine]) -> pa.Table:
    import pyarrow as pa

    numbers, digests, data = zip(*lines, strict=True)
    columns = {"number": pa.array(numbers, "int64"), "digest": pa.array(digests, "uint64")}
    return pa.table({**columns, "data": pa.array(data, "binary")})
