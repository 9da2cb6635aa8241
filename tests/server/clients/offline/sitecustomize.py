"""Block and record lookups of hosts other than loopback in a client's process (loaded through PYTHONPATH).

The attempts are written to the file that OFFLINE_LOG names, because many clients continue silently without the network.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", "::")


def block_lookups(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    name = host.decode() if isinstance(host, bytes) else host
    if name not in HERE:
        with Path(os.environ["OFFLINE_LOG"]).open("a") as log:
            log.write(f"{event} {name}\n")
        raise OSError(f"no network here: {name}")


sys.addaudithook(block_lookups)
