"""The classes of the Ray Serve application. This module needs Ray."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError

from nucleate.scale.asgi_relay import AsgiReplica, Gateway, Messages
from nucleate.server.access import VARIABLE, read_keys


class Replica:
    """A replica of the server, in its process."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self,
        *,
        llm: Mapping[str, Any],
        engine: Mapping[str, Any],
        params: Mapping[str, Any],
        limits: Mapping[str, Any],
        name: str,
        api_key_file: str | None,
    ) -> None:
        keys = read_keys([], None if api_key_file is None else Path(api_key_file), os.environ.get(VARIABLE))
        number = serve.get_replica_context().replica_id.unique_id
        self._replica = AsgiReplica(llm, engine, params, limits, name=name, keys=keys, replica=number)
        await self._replica.start()

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[Any]]:
        """Yield the response to a request as ASGI messages."""
        response = self._replica.respond(scope, body)
        try:
            async for messages in response:
                yield messages
        finally:
            await response.aclose()

    async def check_health(self) -> None:
        """Raise an error if the engine has stopped: Serve then replaces this replica."""
        if self._replica.service.engine.stopped is not None:
            raise self._replica.service.engine.stopped

    async def __del__(self) -> None:
        await self._replica.stop()


class Ingress:
    """The process that the HTTP proxies send requests to. replicas: the handle of the replicas."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    def __serve_build_asgi_app__(self) -> Gateway:  # Ray Serve's name
        return Gateway(
            self._open_stream,
            max_body_bytes=self._max_body_bytes,
            lost=(RayActorError,),
            full=(BackPressureError,),
        )

    async def _open_stream(self, scope: dict[str, Any], body: bytes, key: str | None) -> Messages:
        options = {"session_id": key} if key is not None else {}
        response = self._replicas.options(stream=True, method_name="respond", **options).remote(scope, body)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()
