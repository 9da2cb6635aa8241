"""Check whether an OpenAI-compatible server, or a sampler, samples what it says.

Every difference is shown beside the documented meaning. Exit status: 0 without a difference, 3 with one.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.cli.argument_parser import Flag, UsageError, add_flags
from nucleate.comparison.exact_tests import Finding, Findings, NotTested
from nucleate.comparison.sampler_checks import check_sampler, load_sampler
from nucleate.comparison.service_checks import check_service
from nucleate.comparison.service_client import Client, Service, ServiceError

USAGE = "[OPTIONS] URL"
DIFFERENT = 3
FLAGS = (
    Flag("--model NAME", "Model name in requests (default: the first listed)."),
    Flag("--api-key KEY", "API key (default: OPENAI_API_KEY of the environment)."),
    Flag("--draws N", "Draws per exact test, at least 100", 1280),
    Flag("--max-requests N", "Maximum number of requests", 100_000),
    Flag("--concurrency N", "Requests at once, for servers without n", 8),
    Flag("--timeout SECONDS", "Time limit of a request", 120.0),
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
    if arguments.url.startswith(("http://", "https://")):
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
        client = Client(arguments.url, key, arguments.timeout, arguments.max_requests)
        try:
            service = Service(client, arguments.model, arguments.concurrency)
        except (ServiceError, NotTested) as error:
            print(f"nucleate: {error}", file=sys.stderr)
            return 1
        found = check_service(service, arguments.draws, show_progress)
    else:
        found = check_sampler(load_sampler(arguments.url), arguments.url, arguments.draws, progress=show_progress)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(json.dumps(to_dict(found), indent=1, ensure_ascii=False) if arguments.json else to_text(found))
    if arguments.html is not None:
        arguments.html.write_text(to_html(found), "utf-8")
    return DIFFERENT if any(one.outcome == "differs" for one in found.findings) else 0


def show_progress(name: str) -> None:
    """Show the check that runs, in a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{name} ...", end="", file=sys.stderr, flush=True)


GROUPS: Mapping[str, str] = {
    "fields": "Which fields change anything",
    "identities": "Identities that need no reference",
    "distribution": "Draws compared with the logprobs",
    "order": "The order of the stages",
    "penalties": "Penalties",
    "stop": "Stop strings",
    "counts": "Usage and number of logprobs",
    "errors": "Values out of range and unknown fields",
}
"""The groups of checks, in the order of the report."""
OUTCOMES: Mapping[str, str] = {"same": "as documented", "differs": "differs", "not tested": "not tested"}
DOCS = "https://github.com/nucleate/nucleate/blob/main/docs/"


class Meaning(NamedTuple):
    """What is documented. link: where, below ``docs/``. setting: what to set at a server that differs, if anything."""

    text: str
    link: str
    setting: str


def read_meanings(table: str) -> dict[str, Meaning]:
    """Read entries of two or three parts: name and link, the meaning, and what to set."""
    found = {}
    for entry in table.strip().split("\n\n"):
        head, _, rest = entry.partition("\n")
        name, _, link = head.partition(" | ")
        text, _, setting = " ".join(rest.split()).partition(" set: ")
        found[name] = Meaning(text, link, setting)
    return found


