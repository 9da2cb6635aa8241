"""Programs with Ray that tests start: the Serve application, and what to kill in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from server_process import begun, free_port
from stream_clients import Wire, raw

PROGRAM = """
import json, logging, sys
from ray import serve
from nucleate.scale.ray_extra import start_ray
from nucleate.scale.serve import app
start_ray()
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
logging.getLogger("ray.serve").setLevel(logging.ERROR)
for line in sys.stdin:
    serve.run(app(**json.loads(line)), name="test")
    print("ready", flush=True)
serve.shutdown()
"""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "RAY_USAGE_STATS_ENABLED": "0"}


def require_ray() -> None:
    """Skip the test without Ray, unless the environment requires it."""
    if os.environ.get("NUCLEATE_TEST_RAY") != "required":
        pytest.importorskip("ray", reason="Ray is not installed (make setup-ray)")


def descendants(process: subprocess.Popen[Any], title: str) -> list[psutil.Process]:
    """The processes below a process whose command line begins with a title."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(title):
                found.append(child)
        except psutil.Error:  # it has ended
            continue
    return found


def wait_for(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Poll until a value is true, and return it."""
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, f"not true after {seconds} s"
        time.sleep(0.02)
    return value


class Response(Wire):
    """A response of the application. Close it: ``with application.open(...) as response``."""

    def __init__(self, port: int, path: str, body: Any) -> None:
        super().__init__(f"http://127.0.0.1:{port}", 120.0)
        self.send(raw("GET", path) if body is None else raw("POST", path, json.dumps(body).encode()))
        self.status = self.head()
        assert self.answer is not None
        self.headers = self.answer.headers
        self.replica = self.headers.get("x-nucleate-replica")

    def events(self) -> Iterator[Any]:
        """The data of the events of a stream."""
        return (frame if frame == "[DONE]" else json.loads(frame) for frame in self.frames())


class Application:
    """A Serve application in a process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def deploy(self, **options: Any) -> None:
        """Deploy the application, or change it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(options) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.strip() == "ready":
                return
        raise AssertionError("the application did not start")

    def open(self, path: str, body: Any = None) -> Response:
        """Send a request and return the response, whose body is not read yet."""
        return Response(self.port, path, body)

    def complete(self, **body: Any) -> tuple[str, str]:
        """Return the text of a completion, and the replica that made it."""
        with self.open("/v1/completions", body) as response:
            assert response.status == 200, response.read()
            return json.loads(response.read())["choices"][0]["text"], str(response.replica)

    def load(self, replica: str) -> int | None:
        """Requests in flight on a replica; None if this time another one answers."""
        with self.open("/load") as response:
            value: int = json.loads(response.read())["server_load"]
            return value if response.replica == replica else None

    def kill(self, replica: str) -> None:
        """Kill the process of a replica with SIGKILL."""
        for process in descendants(self.process, "ray::ServeReplica:test:Replica"):
            if any(replica in file.path for file in process.open_files()):
                os.kill(process.pid, signal.SIGKILL)
                return
        raise AssertionError(f"there is no process of replica {replica}")


@contextmanager
def application(**options: Any) -> Iterator[Application]:
    """Run a Serve application."""
    port = free_port()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with begun("-c", PROGRAM, str(port), **pipes, env={**os.environ, **ENVIRONMENT}) as process:
        made = Application(process, port)
        try:
            made.deploy(**options)
            yield made
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()
