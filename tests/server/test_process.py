"""The server process: TLS with reloaded certificates, Unix domain sockets, path prefixes, startup and shutdown."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from served_apps import CHAT, TEXT, ask, toy_app
from server_process import ONE_THREAD, QUIET, Answer, Server, begun, wait_until
from stream_clients import Stream, Wire, raw

from nucleate.cli.main import main
from nucleate.parameters.parameter import ParameterError
from nucleate.server.run import Certificate, bind_unix, url_of

BODY = {"prompt": "Once", "max_tokens": 5, "seed": 1, "stream": True}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


def make_certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A self-signed certificate for localhost with this common name, and its key."""
    folder.mkdir(exist_ok=True)
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += [*(options or ["-nodes"]), "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, "-keyout", keyfile, "-out", certfile], check=True, capture_output=True)
    return certfile, keyfile


def handshake(port: int, trusted: Path) -> str:
    """The common name of the server's certificate."""
    context = ssl.create_default_context(cafile=trusted)
    with socket.create_connection(("127.0.0.1", port), 10) as plain:  # noqa: SIM117
        with context.wrap_socket(plain, server_hostname="localhost") as secure:
            found: Any = secure.getpeercert()
            return str(dict(pair[0] for pair in found["subject"])["commonName"])


@pytest.mark.slow
@needs_openssl
def test_https_and_a_new_certificate(tmp_path: Path) -> None:
    first, second = (make_certificate(tmp_path / name, name) for name in ("first", "second"))
    live = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, live, strict=True):
            shutil.copy(source, target)

    def hang_up(event: str) -> None:
        count = server.log.count(event)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.count(event) > count)

    install(first)
    with Server("--ssl-certfile", str(live[0]), "--ssl-keyfile", str(live[1]), "--log-format", "json") as server:
        assert server.url.startswith("https://127.0.0.1:")
        port = int(server.url.rpartition(":")[2])
        assert handshake(port, live[0]) == "first"
        context = ssl.create_default_context(cafile=live[0])
        context.set_alpn_protocols(["h2", "http/1.1"])
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=context)
        client.sock = context.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname="localhost")
        assert client.sock.selected_alpn_protocol() == "http/1.1"
        assert client.sock.version() in ("TLSv1.2", "TLSv1.3")
        client.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        assert client.getresponse().read().endswith(b"data: [DONE]\n\n")

        install((second[0], first[1]))  # the key does not match
        hang_up("TLS certificate not reloaded")
        assert handshake(port, first[0]) == "first"
        install(second)
        hang_up("TLS certificate reloaded")
        assert handshake(port, second[0]) == "second"
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(port, first[0])
        client.request("GET", "/health")  # the open connection goes on
        assert client.getresponse().status == 200
        with pytest.raises((OSError, http.client.HTTPException)):  # plain HTTP on the TLS port
            server.request("GET", "/health", seconds=10)
        assert handshake(port, second[0]) == "second"
        client.close()
        assert "Traceback" not in server.log


