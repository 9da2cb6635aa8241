"""The flags of ``nucleate serve`` about its address, access and log."""

from __future__ import annotations

import argparse
from pathlib import Path

from nucleate.cli import flags


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with values of flags, such as 'max-num-seqs: 64'. Flags and environment variables named after "
        "them (NUCLEATE_MAX_NUM_SEQS) have precedence (default: none).",
    )
    parser.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="Address to bind (default: 127.0.0.1, this machine only)."
    )
    parser.add_argument(
        "--port", metavar="PORT", type=int, default=8000, help="Port to bind; 0 is any free port (default: 8000)."
    )
    parser.add_argument(
        "--uds", type=Path, metavar="PATH", help="Unix domain socket to bind instead of --host and --port."
    )
    parser.add_argument(
        "--root-path",
        metavar="PATH",
        default="",
        help="Path prefix of a proxy in front, such as /llm; requests with and without it are served (default: none).",
    )
    flags.add_name(parser, several=True)
    _add_requests(parser)
    _add_access(parser)
    _add_log(parser)


def _add_access(parser: argparse.ArgumentParser) -> None:
    access = parser.add_argument_group("TLS, authentication and CORS")
    access.add_argument(
        "--ssl-certfile",
        type=Path,
        metavar="FILE",
        help="TLS certificate, followed by its chain, as PEM: serve HTTPS (default: HTTP).",
    )
    access.add_argument(
        "--ssl-keyfile",
        type=Path,
        metavar="FILE",
        help="Private key of the TLS certificate, without a passphrase (default: in --ssl-certfile).",
    )
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


def _add_requests(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--unknown-fields",
        metavar="ACTION",
        choices=("reject", "ignore"),
        default="reject",
        help="What to do with unknown fields of a request body: reject it, or ignore them and list their names in the "
        "log and in the header x-nucleate-ignored-fields (default: reject).",
    )
    requests.add_argument(
        "--scheduling-policy",
        metavar="POLICY",
        choices=("fcfs", "priority"),
        default="fcfs",
        help="Scheduling policy: fcfs (first come, first served) or priority: requests may set priority, and lower "
        "runs first (default: fcfs).",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    log = parser.add_argument_group("logging (to stderr)")
    log.add_argument(
        "--log-format",
        metavar="FORMAT",
        choices=("json", "text"),
        help="Log format: json or text (default: text in a terminal, else json).",
    )
    log.add_argument(
        "--log-level",
        metavar="LEVEL",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="Minimum log level: debug, info, warning or error (default: info).",
    )
    log.add_argument("--log-prompts", action="store_true", help="Log the first 2,000 characters of each prompt.")
