"""The server process that client tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server process with the bundled model and default limits."""
    with Server() as running:
        yield running
