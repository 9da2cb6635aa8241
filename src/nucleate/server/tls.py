"""The TLS certificate of the server. It can be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from nucleate.parameters.parameter import ParameterError


class Certificate:
    """A certificate with its chain and private key, as PEM. keyfile: None if the key is in ``certfile``.

    ``context`` serves new connections. Raises ParameterError if the files cannot be loaded.
    """

    def __init__(self, certfile: Path, keyfile: Path | None = None) -> None:
        self._certfile, self._keyfile = certfile, keyfile
        self.context = self._load(_context())

    def reload(self) -> None:
        """Read the files again. New connections use the new certificate. Raises ParameterError, without any effect."""
        self._load(_context())  # a pair that does not match would leave the context unusable
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        files = str(self._certfile) if self._keyfile is None else f"{self._certfile} with the key {self._keyfile}"
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=_no_passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            text = str(reason).replace("_", " ").lower() if isinstance(error, ssl.SSLError) else reason
            raise ParameterError("ssl_certfile", f"TLS certificate {files} cannot be loaded: {text}") from None
        return context


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
