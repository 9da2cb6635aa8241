"""``nucleate batch --ray``: the lines of a batch on Ray actors, each with its result exactly once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from nucleate.batch.batch_records import BatchRequest, JsonLine, LineError, error_record, read_line
from nucleate.batch.batch_runner import LineResult
from nucleate.scale.data import LineEngine, pool_options
from nucleate.scale.ray_extra import start_ray

if TYPE_CHECKING:
    import pyarrow as pa

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


class _Worker:
    """Processes blocks of lines in an actor."""

    def __init__(self, llm: Mapping[str, Any], engine: Mapping[str, Any], values: Mapping[str, Any], name: str) -> None:
        self._engine = LineEngine(llm, engine, values, name)

    def __call__(self, table: pa.Table) -> pa.Table:
        import pyarrow as pa

        rows = zip(*table.to_pydict().values(), strict=True)
        results = self._engine.run([read_line(JsonLine(number, digest, data)) for number, digest, data in rows])
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
