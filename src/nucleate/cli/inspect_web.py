"""``nucleate inspect --web``: a server for this machine only, and a browser with its inspector page."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import webbrowser
from base64 import urlsafe_b64encode
from typing import Any

from nucleate.cli import flags
from nucleate.cli.argument_parser import UsageError
from nucleate.cli.flag_values import read_values
from nucleate.cli.input_text import is_piped, read_prompt
from nucleate.cli.serve import missing_packages
from nucleate.parameters.converters import install_extra


def run_web(arguments: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, and open a browser."""
    if names := missing_packages():
        raise UsageError(f"--web needs {', '.join(names)}: {install_extra('server')}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from nucleate.jit.kernel_libraries import warm
    from nucleate.llm import LLM
    from nucleate.sampling_params import SamplingParams
    from nucleate.server.app import application
    from nucleate.server.limits import ServerLimits
    from nucleate.server.request_log import RequestLog, configure
    from nucleate.server.run import bind, default_sigint_handler, serve
    from nucleate.server.service import REGEX_SECONDS, Service

    given = arguments.prompt is not None or arguments.file is not None or is_piped()
    prompt = read_prompt(arguments) if given else None
    values = SamplingParams(**read_values(arguments)).to_dict()
    with (
        default_sigint_handler(),
        bind("127.0.0.1", arguments.port) as bound,
        configure(sys.stderr, log_format="text", level="warning"),
    ):
        llm = LLM(**flags.model_options(arguments))
        engine = llm.new_engine(regex_seconds=REGEX_SECONDS)
        warm(background=True)
        name = flags.model_name(arguments)
        service = Service(llm, engine, name, llm.default_params, ServerLimits())
        log = RequestLog()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/inspector{settings_hash(prompt, values)}"
        print(f"The inspector is at {url}\nPress Ctrl-C to stop.", flush=True)
        if not arguments.no_browser:
            threading.Thread(target=_open, args=(url, bound.getsockname()), daemon=True).start()
        return serve(application(service, log, hosts=()), service, log, bound)


def settings_hash(prompt: str | None, params: dict[str, Any]) -> str:
    """The hash of a link to the page with these settings; empty for its example."""
    if prompt is None and not params:
        return ""
    text = json.dumps({"prompt": prompt or "Once upon a time", "params": params})
    return f"#s={urlsafe_b64encode(text.encode()).decode().rstrip('=')}"


def _open(url: str, address: tuple[str, int]) -> None:
    """Open a browser as soon as the server accepts connections."""
    for _ in range(600):
        try:
            socket.create_connection(address[:2], timeout=1.0).close()
        except OSError:
            threading.Event().wait(0.1)
        else:
            webbrowser.open(url)
            return