MEANINGS = read_meanings("""
fields | server.md#request-fields
A field changes the output as documented, or is refused: nothing is silently dropped.

seed | semantics.md#noise-and-draw
The same seed gives the same text, another seed another one.

n | server.md#request-fields
n choices in one response.
set: send n requests with different seeds

stop | semantics.md#stopping
The text ends before the stop string.
set: cut the text in the client

logprobs | semantics.md#logprobs
A position has the requested number of logprobs.

repetition_penalty | semantics.md#canonical-order-and-stages
The scores of seen tokens are divided by it, or multiplied if negative.
set: try the field repeat_penalty, the name of llama.cpp

identities | semantics.md#guarantees
Top-k 1, top-p near 0 and min-p 1 select the most likely token, as temperature 0.

temperature 0 repeats | semantics.md#guarantees
Temperature 0 selects the first token in rank order.

no default penalties | semantics.md#default-values
Without penalties in the request or the model's generation_config.json there are none.
set: send repetition_penalty (or repeat_penalty) 1, presence_penalty 0 and frequency_penalty 0

seeds differ | semantics.md#noise-and-draw
Another seed gives another text.
set: send no seed

no seed | semantics.md#noise-and-draw
Without a seed, a fresh one is generated.
set: send a different seed with every request

seed among others | how-to/reproducible_output.md
A row depends on its own logits and seed only, never on other requests.
set: send one request at a time; for nucleate: --batch-invariant

choices differ | semantics.md#noise-and-draw
Choice i of n has the seed + i.
set: send n requests with different seeds

distribution | semantics.md#canonical-order-and-stages
The draw follows the distribution that the stages leave.

raw logprobs | semantics.md#logprobs
logprobs are those of the model, before the first stage.
set: for nucleate, logprobs_mode "processed" gives those after all stages

sampled token | semantics.md#logprobs
logprobs are those of the sampled token.

top_k keeps | semantics.md#canonical-order-and-stages
Exactly the first k tokens are kept.

top_p keeps | semantics.md#canonical-order-and-stages
The smallest set with at least this mass is kept: also the token that reaches it.

min_p keeps | semantics.md#canonical-order-and-stages
Tokens with at least this share of the highest probability are kept.

order | semantics.md#orders-of-other-engines
Temperature, then top_k, min_p and top_p, each of the tokens that the stages before it left.
set: set the order of the service's samplers, if it has one; for nucleate, order=llama.cpp has temperature last

penalties | semantics.md#canonical-order-and-stages
x -= frequency_penalty * count, and presence_penalty once, of the output.

the prompt | semantics.md#canonical-order-and-stages
Presence and frequency penalties count the output only.
set: a shorter window of penalties, if the service has one; for nucleate, penalty_last_n counts the prompt too

repetition | semantics.md#canonical-order-and-stages
The repetition penalty counts prompt and output.

stop in a stream | semantics.md#stopping
A stream ends before the stop string too.
set: cut the text in the client

several stop strings | semantics.md#stopping
The text is cut before the match that starts earliest.
set: cut the text in the client

counts | server.md#response-fields
usage counts the tokens of all choices.

stream | server.md#request-fields
A stream has the same text.

number of logprobs | semantics.md#logprobs
One position per token, with the requested number of logprobs.

errors | server.md#errors
Values out of range and unknown fields are a 400 that names the field.
set: check the values in the client

equal tokens | semantics.md#guarantees
Equal scores are ordered by token id: one total order.

constant | semantics.md#guarantees
Adding a constant to all logits changes nothing.

tokens at -inf | semantics.md#guarantees
A token at -inf is masked: it is never selected.

amount of logit_bias | semantics.md#canonical-order-and-stages
x += b for the listed tokens.

NaN | semantics.md#guarantees
A row that contains a NaN is an error.

no finite score | semantics.md#guarantees
A row without a finite score is an error.
""")
"""By the name of a check, or else its group."""


def meaning(finding: Finding) -> Meaning:
    """Return the documented meaning of what a check is about."""
    return MEANINGS.get(finding.name) or MEANINGS[finding.group]


def summary(found: Findings) -> str:
    """Return the number of checks by outcome."""
    counts = {key: sum(one.outcome == key for one in found.findings) for key in OUTCOMES}
    return (
        f"{len(found.findings)} checks: {counts['same']} as documented, {counts['differs']} differ, "
        f"{counts['not tested']} not tested"
    )


def to_dict(found: Findings) -> dict[str, Any]:
    """Return a report as values of JSON."""
    rows = [{**one._asdict(), "documented": meaning(one)._asdict()} for one in found.findings]
    return {"subject": found.subject, "about": dict(found.about), "findings": rows}