@needs_openssl
def test_invalid_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certfile, keyfile = make_certificate(tmp_path / "a", "a")
    _, other = make_certificate(tmp_path / "b", "b")
    both = tmp_path / "both.pem"
    both.write_text(certfile.read_text() + keyfile.read_text())
    Certificate(both)
    locked = make_certificate(tmp_path / "c", "c", "-passout", "pass:abcdef")
    (tmp_path / "text.pem").write_text("no certificate")
    for pair, message in [
        ((certfile, other), "key values mismatch"),
        ((certfile, None), "cannot be loaded: "),
        ((tmp_path / "none.pem", keyfile), "No such file"),
        ((certfile, tmp_path / "none.pem"), "No such file"),
        ((tmp_path / "text.pem", keyfile), "cannot be loaded: "),
        (locked, "the key has a passphrase"),
    ]:
        with pytest.raises(ParameterError, match=message) as caught:
            Certificate(*pair)
        assert caught.value.field == "ssl_certfile"
    assert main(["serve", "--port", "0", "--ssl-keyfile", str(keyfile)]) == 2
    assert main(["serve", "--port", "0", "--ssl-certfile", "/nowhere"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "nucleate: --ssl-keyfile needs --ssl-certfile"
    assert "TLS certificate /nowhere cannot be loaded: No such file" in second


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(os.fspath(self._path))


@pytest.mark.slow
def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "nucleate.sock"
    with Server("--uds", str(path), "--log-format", "json") as server:
        assert server.url == f"unix:{path}"
        for headers in ({}, {"host": "anything.example"}):
            client = UnixConnection(path)
            client.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json", **headers})
            assert client.getresponse().read().endswith(b"data: [DONE]\n\n")
            client.close()
        with pytest.raises(RuntimeError, match="in use"):
            Server("--uds", str(path))
        assert path.is_socket()
        assert server.stop() == 0
    assert not path.exists()
    assert "no API key" not in server.log
    assert "Traceback" not in server.log


def test_the_file_of_a_unix_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stale.bind(str(path))
    stale.close()
    before = os.umask(0o077)
    try:
        with bind_unix(path) as bound:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
            assert url_of(bound, tls=True) == f"unix:{path}"
            client = UnixConnection(path)
            with pytest.raises(ConnectionRefusedError):
                client.connect()
            client.close()
    finally:
        os.umask(before)
    assert not path.exists()
    with bind_unix(path):
        path.unlink()
        path.write_text("of another program")
    assert path.read_text() == "of another program"
    assert main(["serve", "--uds", str(path)]) == 1
    assert main(["serve", "--uds", str(tmp_path / ("x" * 200))]) == 1
    assert main(["serve", "--uds", "/nowhere/a.sock"]) == 1
    used, long, nowhere = capsys.readouterr().err.splitlines()
    assert used == f"nucleate: {path}: the file exists and is not a socket"
    assert "path too long" in long
    assert nowhere.endswith("No such file or directory")


@toy_app(root_path="/llm/a")
async def test_the_root_path(app: Any) -> None:
    for prefix in ("", "/llm/a"):  # with and without a proxy that removes it
        assert (await ask(app, f"{prefix}/v1/completions", TEXT)).status == 200
        assert (await ask(app, f"{prefix}/v1/chat/completions", CHAT)).status == 200
        assert (await ask(app, f"{prefix}/v1/models/toy")).json["id"] == "toy"
        assert (await ask(app, f"{prefix}/nowhere")).status == 404
    assert (await ask(app, "/llm/b/health")).status == 404
    assert (await ask(app, "/llm/ahealth")).status == 404
    assert (await ask(app, "/openapi.json")).json["servers"] == [{"url": "/llm/a"}]
    text = (await ask(app, "/metrics")).data.decode()
    assert 'nucleate_http_requests_total{model_name="toy",route="/v1/completions",status="200"} 2.0' in text


@toy_app(root_path="/a", keys=["secret"])
async def test_the_root_path_does_not_open_routes(app: Any) -> None:
    for prefix in ("", "/a"):
        assert (await ask(app, f"{prefix}/health")).status == 200
        assert (await ask(app, f"{prefix}/v1/models")).status == 401
    assert (await ask(app, "/health/v1/models")).status == 401


@pytest.mark.parametrize("path", ["llm", "/a b", "/a//b", "/a?b", "/{model}", "http://a/b", "/\n"])
def test_invalid_root_paths(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", "--root-path", path]) == 2
    assert "--root-path must be a path such as /llm" in capsys.readouterr().err


STORY = {"prompt": "Once upon a time", "temperature": 0.9, "ignore_eos": True}
END = 60.0
"""Seconds that a server may take to exit beyond its shutdown timeout, on a busy machine."""


def repeat_requests(server: Server, statuses: list[int]) -> None:
    """Send requests one after the other on a persistent connection, until new ones are refused."""
    data, refused = raw("POST", "/v1/completions", json.dumps({**STORY, "max_tokens": 2}).encode()), 0
    while refused < 3:
        with suppress(OSError):  # the server closed it between two requests
            try:
                wire = Wire(server)
            except ConnectionRefusedError:
                refused += 1
                continue
            with wire:
                while True:
                    wire.send(data)
                    status = wire.head()
                    body = json.loads(wire.read())  # IncompleteRead or ValueError: a response is torn
                    code = body["error"]["code"] if status != 200 else None
                    assert (status, code) in ((200, None), (503, "shutting_down"))
                    statuses.append(status)
                    time.sleep(0.01)


def begin_requests(pool: ThreadPoolExecutor, server: Server, **fields: Any) -> list[Future[Answer]]:
    """Begin requests for complete responses."""
    bodies = [{**STORY, "seed": seed, **fields} for seed in range(6)]
    return [pool.submit(server.request, "POST", "/v1/completions", body) for body in bodies]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.fast_cases(0)
def test_requests_in_flight_are_completed(number: signal.Signals) -> None:
    with Server(environment=ONE_THREAD) as server, ThreadPoolExecutor(8) as pool:
        streams = [Stream(server, {**STORY, "seed": seed, "max_tokens": 200}) for seed in range(6)]
        answers = begin_requests(pool, server, max_tokens=200)
        statuses: list[list[int]] = [[], []]
        loops = [pool.submit(repeat_requests, server, own) for own in statuses]
        wait_until(lambda: all(stream.frames for stream in streams) and all(statuses), 60)
        wait_until(lambda: server.metric("nucleate_num_requests_running") >= 12, 30)
        server.process.send_signal(number)
        assert server.process.wait(30 + END) == 0
        for stream, answer in zip(streams, answers, strict=True):
            assert stream.wait(10).whole, (stream.status, stream.error, stream.frames[-3:])
            assert answer.result(10).status == 200
            assert answer.result().json["choices"][0]["text"] == stream.text
        for loop in loops:
            loop.result(10)
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_streams_beyond_the_shutdown_timeout_get_an_error() -> None:
    flags = ("--shutdown-timeout-seconds", "0.3")
    with Server(*flags, environment=ONE_THREAD) as server, ThreadPoolExecutor(6) as pool:
        streams = [Stream(server, {**STORY, "max_tokens": 900, "n": 8}) for _ in range(4)]
        answers = begin_requests(pool, server, max_tokens=900, n=8)
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
        for answer in answers:
            found = answer.result(10)
            assert (found.status, found.json["error"]["code"]) == (503, "shutting_down")
            assert "retry-after" in found.headers
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.fast_cases(0)
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
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0.3, 1.0])
@pytest.mark.fast_cases(0)
def test_a_signal_during_startup(number: signal.Signals, seconds: float) -> None:
    environment = {**os.environ, **QUIET}
    with begun("-m", "nucleate", "serve", "--port", "0", env=environment, stderr=subprocess.PIPE) as process:
        time.sleep(seconds)  # somewhere between the first import and the last
        process.send_signal(number)
        _, err = process.communicate(timeout=END)
    assert b"Traceback" not in err
    assert process.returncode in (0, -number, 128 + number)


@pytest.mark.slow
def test_a_port_in_use_is_a_one_line_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        command = [sys.executable, "-m", "nucleate", "serve", "--port", str(port)]
        done = subprocess.run(command, env={**os.environ, **QUIET}, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert str(port) in line
    assert "in use" in line
