"""What surrounds the loading of a Transformers model: the check of the device, progress reports, and its tokenizer."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any, TextIO

from nucleate.models.protocol import ModelError
from nucleate.models.transformers.transformers_model import import_torch, libraries
from nucleate.parameters.converters import one_line, shown
from nucleate.parameters.parameter import ParameterError

DEVICES = "auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"
_ACCELERATOR = re.compile(r"(cuda|xpu|mps)(?::([0-9]{1,3}))?")


def check_device(device: str) -> None:
    """Raise ParameterError for an unknown device name, or one that torch does not find.

    Imports torch only for an accelerator; raises ModelError if it is not installed.
    """
    if device in ("auto", "cpu"):
        return
    match = _ACCELERATOR.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise ParameterError("device", f"device must be {DEVICES}, got {shown(device)}")
    torch, kind = import_torch(), match[1]
    count = getattr(torch, kind).device_count()
    if int(match[2] or 0) < count:
        return
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        reason = f"torch {torch.__version__} is built without CUDA"
    else:
        reason = f"torch finds {count or 'no'} {kind} device{'s' * (count != 1)}"
    raise ParameterError("device", f"device {device!r} is not available: {reason}; allowed: {DEVICES}")


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


def convert_tokenizer(folder: Path, out: Path) -> None:
    """Write the tokenizer of a folder without tokenizer.json, converted by Transformers, to another folder."""
    _, transformers = libraries()
    try:
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(out)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ModelError(f"cannot load a tokenizer from {folder}: {one_line(error)}") from error
    if not (out / "tokenizer.json").is_file():
        raise ModelError(f"the tokenizer in {folder} has no fast version (tokenizer.json)")
    for name in ("config.json", "generation_config.json"):  # they contain the EOS ids
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def save_tokenizer(tokenizer: Any, out: Path) -> None:
    """Write a tokenizer of Transformers in memory to a folder; one without a fast version is converted."""
    name = type(tokenizer).__name__
    try:
        tokenizer.save_pretrained(out)
        if not (out / "tokenizer.json").is_file():
            _convert(tokenizer).save(str(out / "tokenizer.json"))
    except ModelError:
        raise
    except Exception as error:  # the tokenizer's code may raise anything
        raise ModelError(
            f"the tokenizer {name} cannot be converted: {type(error).__name__}: {one_line(error)}"
        ) from error


def _convert(tokenizer: Any) -> Any:
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS

    name = type(tokenizer).__name__
    converter = SLOW_TO_FAST_CONVERTERS.get(name.removesuffix("Legacy"))
    if converter is None:
        raise ModelError(f"the tokenizer {name} has no fast version (tokenizer.json)")
    return converter(tokenizer).converted()
