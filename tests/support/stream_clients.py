"""Streaming HTTP clients for tests: each has its own socket, read under the control of the test."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPResponse
from typing import Any, Self
from urllib.parse import urlsplit

from server_process import Server


def raw(method: str, path: str, data: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of an HTTP request."""
    own = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in own.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


class Wire:
    """A connection that sends any bytes. receive: size of the socket's receive buffer in bytes (0: default)."""

    def __init__(self, server: Server | str, seconds: float = 60.0, receive: int = 0) -> None:
        address = urlsplit(server if isinstance(server, str) else server.url)
        self.socket = socket.socket()
        if receive:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self.socket.settimeout(seconds)
        self.answer: HTTPResponse | None = None
        try:
            self.socket.connect((address.hostname, address.port))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.answer is not None:
            self.answer.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def head(self) -> int:
        """Read the response head. Returns the status."""
        if self.answer is not None:
            self.answer.close()
        self.answer = HTTPResponse(self.socket)
        self.answer.begin()
        return self.answer.status

    def read(self) -> bytes:
        """The rest of the response body."""
        assert self.answer is not None
        return self.answer.read()

    def frames(self) -> Iterator[str]:
        """The data of the stream's events."""
        assert self.answer is not None
        for line in self.answer:
            if line.startswith(b"data: "):
                yield line[6:].decode().rstrip("\n")


class Stream:
    """A stream that a thread reads to its end."""

    def __init__(self, server: Server, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self.status = 0
        self.frames: list[str] = []
        self.times: list[float] = []
        self.error: Exception | None = None
        self._wire = Wire(server)
        self._data = raw("POST", "/v1/completions", json.dumps({**body, "stream": True}).encode(), headers)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self, seconds: float = 60.0) -> Self:
        """Wait for the end of the stream."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"the stream did not end in {seconds} s: {self.frames[-3:]}")
        return self

    @property
    def whole(self) -> bool:
        """Whether the stream is complete: a finish reason, then [DONE]."""
        bodies = self.bodies
        finished = bool(bodies) and any(choice["finish_reason"] for choice in bodies[-1].get("choices", ()))
        return self.error is None and self.status == 200 and finished and self.frames[-1] == "[DONE]"

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(frame) for frame in self.frames if frame != "[DONE]"]

    @property
    def text(self) -> str:
        return text_of(self.bodies)

    def _read(self) -> None:
        try:
            with self._wire as wire:
                wire.send(self._data)
                self.status = wire.head()
                for frame in wire.frames():
                    self.times.append(time.perf_counter())
                    self.frames.append(frame)
        except Exception as error:  # noqa: BLE001  # the test checks it
            self.error = error


def text_of(bodies: Sequence[Any]) -> str:
    """The text of the first choice."""
    return "".join(choice["text"] for body in bodies for choice in body.get("choices", ()) if choice["index"] == 0)


def together(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` on several threads. Raises the first exception."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
