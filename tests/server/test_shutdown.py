"""Shutdown: signals, requests in flight, the timeout, and failures at startup."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from server_process import QUIET, Server, begun, wait_until
from stream_clients import Stream, Wire, raw

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # busy threads starve the others where tests run side by side
STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
END = 60.0
"""Seconds that a server may take to exit beyond its shutdown timeout, on a busy machine."""


class CompleteRequest(threading.Thread):
    """A request for a complete response."""

    def __init__(self, server: Server, body: Any) -> None:
        super().__init__(daemon=True)
        self.server, self.body, self.response, self.error = server, body, None, None
        self.start()

    def run(self) -> None:
        try:
            self.response = self.server.request("POST", "/v1/completions", self.body, seconds=60)
        except OSError as error:
            self.error = error


class RequestLoop(threading.Thread):
    """New requests, one after the other, on a persistent connection."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server, self.statuses, self.refused, self.torn = server, [], 0, []
        self.start()

    def run(self) -> None:
        data = raw("POST", "/v1/completions", json.dumps({**STORY, "max_tokens": 2}).encode())
        while self.refused < 3:
            try:
                with Wire(self.server) as wire:
                    while True:
                        wire.send(data)
                        status = wire.head()
                        try:
                            body = json.loads(wire.read())
                        except (OSError, ValueError) as error:
                            self.torn.append(error)
                            raise ConnectionError from error
                        self.statuses.append(status)
                        code = body["error"]["code"] if status != 200 else None
                        assert (status, code) in ((200, None), (503, "shutting_down"))
                        time.sleep(0.01)
            except ConnectionRefusedError:
                self.refused += 1
            except OSError:  # the server closed it between two requests
                pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.fast_cases(1)
def test_requests_in_flight_are_completed(number: signal.Signals) -> None:
    with Server(environment=ONE_THREAD) as server:
        streams = [Stream(server, {**STORY, "seed": seed, "max_tokens": 200}) for seed in range(6)]
        complete_requests = [CompleteRequest(server, {**STORY, "seed": seed, "max_tokens": 200}) for seed in range(6)]
        loops = [RequestLoop(server) for _ in range(2)]
        wait_until(lambda: all(stream.frames for stream in streams) and all(one.statuses for one in loops), 60)
        wait_until(lambda: server.metric("nucleate_num_requests_running") >= 12, 30)
        server.process.send_signal(number)
        start = time.perf_counter()
        assert server.process.wait(30 + END) == 0
        assert time.perf_counter() - start < 30 + END
        for stream, complete in zip(streams, complete_requests, strict=True):
            assert stream.wait(10).whole, (stream.status, stream.error, stream.frames[-3:])
            complete.join(10)
            assert complete.response is not None, complete.error
            assert complete.response.status == 200
            assert complete.response.json["choices"][0]["text"] == stream.text
        for one in loops:
            one.join(10)
            assert not one.torn
            assert not one.is_alive()
        assert "Traceback" not in server.log


def test_streams_beyond_the_shutdown_timeout_get_an_error() -> None:
    with Server("--shutdown-timeout-seconds", "0.3", environment=ONE_THREAD) as server:
        streams = [Stream(server, {**STORY, "max_tokens": 900, "n": 8}) for _ in range(4)]
        complete_requests = [CompleteRequest(server, {**STORY, "max_tokens": 900, "n": 8}) for _ in range(2)]
        wait_until(lambda: all(stream.frames for stream in streams), 60)
        wait_until(lambda: server.metric("nucleate_num_requests_running") >= 41, 30)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(0.3 + END) == 0
        for stream in streams:
            stream.wait(10)
            assert stream.error is None
            assert stream.frames[-1] == "[DONE]"
            error = json.loads(stream.frames[-2])["error"]
            assert (error["code"], error["type"]) == ("shutting_down", "server_error")
        for complete in complete_requests:
            complete.join(10)
            assert complete.response is not None, complete.error
            assert (complete.response.status, complete.response.json["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in complete.response.headers
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.fast_cases(1)
def test_a_second_signal_ends_the_server_at_once(number: signal.Signals) -> None:
    with Server(environment=ONE_THREAD) as server:
        stream = Stream(server, {**STORY, "max_tokens": 900, "n": 64})
        wait_until(lambda: stream.frames, 60)
        server.process.send_signal(number)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(number)
        server.process.wait(END)
        stream.wait(10)
        assert not stream.whole


def test_a_second_signal_exits_without_a_traceback() -> None:
    with Server(environment=ONE_THREAD) as server:
        stream = Stream(server, {**STORY, "max_tokens": 900, "n": 64})
        wait_until(lambda: stream.frames, 60)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        server.process.wait(END)
        stream.wait(10)
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.3, 1.0])
@pytest.mark.fast_cases(2)
def test_a_signal_during_startup(number: signal.Signals, seconds: float) -> None:
    environment = {**os.environ, **QUIET}
    with begun("-m", "nucleate", "serve", "--port", "0", env=environment, stderr=subprocess.PIPE) as process:
        time.sleep(seconds)  # somewhere between the first import and the last
        process.send_signal(number)
        _, err = process.communicate(timeout=END)
    assert b"Traceback" not in err
    assert process.returncode in (0, -number, 128 + number)


def test_a_port_in_use_is_a_one_line_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        command = [sys.executable, "-m", "nucleate", "serve", "--port", str(port)]
        done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert str(port) in line
    assert "in use" in line
