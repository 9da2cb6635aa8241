"""Progress bars on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from nucleate.outputs import EngineOutput


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
