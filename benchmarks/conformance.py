"""`nucleate conform` over this server and others, and the tables of docs/conformance.md.

    python benchmarks/conformance.py [--gguf FILE] [--folder FOLDER] [--python PYTHON] [--only NAME ...] [--draws N]
    python benchmarks/conformance.py --page

The servers are those of benchmarks/peers.py, one at a time. Without --gguf and --folder, they serve the embedded model,
which --gguf FILE also names if it does not exist. A report is a JSON file in benchmarks/results/conformance. --page:
only write the tables from the reports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers import add_servers, servers, started, versions

from nucleate.cli.conform import GROUPS, to_dict
from nucleate.comparison.service_checks import check_service
from nucleate.comparison.service_client import Client, Service, ServiceError
from nucleate.models.loader import EMBEDDED

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "conformance", ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- begin: benchmarks/conformance.py -->\n", "<!-- end -->\n"
MARKS = {"same": "yes", "differs": "**no**", "not tested": "-"}
ACCEPTED = " is accepted"
LONGEST = 180
"""Characters of a finding on the page."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_servers(parser, logprobs=True)
    parser.add_argument("--draws", type=int, default=1280)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    options.folder = options.folder or EMBEDDED
    options.gguf = options.gguf or Path(tempfile.gettempdir()) / "nucleate-tiny.gguf"
    if not options.page:
        if not options.gguf.exists():
            sys.path.insert(0, str(ROOT / "training"))
            from write_gguf import write

            write(EMBEDDED, options.gguf)
        known = versions(options.python)
        for port, (name, server) in enumerate(servers(options).items(), 8580 + os.getpid() % 400):
            try:
                with started(name, server, port) as (url, started_server, _):
                    client = Client(url, timeout=60)
                    service = Service(client, started_server.model or None)
                    report = to_dict(check_service(service, options.draws, lambda check: print(check, flush=True)))
            except (OSError, RuntimeError, ServiceError) as error:
                print(f"left out: {name}: {error}", flush=True)
                continue
            hidden = [f"{path.parent}/" for path in (options.gguf, options.folder, Path(sys.executable).parent)]
            hidden += [f"{Path(options.python).parents[1]}/", f"{sys.prefix}/"]
            command = shlex.join(
                ["python" if part in (sys.executable, options.python) else part for part in server.command]
            )
            text = json.dumps(
                {"name": name, "command": command, "versions": known, **report}, indent=1, ensure_ascii=False
            )
            for folder in hidden:
                text = text.replace(folder, "")
            RESULTS.mkdir(parents=True, exist_ok=True)
            (RESULTS / f"{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json").write_text(text + "\n", "utf-8")
    write_page()


def read_reports() -> list[dict[str, Any]]:
    """Return all reports, those of nucleate first."""
    reports = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(reports, key=lambda report: (not report["name"].startswith("nucleate"), report["name"]))


def write_page() -> None:
    """Write the tables from all reports."""
    reports = read_reports()
    text = PAGE.read_text("utf-8")
    head, _, rest = text.partition(BEGIN)
    PAGE.write_text(head + BEGIN + "\n" + tables(reports) + END + rest.partition(END)[2], "utf-8")


def tables(reports: list[dict[str, Any]]) -> str:
    """Return the table of all checks, and a list of the differences of each service."""
    names = [report["name"] for report in reports]
    lines = [f"| check | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    found = {report["name"]: {(one["group"], one["name"]): one for one in report["findings"]} for report in reports}
    checks = dict.fromkeys((one["group"], one["name"]) for report in reports for one in report["findings"])
    for group, title in GROUPS.items():
        lines.append(f"| *{title}* |{' |' * len(names)}")
        for key in (each for each in checks if each[0] == group):
            marks = [
                MARKS[found[name][key]["outcome"]] if key in found[name] else MARKS["not tested"] for name in names
            ]
            lines.append(f"| {escaped(key[1])} | {' | '.join(marks)} |")
    newest: dict[str, str] = {}
    for report in reports:
        newest |= {name: number for name, number in report["versions"].items() if number != "not installed"}
    lines += ["", f"Versions: {', '.join(f'{name} {number}' for name, number in newest.items())}."]
    return "\n".join(lines) + "\n\n" + "".join(map(differences, reports))


def differences(report: dict[str, Any]) -> str:
    """Return the differences of a service as a list."""
    about, command = report["about"], re.sub(r"'\n.*?\n'", "SCRIPT", report["command"], flags=re.DOTALL)
    run = f"{about['requests']:,} requests in {about['seconds']:.0f} s, {about['draws per test']:,} draws per test"
    own = [one for one in report["findings"] if one["outcome"] == "differs"]
    accepted = [one["found"].removesuffix(ACCEPTED) for one in own if one["found"].endswith(ACCEPTED)]
    others = [one for one in own if not one["found"].endswith(ACCEPTED)]
    lines = [f"### {report['name']}", "", f"`{command}`: {run}.", ""]
    lines += [f"- *{escaped(one['name'])}*: {escaped(shortened(one['found']))}" for one in others]
    lines += [f"- Accepted: {escaped(', '.join(accepted))}"] if accepted else []
    return "\n".join(lines + ([] if own else ["No difference."])) + "\n\n"


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0] + " ..."


def escaped(text: str) -> str:
    """Return text without markup of Markdown."""
    return re.sub(r"([*_<>\[\]|`#{}\\])", r"\\\1", text)


if __name__ == "__main__":
    main()
