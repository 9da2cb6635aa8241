"""Binds the socket of the server: a TCP port or a Unix domain socket. It does not accept connections yet."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EADDRINUSE
from pathlib import Path


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP port. port: 0 for any free port. Raises OSError."""
    bound = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        if bound is not None:
            bound.close()
        error.filename = f"{host}:{port}"
        raise
    return bound


@contextmanager
def bind_unix(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix domain socket, and remove its file at the end. The umask decides who may connect. Raises OSError.

    The file of a server that was killed is replaced; another file, or a socket in use, is an error.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            _remove_unused(path)
            bound.bind(os.fspath(path))
        except OSError as error:  # such as a path that is too long
            raise OSError(error.errno or 0, error.strerror or str(error), str(path)) from None
        own = path.stat().st_ino
        try:
            yield bound
        finally:
            with suppress(OSError):
                if path.stat().st_ino == own:
                    path.unlink()


def _remove_unused(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(EADDRINUSE, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError(EADDRINUSE, os.strerror(EADDRINUSE))


def url_of(bound: socket.socket, *, tls: bool) -> str:
    """Return the address for the log: a URL, or ``unix:PATH``."""
    name = bound.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
