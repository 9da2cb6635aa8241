"""The environment of all tests of the command line: no terminal, whatever the tests run in."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from batch_folder import Folder

from nucleate.cli.main import main


@pytest.fixture(autouse=True)
def no_terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Folder:
    return Folder(tmp_path, capsys)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process, checks its exit status, and returns what it printed: out and err.

    line: the beginning of the command line, as in a shell; the other arguments follow as they are.
    """

    def run(line: str, *arguments: str, status: int = 0) -> Any:
        capsys.readouterr()
        returned, printed = main([*shlex.split(line), *arguments]), capsys.readouterr()
        assert returned == status, printed.err
        return printed

    return run
