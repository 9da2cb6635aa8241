"""``nucleate inspect --web``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from base64 import urlsafe_b64decode

import pytest
from server_process import wait_until

from nucleate.cli.inspect import settings_hash
from nucleate.cli.main import main


def test_the_hash_holds_prompt_and_parameters() -> None:
    hashed = settings_hash("Große 'Wörter' \U0001f98a", {"temperature": 0.5, "stop": ["x"]})
    text = hashed.removeprefix("#s=")
    assert re.fullmatch(r"[\w-]+", text)
    found = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert found == {"prompt": "Große 'Wörter' \U0001f98a", "params": {"temperature": 0.5, "stop": ["x"]}}
    assert settings_hash(None, {}) == ""


def test_wrong_parameters_are_found_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--web", "--temperature", "-1"]) == 2
    assert "temperature must be" in capsys.readouterr().err


def test_the_page_is_served_until_ctrl_c() -> None:
    command = [sys.executable, "-m", "nucleate", "inspect", "--web", "--no-browser", "Tom saw", "--top-p", "0.9"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = re.search(r"http://127\.0\.0\.1:\d+/inspector#s=[\w-]+", line)
            assert url is not None, line
            wait_until(lambda: page_of(url[0].partition("#")[0]), 120)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def page_of(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=30) as page:
            return b"<script" in page.read()
    except OSError:
        return False