def to_text(found: Findings) -> str:
    """Return a report as text of up to 100 columns."""
    about = [f"{name}: {value}" for name, value in found.about.items()]
    lines = [found.subject, *(part for line in about for part in paragraph("", line)), summary(found)]
    for group, title in GROUPS.items():
        own = [one for one in found.findings if one.group == group]
        lines += ["", title] if own else []
        shown = None
        for one in own:
            lines += paragraph(f"{OUTCOMES[one.outcome]:14}", f"{one.name}: {one.found}")
            if one.outcome == "differs" and (usual := meaning(one)) != shown:
                shown = usual
                lines += paragraph(" " * 14, f"documented: {usual.text} ({usual.link})")
                lines += paragraph(" " * 14, f"to get it: {usual.setting}") if usual.setting else []
    return "\n".join(lines)


def paragraph(head: str, text: str) -> list[str]:
    """Return the lines of a text, after a head and below it."""
    indent = " " * (len(head) or 2)
    return textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def to_html(found: Findings) -> str:
    """Return a report as one HTML page without scripts, which loads nothing."""
    different = [one for one in found.findings if one.outcome == "differs"]
    sections = [section("Differences", "differences", different)]
    for group, title in GROUPS.items():
        own = [one for one in found.findings if one.group == group and one.outcome != "differs"]
        sections.append(section(title, group, own))
    return PAGE.format(
        title=escape(f"Conformance of {found.subject}"),
        style=STYLE,
        subject=escape(found.subject),
        summary=escape(summary(found)),
        about="".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in found.about.items()),
        body="".join(sections),
    )


def section(title: str, name: str, findings: Sequence[Finding]) -> str:
    """Return a table with its heading; nothing without findings."""
    if not findings:
        return ""
    head = "".join(f'<th scope="col">{each}</th>' for each in ("Check", "Found", "Documented"))
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(map(row, findings))}</tbody></table></section>"
    )


def row(finding: Finding) -> str:
    """Return the row of a finding."""
    usual, outcome = meaning(finding), finding.outcome
    documented = f'{escape(usual.text)} <a href="{DOCS}{escape(usual.link)}">{escape(usual.link)}</a>'
    if usual.setting and outcome == "differs":
        documented += f"<br><strong>To get it:</strong> {escape(usual.setting)}"
    mark = f'<span class="{outcome.replace(" ", "-")}">{OUTCOMES[outcome]}</span>'
    return (
        f'<tr><th scope="row">{escape(finding.name)}</th><td>{mark}: {escape(finding.found)}</td>'
        f"<td>{documented}</td></tr>"
    )


def escape(value: Any) -> str:
    """Return a text or number as HTML."""
    return html.escape(str(value))


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>Conformance of <code>{subject}</code></h1>
<p>{summary}</p>
<dl>{about}</dl>
{body}
</main>
</body>
</html>
"""
STYLE = """
:root { color-scheme: light dark; --paper: light-dark(#ffffff, #14181d); --ink: light-dark(#1a202b, #e7ebf1);
  --soft: light-dark(#586174, #a0a9b8); --line: light-dark(#d7dce4, #2f3742); --link: light-dark(#1f5fbf, #82b1ff);
  --bad: light-dark(#b3261e, #ff9d94); --good: light-dark(#1d6b3c, #7fd6a1); }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1rem clamp(0.8rem, 3vw, 2rem) 3rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
code, th[scope="row"] { overflow-wrap: anywhere; } a { color: var(--link); overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 0.1rem 1rem; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; }
th, td { text-align: start; vertical-align: top; padding: 0.4rem 0.6rem; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
thead th { color: var(--soft); font-weight: 600; } thead th:first-child { width: 22%; }
th[scope="row"] { font-weight: 600; }
.differs { color: var(--bad); font-weight: 600; } .same { color: var(--good); font-weight: 600; }
.not-tested { color: var(--soft); font-weight: 600; }
@media (max-width: 40rem) {
  thead { display: none; } table, tbody, tr, td, th[scope="row"] { display: block; }
  tr { border-bottom: 1px solid var(--line); padding: 0.4rem 0; } th, td { border: 0; padding: 0.15rem 0; }
  td:last-child::before { content: "Documented: "; color: var(--soft); }
  dl { display: block; } dd { margin: 0 0 0.3rem; }
}
"""
