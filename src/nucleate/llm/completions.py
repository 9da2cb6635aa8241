"""Collects the outputs of requests: into completions, in order, and with a progress bar on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from nucleate.chat.output_parser import ChunkParser
from nucleate.engine.request import Request
from nucleate.outputs import Completion, CompletionChunk, EngineOutput


def with_progress(
    outputs: Iterator[tuple[int, EngineOutput]], total: int, use_tqdm: bool
) -> Iterator[tuple[int, EngineOutput]]:
    """Yield the outputs; with ``use_tqdm``, show the number of finished requests, and tokens per second."""
    tokens, start = 0, time.perf_counter()
    with progress_bar(total=total, unit="prompt", shown=use_tqdm) as bar:
        for index, output in outputs:
            tokens += len(output.chunk.token_ids)
            if output.finished:
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
                bar.update()
            yield index, output


def progress_bar(items: Iterable[Any] | None = None, *, total: int | None = None, unit: str, shown: bool = True) -> Any:
    """Return a tqdm progress bar on stderr, over items or advanced by ``update``. total: number of items, if known."""
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit, disable=not shown, file=sys.stderr, dynamic_ncols=True)


def completions(
    requests: Sequence[Request],
    outputs: Iterable[tuple[int, EngineOutput]],
    prompts: Sequence[str | None],
    parsers: Sequence[ChunkParser | None] = (),
) -> list[Completion]:
    """Return the completion of each request. prompts: their texts. parsers: of the chunks of chats."""
    chunks: list[list[CompletionChunk]] = [[] for _ in requests]
    cached = [0] * len(requests)
    for index, output in outputs:
        parser = parsers[index] if parsers else None
        chunks[index].append(output.chunk if parser is None else parser.parse(output.chunk))
        if output.usage is not None:
            cached[index] = output.usage.cached_tokens
    parts = zip(requests, chunks, prompts, cached, strict=True)
    return [Completion.from_chunks(one.prompt_ids, own, text, count) for one, own, text, count in parts]


def in_order(chunks: Iterable[CompletionChunk]) -> Iterator[CompletionChunk]:
    """Yield the chunks of one output after the other. Those of later outputs are buffered."""
    buffered: dict[int, list[CompletionChunk]] = {}
    index = 0
    for chunk in chunks:
        buffered.setdefault(chunk.index, []).append(chunk)
        while own := buffered.pop(index, None):
            yield from own
            index += own[-1].finish_reason is not None
