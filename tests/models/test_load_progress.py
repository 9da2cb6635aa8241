"""Progress reports while a model is loaded."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest

from nucleate.models.loader import EMBEDDED, load
from nucleate.models.transformers import transformers_model as module
from nucleate.models.transformers.transformers_model import LoadProgress, load_progress

pytest.importorskip("transformers", reason="needs the extra 'torch'")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(progress: threading.Event) -> None:
    assert progress.wait(60)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Report at once and often. The event is set after the second report."""
    event, reports = threading.Event(), []
    original = LoadProgress.__str__

    def record(progress: LoadProgress) -> str:
        reports.append(progress)
        if len(reports) > 1:
            event.set()
        return original(progress)

    monkeypatch.setattr(LoadProgress, "__str__", record)
    for name in ("DELAY", "LOG_INTERVAL", "LINE_INTERVAL"):
        monkeypatch.setattr(module, name, 0.001)
    return event


def test_a_terminal_shows_one_line_that_is_erased(reported: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    with load_progress(EMBEDDED):
        wait_for(reported)
    text = stderr.getvalue()
    assert re.match(r"\rloading embedded: 0% of the weights, 0 s *\r", text)
    assert re.search(r"\r +\r$", text)
    assert "\n" not in text


def test_the_log_at_level_info(reported: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nucleate"), load_progress(EMBEDDED):
        wait_for(reported)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].startswith("loading embedded: 0% of the weights, ")
    assert re.fullmatch(r"loaded embedded in \d+\.\d s", messages[-1])


def test_otherwise_nothing_is_reported(
    reported: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for stderr in (io.StringIO(), None):
        monkeypatch.setattr("sys.stderr", stderr)
        before = threading.active_count()
        with load_progress(EMBEDDED):
            assert threading.active_count() == before
        assert stderr is None or not stderr.getvalue()
    assert not caplog.records


def test_a_failure_ends_the_reports(reported: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stderr := Terminal())
    with pytest.raises(KeyError), load_progress(EMBEDDED):  # noqa: PT012
        wait_for(reported)
        raise KeyError
    assert stderr.getvalue().endswith(" \r")


def test_the_share_of_the_weights_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares = []
    counted = LoadProgress._counted

    def record(progress: LoadProgress, weights: object) -> object:
        for weight in counted(progress, weights):
            shares.append(progress.share)
            yield weight

    monkeypatch.setattr(LoadProgress, "_counted", record)
    monkeypatch.setattr("sys.stderr", Terminal())
    assert load(EMBEDDED, runtime="torch").runtime == "torch cpu float32"
    assert len(shares) > 50
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.95 < shares[-1] < 1
