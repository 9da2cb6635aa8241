"""Reports the progress of loading a model: in the log at level info, or as one line on a terminal."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from nucleate.models.transformers.transformers_model import libraries

logger = logging.getLogger("nucleate")

DELAY, LOG_INTERVAL, LINE_INTERVAL = 1.0, 10.0, 0.5
"""Seconds before the first report, and between reports in the log and on a terminal."""


class LoadProgress:
    """The share of a model's weights that is loaded."""

    def __init__(self, folder: Path) -> None:
        self._name, self._start, self.share = folder.name or str(folder), monotonic(), 0.0
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        self._size = f" ({size / 1e9:.1f} GB)" if size >= 5e7 else ""

    def count(self, factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A hook for the progress bars of Transformers: observes the one over the weights."""
        if options.get("desc") != "Loading weights" or not arguments:
            return factory(*arguments, **options)
        return self._counted(arguments[0])

    def _counted(self, weights: Any) -> Iterator[Any]:
        for number, weight in enumerate(weights):
            self.share = number / len(weights)
            yield weight

    def __str__(self) -> str:
        return f"loading {self._name}{self._size}: {self.share:.0%} of the weights, {monotonic() - self._start:.0f} s"


@contextmanager
def load_progress(folder: Path) -> Iterator[None]:
    """Report within this context, after a second, if the log has level info or stderr is a terminal."""
    in_log, stream = logger.isEnabledFor(logging.INFO), sys.stderr
    if not in_log and (stream is None or not stream.isatty()):
        yield
        return
    progress, done, begin = LoadProgress(folder), threading.Event(), monotonic()
    report = (progress, done) if in_log else (progress, done, stream)
    thread = threading.Thread(target=_log if in_log else _show_line, args=report, daemon=True)
    thread.start()
    try:
        with _observed(progress):
            yield
    finally:
        done.set()
        thread.join()
    if in_log:
        logger.info("loaded %s in %.1f s", folder.name, monotonic() - begin)


@contextmanager
def _observed(progress: LoadProgress) -> Iterator[None]:
    """Observe the progress bars of Transformers. Old versions cannot; then the share of the weights stays 0."""
    _, transformers = libraries()
    set_hook = getattr(transformers.utils.logging, "set_tqdm_hook", lambda _: None)
    before = set_hook(progress.count)
    try:
        yield
    finally:
        set_hook(before)


def _log(progress: LoadProgress, done: threading.Event) -> None:
    delay = DELAY
    while not done.wait(delay):
        logger.info("%s", progress)
        delay = LOG_INTERVAL


def _show_line(progress: LoadProgress, done: threading.Event, stream: TextIO) -> None:
    delay, width = DELAY, 0
    while not done.wait(delay):
        line = str(progress)
        width = max(width, len(line))
        stream.write(f"\r{line:{width}}")
        stream.flush()
        delay = LINE_INTERVAL
    if width:
        stream.write(f"\r{'':{width}}\r")
        stream.flush()
