"""The results of a comparison as a JSONL file, so that an interrupted comparison continues.

A header line describes the comparison; each further line is the result of one output. A header is written again when
settings are added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nucleate.parameters.converters import shown
from nucleate.parameters.parameter import ParameterError

FORMAT = "nucleate compare 1"


@dataclass(frozen=True)
class OutputResult:
    """The result of one output."""

    setting: str
    prompt: int  #: its index
    seed: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    ends: int  #: 1 if the last token is an end-of-sequence token
    log_likelihood: float | None  #: the mean per token, of the unmodified model at temperature 1; None without tokens
    entropy: float | None  #: the mean per step, of the unmodified model
    sampled_entropy: float | None  #: the mean of -log of the probability with which each token was sampled

    @property
    def key(self) -> tuple[str, int, int]:
        return self.setting, self.prompt, self.seed


class ResultsFile:
    """A file of results; without a path, only memory. Raises ParameterError for the results of another comparison."""

    def __init__(self, path: str | Path | None, header: Mapping[str, Any]) -> None:
        """header: values that must not change; ``settings`` in it maps names to fields, and may grow."""
        self.path = None if path is None else Path(path)
        self.header = {"format": FORMAT, **json.loads(json.dumps(header))}
        self.results: dict[tuple[str, int, int], OutputResult] = {}
        if self.path is None:
            return
        lines = self._lines() if self.path.exists() else []
        known: dict[str, Any] = {}
        for line in lines:
            known = self._read(line, known)
        settings = {**known.get("settings", {}), **self.header["settings"]}
        if known.get("settings") != settings:
            self._append([{**self.header, "settings": settings}])

    def _lines(self) -> list[bytes]:
        """Return the complete lines, and remove the incomplete one of an interrupted run."""
        assert self.path is not None  # noqa: S101  # see the caller
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with self.path.open("r+b") as file:
                file.truncate(end)
        return data[:end].splitlines()

    def _read(self, line: bytes, known: dict[str, Any]) -> dict[str, Any]:
        """Read a line. Returns the header so far."""
        try:
            record = json.loads(line)
            if "format" in record:
                self._check(record)
                return dict(record)
            if not known:
                raise ValueError
            result = OutputResult(**{**record, "token_ids": tuple(record["token_ids"])})
        except ParameterError:
            raise
        except (ValueError, TypeError, KeyError):
            raise ParameterError("output", f"{self.path} is not a file of results; use another file") from None
        self.results[result.key] = result
        return known

    def _check(self, other: Mapping[str, Any]) -> None:
        """Raise ParameterError if the file is of another comparison."""
        pairs = [(name, other.get(name), value) for name, value in self.header.items() if name != "settings"]
        before = other.get("settings", {})
        pairs += [(f"setting {name!r}", before.get(name, now), now) for name, now in self.header["settings"].items()]
        for name, then, now in pairs:
            if then != now:
                change = f"{name} was {shown(then)} and is now {shown(now)}"
                raise ParameterError("output", f"{self.path} has results of another comparison: {change}")

    def add(self, results: Sequence[OutputResult]) -> None:
        """Add results, also to the file."""
        self.results.update((one.key, one) for one in results)
        self._append(map(asdict, results))

    def _append(self, records: Iterable[Mapping[str, Any]]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)
