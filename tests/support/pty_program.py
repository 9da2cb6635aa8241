"""A program in its own pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping


class PtyProgram:
    """``nucleate`` in a terminal of its own. ``expect`` reads until a text appears.

    environment: variables that are added to those of the tests.
    """

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        own = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal to the program
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nucleate", *arguments],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
            preexec_fn=own,  # noqa: PLW1509  # no threads run here
        )
        os.close(inside)
        self.unread = ""

    def expect(self, text: str, seconds: float = 120) -> str:
        """Return what was printed before the text."""
        deadline = time.monotonic() + seconds
        while text not in self.unread:
            waiting = select.select([self.screen], [], [], max(0.0, deadline - time.monotonic()))[0]
            try:
                data = os.read(self.screen, 4096) if waiting else b""
            except OSError:  # the program has ended
                data = b""
            if not data:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{text!r} is not in {self.unread!r}")
            self.unread += data.decode(errors="replace")
        before, _, self.unread = self.unread.partition(text)
        return before

    def type(self, keys: bytes) -> None:
        """Type keys, such as Ctrl-C as ``\\x03``."""
        os.write(self.screen, keys)

    def end(self) -> int:
        """Wait for the end of the program and return its exit status."""
        try:
            return self.process.wait(timeout=120)
        finally:
            self.process.kill()
            os.close(self.screen)
