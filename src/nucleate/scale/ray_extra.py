"""Finds and starts Ray."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError


def missing_ray() -> str | None:
    """Return how to install Ray, if it is not installed."""
    missing = importlib.util.find_spec("ray") is None
    return f"Ray is not installed: {install_extra('ray')}" if missing else None


def require_ray() -> None:
    """Raise ParameterError if Ray is not installed."""
    if message := missing_ray():
        raise ParameterError("ray", message)


def threads_option(threads: int | None) -> dict[str, Any]:
    """Return the option of an actor with which it has that many CPU threads; None: as Ray decides."""
    return {} if threads is None else {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}}}


def start_ray(address: str = "local") -> None:
    """Join a cluster, or start Ray on this machine ("local"). Raises ParameterError if Ray is not installed.

    Raises ConnectionError if there is no cluster at the address.
    """
    require_ray()
    import ray

    options = {"include_dashboard": False} if address == "local" else {}
    ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR, **options)
