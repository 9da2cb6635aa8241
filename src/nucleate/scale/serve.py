"""Online serving with Ray Serve: replicas of the server, with requests with the same prefix on the same replica."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nucleate.parameters.keywords import with_suggestions
from nucleate.parameters.parameter import ParameterError
from nucleate.scale.asgi_relay import AsgiReplica, Gateway, Messages
from nucleate.scale.ray_extra import require_ray, threads_option
from nucleate.server.access import VARIABLE, read_keys
from nucleate.server.limits import ServerLimits

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Ray Serve's router from a key to a replica. If a replica has no room, the next one of the key gets the request: by
default only 2 others, which is too few for a prefix that is more popular than 3 replicas can serve."""
MAX_NUM_SEQS = 64
"""Default of the engine: sequences that run at once."""
GATEWAY_REQUESTS = 2048


@with_suggestions
def app(
    model: str | None = None,
    *,
    name: str | None = None,
    llm: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    limits: Mapping[str, Any] | None = None,
    api_key_file: str | None = None,
    min_replicas: int = 1,
    max_replicas: int | None = None,
    requests_per_replica: float | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    gateways: int = 1,
    num_cpus: float = 0.5,
    num_gpus: float = 0.0,
    threads: int | None = None,
    drain_seconds: float = 600.0,
) -> Any:
    """Return a Ray Serve application with the API of ``nucleate serve``, for ``ray.serve.run``.

    model: folder or Hugging Face id, at the same place on all machines (default: the embedded model). name: its name in
    requests. llm, engine: further keyword arguments of ``LLM`` and ``LLM.new_engine``. params: sampling parameters that
    a request does not set. limits: fields of ``ServerLimits``. api_key_file: as of ``nucleate serve``;
    ``NUCLEATE_API_KEYS`` counts too. min_replicas, max_replicas: if they differ, Serve holds the requests in flight per
    replica at requests_per_replica (default: half of ``max_num_seqs``). autoscaling: further fields of Serve's
    ``AutoscalingConfig``. gateways: processes that pass requests on. num_cpus, num_gpus: reserved per replica.
    threads: CPU threads of torch and BLAS per replica (default: num_cpus, but at least one).
    drain_seconds: how long a replica that is stopped may finish its requests.

    Raises ParameterError if Ray is not installed, or for a wrong number of replicas or limit.
    """
    require_ray()
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    most = min_replicas if max_replicas is None else max_replicas
    if not 1 <= min_replicas <= most:
        raise ParameterError("max_replicas", f"replicas must be 1 <= min <= max, got {min_replicas} and {most}")
    checked = ServerLimits(**(limits or {}))
    sequences = (engine or {}).get("max_num_seqs", MAX_NUM_SEQS)
    target = requests_per_replica or sequences / 2
    scaling: dict[str, Any] = {"num_replicas": min_replicas}
    if most > min_replicas:
        bounds = {"min_replicas": min_replicas, "max_replicas": most, "target_ongoing_requests": target}
        scaling = {"autoscaling_config": AutoscalingConfig(**bounds, **(autoscaling or {}))}
    replica = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=sequences,
        max_queued_requests=checked.max_queued_seqs,
        graceful_shutdown_timeout_s=drain_seconds,
        ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus, **threads_option(threads)},
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": most - 1}
        ),
        health_check_period_s=2.0,
        **scaling,
    )
    options = {"llm": {"model": model, **(llm or {})}, "engine": engine or {}, "params": params or {}}
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=gateways,
        max_ongoing_requests=GATEWAY_REQUESTS,
        graceful_shutdown_timeout_s=drain_seconds,
        ray_actor_options={"num_cpus": 0.1},
    )
    served = name or (Path(model).name if model else "nucleate-tiny")
    bound = replica.bind(**options, limits=limits or {}, name=served, api_key_file=api_key_file)
    return ingress.bind(bound, checked.max_request_body_bytes)


def build(args: Mapping[str, Any]) -> Any:
    """Return ``app(**args)``, for ``serve run nucleate.scale.serve:build model=FOLDER`` and configuration files."""
    import yaml

    return app(**{name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in args.items()})


class Replica(AsgiReplica):
    """A replica of the server, in its process."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, *, api_key_file: str | None, **options: Any
    ) -> None:
        from ray import serve

        keys = read_keys([], None if api_key_file is None else Path(api_key_file), os.environ.get(VARIABLE))
        number = serve.get_replica_context().replica_id.unique_id
        super().__init__(**options, keys=keys, replica=number)
        await self.start()

    async def check_health(self) -> None:
        """Raise an error if the engine has stopped: Serve then replaces this replica."""
        if self.service.engine.stopped is not None:
            raise self.service.engine.stopped

    async def __del__(self) -> None:
        await self.stop()


class Ingress:
    """The process that the HTTP proxies send requests to. replicas: the handle of the replicas."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    def __serve_build_asgi_app__(self) -> Gateway:  # Ray Serve's name
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError

        return Gateway(self._open_stream, self._max_body_bytes, lost=(RayActorError,), full=(BackPressureError,))

    async def _open_stream(self, scope: dict[str, Any], body: bytes, key: str | None) -> Messages:
        options = {"session_id": key} if key is not None else {}
        response = self._replicas.options(stream=True, method_name="respond", **options).remote(scope, body)
        try:
            async for messages in response:
                yield messages
        finally:
            response.cancel()
