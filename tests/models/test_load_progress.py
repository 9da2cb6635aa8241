"""Progress reports while a model is loaded."""

from __future__ import annotations

import io

import pytest

from nucleate.models.loader import EMBEDDED, load
from nucleate.models.transformers import transformers_model as module

pytest.importorskip("transformers", reason="needs the extra 'torch'")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DELAY", 0.0)


def test_a_terminal_shows_a_bar_that_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    assert load(EMBEDDED, dtype="float32", runtime="torch").runtime == "torch cpu float32"
    text = stderr.getvalue()
    assert text.startswith("\rloading embedded:   0%")
    assert text.endswith(" \r")
    assert "\n" not in text


def test_the_log_at_level_info(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    with caplog.at_level("INFO", "nucleate"):
        load(EMBEDDED, runtime="torch")
    first, last = (record.getMessage() for record in caplog.records)
    assert first == "loading embedded"
    assert last.startswith("loaded embedded in ")
    assert not stderr.getvalue()


def test_otherwise_nothing_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr("sys.stderr", stderr)
        load(EMBEDDED, runtime="torch")
        assert stderr is None or not stderr.getvalue()
    assert not caplog.records
