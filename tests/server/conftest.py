"""The server process that client tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server process with the bundled model and default limits, except one that a busy machine would reach."""
    with Server(constants={"nucleate.structured_output.guide.VALIDATION_SECONDS": 60.0}) as running:
        yield running
