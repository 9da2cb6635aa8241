"""The environment of all tests of the command line: no terminal, whatever the tests run in."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
