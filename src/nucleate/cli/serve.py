"""Answer OpenAI's clients over HTTP: /v1/completions, /v1/chat/completions, and what goes with them.

Requests may say any sampling parameter; the flags below are for those that a request does not say. SIGTERM (or Ctrl-C)
takes no more requests and lets those at work end. Needs the extra: pip install 'nucleate[server]'.
"""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nucleate.cli import flags
from nucleate.cli.main import UsageError
from nucleate.server.limits import ServerLimits

if TYPE_CHECKING:
    from nucleate.models.runner import Runner
    from nucleate.server.request_log import RequestLog

USAGE = "[OPTIONS]"
LIMITS = {
    name: replace(parameter, name=f"limit_{name.removeprefix('max_')}")
    for name, parameter in ServerLimits.PARAMETERS.items()
}
"""By field of ``ServerLimits``: under the names of their flags, as some are called like parameters of sampling."""
NEEDED = ("starlette", "uvicorn", "httptools", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at [default 127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, help="the port; 0 for any that is free [default 8000]")
    flags.add_name(parser)
    access = parser.add_argument_group("who may ask")
    access.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that requests must carry; may be given several times (others on this machine can read it: see "
        "also --api-key-file, and the variable NUCLEATE_API_KEYS) [default: nobody needs a key]",
    )
    access.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file of keys, one per line")
    access.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="pages of this origin may ask from a browser; * for any; may be given several times [default: none]",
    )
    log = parser.add_argument_group("log (on stderr)")
    forms = ("json", "text")
    log.add_argument("--log-format", choices=forms, help="[default: text on a terminal, else json]")
    log.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    log.add_argument("--log-prompts", action="store_true", help="log the beginning of each prompt, too")
    flags.add_model(parser)
    flags.add_engine(parser)
    flags.add_speculation(parser)
    group = parser.add_argument_group("limits")
    for parameter in LIMITS.values():
        flags.add_parameter(group, parameter)
    flags.add_sampling(parser)


def missing() -> list[str]:
    """The packages of the extra that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def run(arguments: argparse.Namespace) -> int:
    if names := missing():
        raise UsageError(f"the server needs {', '.join(names)}: pip install 'nucleate[server]'")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nucleate.jit.warmup import warm
    from nucleate.llm import LLM
    from nucleate.server.app import application
    from nucleate.server.auth import VARIABLE, read_keys
    from nucleate.server.request_log import Form, RequestLog, configure
    from nucleate.server.run import bind, interrupted_at_once, serve
    from nucleate.server.service import REGEX_SECONDS, Service

    if not 0 <= arguments.port < 2**16:
        raise UsageError(f"the port must be an integer >= 0 and < 65536, got {arguments.port}")
    limits = ServerLimits(**flags.given(arguments, LIMITS))
    values = flags.given(arguments)
    keys = read_keys(arguments.api_key, arguments.api_key_file, os.environ.get(VARIABLE))
    form: Form = arguments.log_format or ("text" if sys.stderr.isatty() else "json")
    with (
        interrupted_at_once(),
        bind(arguments.host, arguments.port) as bound,  # first: a model takes long to load
        configure(sys.stderr, form=form, level=arguments.log_level),
    ):
        log = RequestLog(prompts=arguments.log_prompts)
        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(**flags.engine_options(arguments), regex_seconds=REGEX_SECONDS)
        defaults = llm.default_params.override(**values)
        log.event("warming up", model=flags.model_name(arguments), runtime=llm.model.runtime)
        warm(background=True, also=lambda: _warm_model(engine.runner, log))  # all works without kernels
        service = Service(llm, engine, flags.model_name(arguments), defaults, limits)
        if not keys and not is_loopback(arguments.host):
            log.event("anybody who can reach this address may use the server: see --api-key", 30)
        app = application(service, log, keys=keys, origins=arguments.allow_origin)
        return serve(app, service, log, bound)


def _warm_model(runner: Runner, log: RequestLog) -> None:
    runner.warm()
    log.event("kernels ready")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
