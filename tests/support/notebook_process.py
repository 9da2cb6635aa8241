"""A notebook front end in a process of its own, for tests in a browser."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from server_process import QUIET, wait_until


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@contextmanager
def notebook_server(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float = 300.0
) -> Iterator[str]:
    """Run ``python -m ...`` in a folder, and yield its address when it answers. {port} in the arguments is replaced."""
    port = free_port()
    command = [sys.executable, "-m", *(argument.replace("{port}", str(port)) for argument in arguments)]
    log = folder / "server.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **QUIET, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # kernels are its children
        )
    try:
        wait_until(lambda: process.poll() is not None or _answers(url), seconds)
        assert process.poll() is None, log.read_text("utf-8", "replace")
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
