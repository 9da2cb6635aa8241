"""The browser and the notebook front ends that show the widget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import chromium, unavailable
from server_process import QUIET, free_port, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDGET = """
import nucleate as nc
nc.inspect(nc.LLM(), "Once upon a time", max_tokens=24, temperature=0.8, top_p=0.9, seed=7)
"""
MARIMO = """
import marimo
app = marimo.App()
@app.cell
def _():
{cell}
    return
if __name__ == "__main__":
    app.run()
"""
MILLISECONDS = 120_000  # a kernel starts, and the machine may be busy


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page whose uncaught exceptions fail the test. Notebook front ends themselves log warnings."""
    context = browser.new_context(viewport={"width": 1400, "height": 1200})
    context.set_default_timeout(MILLISECONDS)
    made, errors = context.new_page(), list[str]()
    made.on("pageerror", lambda error: errors.append(f"{error.name}: {error.message}\n{error.stack}"))
    yield made
    context.close()
    assert errors == []


@pytest.fixture
def jupyterlab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook in JupyterLab whose one cell ends with the widget."""
    if find_spec("jupyterlab") is None or find_spec("ipykernel") is None:
        unavailable("JupyterLab is not installed: make setup-notebooks")
    cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {},
        "outputs": [],
        "execution_count": None,
        "source": WIDGET.strip(),
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "inspect.ipynb").write_text(json.dumps(notebook), "utf-8")
    settings = tmp_path / "config" / "labconfig"
    settings.mkdir(parents=True)
    offline = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (settings / "page_config.json").write_text(json.dumps(offline), "utf-8")
    flags = ("--no-browser", "--allow-root", "--ip=127.0.0.1", "--port={port}", "--IdentityProvider.token=")
    homes = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "run",
        "IPYTHONDIR": "ipython",
    }
    environment = {name: str(tmp_path / folder) for name, folder in homes.items()}
    with notebook_server(("jupyterlab", *flags, "--LabApp.extension_manager=readonly"), tmp_path, environment) as url:
        yield f"{url}/lab/tree/inspect.ipynb"


@pytest.fixture
def marimo(tmp_path: Path) -> Iterator[str]:
    """The address of a marimo app that shows the widget."""
    if find_spec("marimo") is None:
        unavailable("marimo is not installed: make setup-notebooks")
    cell = "\n".join(f"    {line}" for line in WIDGET.strip().splitlines())
    (tmp_path / "inspect_app.py").write_text(MARIMO.format(cell=cell), "utf-8")
    flags = ("--headless", "--no-token", "--host", "127.0.0.1", "--port", "{port}")
    homes = {name: str(tmp_path) for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    environment = {"MARIMO_SKIP_UPDATE_CHECK": "1", **homes}
    with notebook_server(("marimo", "run", "inspect_app.py", *flags), tmp_path, environment) as url:
        yield url


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
