"""Files of ``nucleate batch`` in a folder, and lines with requests."""

from __future__ import annotations

import json
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from server_process import begun

from nucleate.cli.main import main

Records = list[dict[str, Any]]
CHAT = [{"role": "user", "content": "Tell me a story about a fox and a drum."}]


class Folder:
    """An input file and an output file in a separate folder, and the command that reads and writes them."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.input, self.output, self._capsys = path / "in.jsonl", path / "out.jsonl", capsys

    def write(self, *lines: Any) -> None:
        """Write the input file; ``bytes`` are written unchanged, other values as JSON."""
        made = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.input.write_bytes(b"".join(line + b"\n" for line in made))

    def run(self, *flags: str) -> tuple[int, Records, str]:
        """Run the command and return its exit status, the output records in input order, and stderr."""
        self._capsys.readouterr()
        status = main(["batch", str(self.input), str(self.output), *flags])
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return status, self.records(), captured.err

    def records(self) -> Records:
        if not self.output.exists():
            return []
        found = [json.loads(line) for line in self.output.read_text().splitlines()]
        return sorted(found, key=number)

    def begun(self, *flags: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        arguments = "-m", "nucleate", "batch", str(self.input), str(self.output), *flags
        return begun(*arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def number(record: dict[str, Any]) -> int:
    return int(record["id"].split("-")[1])


def request(name: str, url: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    subject = {"messages": CHAT} if "chat" in url else {"prompt": "The fox"}
    return {"custom_id": name, "method": "POST", "url": url, "body": {**subject, **fields}}
