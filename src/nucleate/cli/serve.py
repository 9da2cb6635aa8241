"""Run an OpenAI-compatible HTTP server.

Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /metrics and others.
Sampling flags set the defaults of requests. On SIGTERM or Ctrl-C the server rejects new requests and finishes those in
flight. Needs the extra 'server'.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.cli.sampling_flags import add_sampling, parameter_flag, read_values
from nucleate.parameters.converters import install_extra
from nucleate.parameters.parameter import ParameterError
from nucleate.server.limits import ServerLimits

if TYPE_CHECKING:
    from nucleate.models.runner import Runner
    from nucleate.server.access import APIKeys
    from nucleate.server.request_log import RequestLog
    from nucleate.server.run import Certificate

USAGE = "[OPTIONS]"
COMMON = (
    *("--model", "--host", "--port", "--api-key-file", "--config", "--served-model-name", "--device"),
    *("--max-num-seqs", "--max-model-len", "--kv-cache-memory", "--speculative", "--log-level", "--log-format"),
)
SERVER = (
    Flag(
        "--config FILE",
        "YAML file with values of flags, such as 'max-num-seqs: 64'. Flags and environment variables named after them "
        "(NUCLEATE_MAX_NUM_SEQS) have precedence (default: none).",
    ),
    Flag("--host HOST", "Address to bind (default: 127.0.0.1, this machine only).", "127.0.0.1"),
    Flag("--port PORT", "Port to bind; 0 is any free port", 8000),
    Flag("--uds PATH", "Unix domain socket to bind instead of --host and --port."),
    Flag(
        "--root-path PATH",
        "Path prefix of a proxy in front, such as /llm; requests with and without it are served (default: none).",
        "",
    ),
)
REQUESTS = (
    Flag(
        "--unknown-fields ACTION",
        "What to do with unknown fields of a request body: reject it, or ignore them and list their names in the log "
        "and in the header x-nucleate-ignored-fields",
        "reject",
        choices=("reject", "ignore"),
    ),
    Flag(
        "--scheduling-policy POLICY",
        "Scheduling policy: fcfs (first come, first served) or priority: requests may set priority, and lower runs "
        "first",
        "fcfs",
        choices=("fcfs", "priority"),
    ),
    Flag(
        "--allow-pull",
        "Let clients download models from the Hugging Face hub to this machine's cache (POST /api/pull).",
    ),
)
ACCESS = (
    Flag("--ssl-certfile FILE", "TLS certificate, followed by its chain, as PEM: serve HTTPS (default: HTTP)."),
    Flag(
        "--ssl-keyfile FILE", "Private key of the TLS certificate, without a passphrase (default: in --ssl-certfile)."
    ),
    Flag(
        "--api-key KEY",
        "Accepted API key; can be repeated. Other users of this machine can see it: prefer --api-key-file or the "
        "environment variable NUCLEATE_API_KEYS (default: no authentication).",
        [],
        action="append",
    ),
    Flag("--api-key-file FILE", "File with accepted API keys, one per line (default: none)."),
    Flag(
        "--allow-origin ORIGIN",
        "Allowed CORS origin; * is any; can be repeated (default: none).",
        [],
        action="append",
    ),
    Flag(
        "--allowed-host HOST",
        "Allowed name in the Host header, besides localhost; * is any; can be repeated (default: any if there are API "
        "keys or --host is not localhost, else none).",
        [],
        action="append",
    ),
)
LOG = (
    Flag(
        "--log-format FORMAT",
        "Log format: json or text (default: text in a terminal, else json).",
        choices=("json", "text"),
    ),
    Flag(
        "--log-level LEVEL",
        "Minimum log level: debug, info, warning or error",
        "info",
        choices=("debug", "info", "warning", "error"),
    ),
    Flag("--log-prompts", "Log the first 2,000 characters of each prompt."),
)
REQUIRED = ("starlette", "uvicorn", "httptools", "prometheus_client", "yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, SERVER)
    flags.add_name(parser, several=True)
    add_flags(parser, REQUESTS, "requests")
    add_flags(parser, ACCESS, "TLS, authentication and CORS")
    add_flags(parser, LOG, "logging (to stderr)")
    flags.add_model(parser, engine=True)
    add_flags(parser, map(parameter_flag, ServerLimits.PARAMETERS.values()), "limits")
    add_sampling(parser)


def missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def run(arguments: argparse.Namespace) -> int:
    if names := missing_packages():
        raise UsageError(f"the server needs {', '.join(names)}: {install_extra('server')}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nucleate.jit.kernel_libraries import warm
    from nucleate.llm import LLM
    from nucleate.server.access import ANY, VARIABLE, APIKeys, check_origins, is_loopback, read_keys
    from nucleate.server.app import application
    from nucleate.server.request_log import LogFormat, RequestLog, configure
    from nucleate.server.run import bind, bind_unix, default_sigint_handler, serve
    from nucleate.server.service import REGEX_SECONDS, Service, ServiceOptions

    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"--port must be an integer >= 0 and < 65536, got {arguments.port}")
    limits = ServerLimits(**read_values(arguments, ServerLimits.PARAMETERS))
    values = read_values(arguments)
    check_origins(arguments.allow_origin)
    root_path = _root_path(arguments.root_path)
    certificate = _certificate(arguments)

    def keys_now() -> frozenset[str]:
        return read_keys(arguments.api_key, arguments.api_key_file, os.environ.get(VARIABLE))

    keys = APIKeys(keys_now())
    is_local = arguments.uds is not None or is_loopback(arguments.host)
    binding = bind(arguments.host, arguments.port) if arguments.uds is None else bind_unix(arguments.uds)
    log_format: LogFormat = arguments.log_format or ("text" if sys.stderr.isatty() else "json")
    with (
        default_sigint_handler(),
        binding as bound,  # before the model is loaded, which may take long
        configure(sys.stderr, log_format=log_format, level=arguments.log_level),
    ):
        log = RequestLog(prompts=arguments.log_prompts)
        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(**flags.engine_options(arguments), regex_seconds=REGEX_SECONDS)
        defaults = llm.default_params.override(**values)
        name, *aliases = flags.model_names(arguments)
        log.event("warming up", model=name, runtime=llm.model.runtime)
        warm(background=True, also=lambda: _warm_model(engine.runner, log))  # requests work without compiled kernels
        options = ServiceOptions(
            aliases=aliases,
            root=flags.model_root(arguments),
            ignore_unknown_fields=arguments.unknown_fields == "ignore",
            allow_priority=arguments.scheduling_policy == "priority",
            allow_pull=arguments.allow_pull,
        )
        service = Service(llm, engine, name, defaults, limits, options)
        if not keys and not is_local:
            log.event("no API key is set: anyone who can reach this address can use the server (see --api-key)", 30)
        hosts = arguments.allowed_host or ([] if not keys and is_local and arguments.uds is None else [ANY])
        app = application(service, log, keys=keys, origins=arguments.allow_origin, hosts=hosts, root_path=root_path)
        return serve(app, service, log, bound, lambda: _reload(keys, keys_now, certificate, log), certificate)


def _certificate(arguments: argparse.Namespace) -> Certificate | None:
    from nucleate.server.run import Certificate

    if arguments.ssl_certfile is not None:
        return Certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    if arguments.ssl_keyfile is not None:
        raise UsageError("--ssl-keyfile needs --ssl-certfile")
    return None


def _root_path(path: str) -> str:
    """Return a path prefix without the slash at its end. Raises UsageError."""
    path = path.rstrip("/")
    if path and not re.fullmatch(r"(/[\w.~-]+)+", path, re.ASCII):
        raise UsageError(f"--root-path must be a path such as /llm, got {path[:60]!r}")
    return path


def _warm_model(runner: Runner, log: RequestLog) -> None:
    runner.warm()
    log.event("kernels ready")


def _reload(
    keys: APIKeys, read: Callable[[], frozenset[str]], certificate: Certificate | None, log: RequestLog
) -> None:
    """Read the API keys and the TLS certificate again; what is invalid is kept as it was.

    A server that started without keys stays open; one with keys keeps at least one.
    """

    def reload_keys() -> dict[str, int]:
        found = read() if keys else frozenset[str]()
        if found:
            keys.replace(found)
        return {"count": len(found)}

    parts: dict[str, Callable[[], dict[str, int] | None]] = {"API keys": reload_keys}
    if certificate is not None:
        parts["TLS certificate"] = certificate.reload
    for name, part in parts.items():
        try:
            log.event(f"{name} reloaded", **(part() or {}))
        except ParameterError as error:
            log.event(f"{name} not reloaded", logging.ERROR, error_message=str(error))
