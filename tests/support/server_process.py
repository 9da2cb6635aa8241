"""Processes that tests start: `nucleate serve`, with the HTTP client of the standard library, and any program."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

URL = re.compile(rb"https?://[0-9a-zA-Z.\[\]:-]+:[0-9]+|unix:[^\s\"]+")
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "2"}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""An environment for servers whose busy threads would starve the others where tests run side by side."""
CHANGED = """
import sys
from pkgutil import resolve_name
for name, value in {}.items():
    module, _, constant = name.rpartition(".")
    setattr(resolve_name(module), constant, value)
from nucleate.cli.main import main
sys.exit(main())
"""


class Answer(NamedTuple):
    """An HTTP response. headers: by lower-case name."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Server:
    """`nucleate serve` with these flags, on a free loopback port: ``with Server("--queue", "1") as server``.

    environment: added to that of this process; None removes a variable. constants: values of module constants by
    their full names. Raises RuntimeError with the server's log if it does not start within ``seconds``.
    """

    def __init__(
        self,
        *flags: str,
        environment: Mapping[str, str | None] | None = None,
        constants: Mapping[str, float] | None = None,
        seconds: float = 300.0,
    ) -> None:
        variables = {**os.environ, **QUIET, **(environment or {})}
        program = ["-m", "nucleate"] if constants is None else ["-c", CHANGED.format(constants)]
        command = [sys.executable, *program, "serve", "--host", "127.0.0.1", "--port", "0", *flags]
        self._lines: list[bytes] = []
        self._up = threading.Event()
        self.url = ""
        self.process = subprocess.Popen(
            command,
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._up.wait(seconds)
        if not self.url:
            self.process.kill()
            code = self._end()
            raise RuntimeError(f"the server did not come up in {seconds} s (exit status {code}):\n{self.log}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """The server's stderr so far."""
        return b"".join(self._lines).decode(errors="replace")

    def warmed(self, seconds: float = 300.0) -> Self:
        """Wait until the kernels are compiled or loaded. Returns this server."""
        wait_until(lambda: "kernels ready" in self.log, seconds)
        return self

    def stop(self, seconds: float = 120.0) -> int:
        """Send SIGTERM and return the exit status. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self._end()
            raise RuntimeError(f"the server did not end in {seconds} s:\n{self.log}") from None
        return self._end()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = 120.0,
    ) -> Answer:
        """Send a request and return the response. body: bytes, or an object to send as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        own = {} if data is None else {"content-type": "application/json"}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=seconds)
        try:
            connection.request(method, path, data, {**own, **(headers or {})})
            response = connection.getresponse()
            lower_case_headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, lower_case_headers, response.read())
        finally:
            connection.close()

    def metric(self, name: str, headers: Mapping[str, str] | None = None, **labels: str) -> float:
        """The sum of a metric over all series with these labels. Raises KeyError if there is none."""
        found = []
        for line in self.request("GET", "/metrics", headers=headers).data.decode().splitlines():
            key, _, value = line.rpartition(" ")
            own, _, label_text = key.partition("{")
            if own == name and all(f'{label}="{expected}"' in label_text for label, expected in labels.items()):
                found.append(float(value))
        if not found:
            raise KeyError(name)
        return sum(found)

    def is_idle(self, headers: Mapping[str, str] | None = None) -> bool:
        """Whether no request is running or queued."""
        names = ("nucleate_num_requests_running", "nucleate_num_requests_waiting")
        return not any(self.metric(name, headers) for name in names)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self._lines.append(line)
                if not self.url and (found := URL.search(line)):
                    self.url = found[0].decode()
                    self._up.set()
        self._up.set()  # no more output

    def _end(self) -> int:
        code = self.process.wait()
        self._reader.join(10)
        return code


def free_port() -> int:
    """A port of the loopback interface that no process uses."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_until(true: Callable[[], object], seconds: float = 5.0) -> float:
    """Poll until a condition is true. Returns the seconds waited; raises AssertionError after ``seconds``."""
    start = time.perf_counter()
    while not true():
        assert time.perf_counter() - start < seconds, f"the condition is not true after {seconds} s"
        time.sleep(0.01)
    return time.perf_counter() - start


def children(pid: int) -> list[int]:
    """The processes that a process has started and not waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@contextmanager
def begun(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a Python process with these arguments and options of ``Popen``."""
    with subprocess.Popen([sys.executable, *arguments], **options) as process:
        try:
            yield process
        finally:
            process.kill()
