"""Run an OpenAI-compatible HTTP server.

Endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health, /metrics and others.
Sampling flags set the defaults of requests. On SIGTERM or Ctrl-C the server rejects new requests and finishes those in
flight. Needs the extra: pip install 'nucleate[server]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.watermark_flags import add_watermark
from nucleate.parameters.parameter import ParameterError
from nucleate.server.limits import ServerLimits

if TYPE_CHECKING:
    from nucleate.models.runner import Runner
    from nucleate.server.auth import APIKeys
    from nucleate.server.request_log import RequestLog

USAGE = "[OPTIONS]"
COMMON = {
    "--model": "Folder or Hugging Face id (default: bundled).",
    "--host": "Address to bind (default: 127.0.0.1).",
    "--port": "Port to bind; 0 is any free port (default: 8000).",
    "--api-key-file": "File with accepted API keys, one per line.",
    "--served-model-name": "Model name in requests (default: --model).",
    "--device": "auto, cpu, cuda, cuda:1, ... (default: auto).",
    "--max-num-seqs": "Maximum sequences that run at once (default: 64).",
    "--max-model-len": "Maximum tokens of prompt and completion.",
    "--kv-cache-memory": "Size of the KV cache in bytes.",
    "--speculative": "Speculative decoding method (default: off).",
    "--log-level": "debug, info, warning or error (default: info).",
    "--log-format": "json or text (default: text in a terminal).",
}
"""The options of ``--help``."""
REQUIRED = ("starlette", "uvicorn", "httptools", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="Address to bind (default: 127.0.0.1, this machine only)."
    )
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=8000, help="Port to bind; 0 is any free port (default: 8000)."
    )
    flags.add_name(parser)
    access = parser.add_argument_group("authentication and CORS")
    access.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="Accepted API key; can be repeated. Other users of this machine can see it: prefer --api-key-file or the "
        "environment variable NUCLEATE_API_KEYS (default: no authentication).",
    )
    access.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="File with accepted API keys, one per line (default: none)."
    )
    access.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="Allowed CORS origin; * is any; can be repeated (default: none).",
    )
    access.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="HOST",
        help="Allowed name in the Host header, besides localhost; * is any; can be repeated (default: any if there are "
        "API keys or --host is not localhost, else none).",
    )
    log = parser.add_argument_group("logging (to stderr)")
    formats, levels = ("json", "text"), ("debug", "info", "warning", "error")
    log.add_argument(
        "--log-format",
        metavar="FORMAT",
        choices=formats,
        help="Log format: json or text (default: text in a terminal, else json).",
    )
    log.add_argument(
        "--log-level",
        metavar="LEVEL",
        default="info",
        choices=levels,
        help="Minimum log level: debug, info, warning or error (default: info).",
    )
    log.add_argument("--log-prompts", action="store_true", help="Log the first 2,000 characters of each prompt.")
    flags.add_model(parser)
    flags.add_engine(parser)
    flags.add_speculation(parser)
    add_watermark(parser)
    group = parser.add_argument_group("limits")
    for parameter in ServerLimits.PARAMETERS.values():
        flags.add_parameter(group, parameter)
    flags.add_sampling(parser)


def missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [name for name in REQUIRED if importlib.util.find_spec(name) is None]


def run(arguments: argparse.Namespace) -> int:
    if names := missing_packages():
        raise UsageError(f"the server needs {', '.join(names)}: pip install 'nucleate[server]'")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nucleate.jit.warmup import warm
    from nucleate.llm import LLM
    from nucleate.server.app import application
    from nucleate.server.auth import VARIABLE, APIKeys, read_keys
    from nucleate.server.host_check import ANY, check_origins, is_loopback
    from nucleate.server.request_log import LogFormat, RequestLog, configure
    from nucleate.server.run import bind, default_sigint_handler, serve
    from nucleate.server.service import REGEX_SECONDS, Service

    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"--port must be an integer >= 0 and < 65536, got {arguments.port}")
    limits = ServerLimits(**flags.read_values(arguments, ServerLimits.PARAMETERS))
    values = flags.read_values(arguments)
    check_origins(arguments.allow_origin)

    def keys_now() -> frozenset[str]:
        return read_keys(arguments.api_key, arguments.api_key_file, os.environ.get(VARIABLE))

    keys = APIKeys(keys_now())
    log_format: LogFormat = arguments.log_format or ("text" if sys.stderr.isatty() else "json")
    with (
        default_sigint_handler(),
        bind(arguments.host, arguments.port) as bound,  # before the model is loaded, which may take long
        configure(sys.stderr, log_format=log_format, level=arguments.log_level),
    ):
        log = RequestLog(prompts=arguments.log_prompts)
        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(**flags.engine_options(arguments), regex_seconds=REGEX_SECONDS)
        defaults = llm.default_params.override(**values)
        log.event("warming up", model=flags.model_name(arguments), runtime=llm.model.runtime)
        warm(background=True, also=lambda: _warm_model(engine.runner, log))  # requests work without compiled kernels
        service = Service(llm, engine, flags.model_name(arguments), defaults, limits)
        if not keys and not is_loopback(arguments.host):
            log.event("no API key is set: anyone who can reach this address can use the server (see --api-key)", 30)
        hosts = arguments.allowed_host or ([] if not keys and is_loopback(arguments.host) else [ANY])
        app = application(service, log, keys=keys, origins=arguments.allow_origin, hosts=hosts)
        return serve(app, service, log, bound, lambda: _reload(keys, keys_now, log))


def _warm_model(runner: Runner, log: RequestLog) -> None:
    runner.warm()
    log.event("kernels ready")


def _reload(keys: APIKeys, read: Callable[[], frozenset[str]], log: RequestLog) -> None:
    """Read the API keys again. A server that started without keys stays open; one with keys keeps at least one."""
    try:
        found = read() if keys else frozenset[str]()
    except ParameterError as error:
        log.event("API keys not reloaded", logging.ERROR, error_message=str(error))
        return
    if found:
        keys.replace(found)
    log.event("API keys reloaded", count=len(found))
