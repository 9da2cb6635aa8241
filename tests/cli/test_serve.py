"""``nucleate serve``: its flags, and errors before the server starts."""

from __future__ import annotations

import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest

from nucleate.cli import serve
from nucleate.cli.main import main
from nucleate.jit import kernel_libraries
from nucleate.server import access
from nucleate.server.access import VARIABLE
from nucleate.server.limits import ServerLimits
from nucleate.server.run import bind


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert main(["serve", "--port", "0", *arguments]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_every_limit_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert len(ServerLimits.PARAMETERS) == 11
    for name, parameter in ServerLimits.PARAMETERS.items():
        assert f" --{name.replace('_', '-')} " in text
        assert parameter.help.rstrip(".") in text
    assert "default: 4194304;" in text


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    lines = project["optional-dependencies"]["server"]
    extra = {re.split(r"[^\w-]", line)[0].replace("-", "_").replace("PyYAML", "yaml") for line in lines}
    assert extra - {"uvloop", "nucleate"} == set(serve.REQUIRED)
    assert serve.missing_packages() == []
    monkeypatch.setattr(serve, "REQUIRED", ("uvicorn", "no_such_package"))
    assert "needs no_such_package: install the extra 'server'" in error_of(capsys)


def test_invalid_default_parameters(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(
        kernel_libraries, "warm", lambda *_, **__: None
    )  # the server would keep running beside other tests
    error = run("serve --port 0 --max-logprobs 2 --logprobs 3", status=2).err.splitlines()[-1]
    assert error == "nucleate: logprobs must be at most 2 on this server, got 3"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--regex", "("], "nucleate: regex: "),
        (["--json-schema", '{"uniqueItems": true}'], "nucleate: json_schema: cannot enforce uniqueItems"),
        (["--choice", "a" * 20_001], "nucleate: choice is too large: 20001 characters"),
    ],
)
def test_an_unsupported_default_constraint(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    monkeypatch.setattr(kernel_libraries, "warm", lambda *_, **__: None)
    assert run("serve --port 0", *arguments, status=2).err.splitlines()[-1].startswith(words)


def test_an_environment_variable_without_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert VARIABLE in error_of(capsys)


def test_a_port_in_use_is_an_error_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = error_of(capsys, "--port", str(port), "--model", "/nowhere", status=1)
    assert f"127.0.0.1:{port}" in error
    assert "in use" in error


def test_an_invalid_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no.such.host.invalid:0: " in error_of(capsys, "--host", "no.such.host.invalid", status=1)


def test_a_socket_accepts_no_connections_before_it_is_served() -> None:
    with bind("127.0.0.1", 0) as bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=1)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback_addresses(host: str, local: bool) -> None:
    assert access.is_loopback(host) == local
