"""Check whether an OpenAI-compatible server, or a sampler, samples what it says.

Sends small requests to the server: which fields have an effect, identities that need no reference, draws of one token
compared with its logprobs, the order of the stages, penalties, stop strings, counts and invalid values. Each difference
is shown beside the documented meaning. MODULE:FUNCTION is a sampler: see docs/conformance.md. The API key is that of
--api-key, or of the environment variable OPENAI_API_KEY. Exit status: 0 without a difference, 3 with one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from nucleate.cli.argument_parser import Flag, UsageError, add_flags

USAGE = "[OPTIONS] URL"
DIFFERENT = 3
FLAGS = (
    Flag("--model NAME", "Model name in requests (default: the first that the server lists)."),
    Flag("--api-key KEY", "API key; other users of this machine can see it."),
    Flag("--draws N", "Draws per exact test, at least 100", 1280),
    Flag("--max-requests N", "Budget of requests; later checks are not made", 100_000),
    Flag("--concurrency N", "Requests at once, for servers without n", 8),
    Flag("--timeout SECONDS", "Time limit of a request in seconds", 120.0),
    Flag("--html FILE", "Write the report as one HTML page."),
    Flag("--json", "Print the report as JSON instead of text."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="URL of the server, or MODULE:FUNCTION.")
    add_flags(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    for name, least in (("draws", 100), ("max_requests", 1), ("concurrency", 1), ("timeout", 0.001)):
        if not getattr(arguments, name) >= least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(arguments, name)}")
    from nucleate.comparison.sampler_checks import check_sampler, load_sampler
    from nucleate.comparison.service_checks import Client, check_service

    if arguments.url.startswith(("http://", "https://")):
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
        client = Client(arguments.url, key, arguments.timeout, arguments.max_requests)
        options = {"model": arguments.model, "concurrency": arguments.concurrency}
        report = check_service(client, draws=arguments.draws, progress=show_progress, **options)
    else:
        sampler = load_sampler(arguments.url)
        report = check_sampler(sampler, arguments.url, draws=arguments.draws, progress=show_progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1, ensure_ascii=False) if arguments.json else report)
    if arguments.html is not None:
        arguments.html.write_text(report.to_html(), "utf-8")
    return DIFFERENT if report.differences else 0


def show_progress(name: str) -> None:
    """Show the check that runs, in a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name} ...", end="", file=sys.stderr, flush=True)
