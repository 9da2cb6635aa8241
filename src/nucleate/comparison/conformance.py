"""The results of a conformance run: what was found beside what is documented, as text, JSON and one HTML page."""

from __future__ import annotations

import html
import json
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nucleate.comparison.exact_tests import Difference, NotTested

DOCS = "https://github.com/nucleate/nucleate/blob/main/docs/"
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
OUTCOMES: Mapping[str, str] = {"differs": "differs", "not tested": "not tested", "same": "as documented"}
"""The outcomes of a check, with their names in a report."""


class Check(NamedTuple):
    """A check. group: a key of ``GROUPS``. meaning: what is documented. link: its place, below ``docs/``.

    setting: what to set at a service that differs to get the usual meaning; "" if nothing can be set. run: returns what
    was found; raises Difference or NotTested.
    """

    group: str
    name: str
    meaning: str
    link: str
    setting: str
    run: Callable[[], str]


class Finding(NamedTuple):
    """The result of a check. outcome: "same", "differs" or "not tested". found: what the subject did."""

    group: str
    name: str
    outcome: str
    found: str
    meaning: str
    link: str
    setting: str


def run_checks(checks: Iterable[Check], progress: Callable[[str], None] = lambda name: None) -> Iterator[Finding]:
    """Run checks in their order, and yield what they find. progress: called with the name of each, before it runs."""
    for check in checks:
        progress(check.name)
        try:
            outcome, found = "same", check.run()
        except Difference as difference:
            outcome, found = "differs", str(difference)
        except NotTested as reason:
            outcome, found = "not tested", str(reason)
        yield Finding(check.group, check.name, outcome, found, check.meaning, check.link, check.setting)


class ConformanceReport:
    """What a run found. ``differences`` has the findings that differ.

    subject: the URL of the service, or the name of the sampler. about: facts of the run by name, such as the number of
    requests and the power of the tests. findings: in the order in which they were found.
    """

    def __init__(self, subject: str, about: Mapping[str, Any], findings: Sequence[Finding]) -> None:
        self.subject, self.about, self.findings = subject, dict(about), tuple(findings)

    @property
    def differences(self) -> list[Finding]:
        """The findings that differ from what is documented."""
        return [one for one in self.findings if one.outcome == "differs"]

    def summary(self) -> str:
        """Return the number of checks by outcome."""
        counts = {key: sum(one.outcome == key for one in self.findings) for key in OUTCOMES}
        return (
            f"{len(self.findings)} checks: {counts['same']} as documented, {counts['differs']} differ, "
            f"{counts['not tested']} not tested"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values of JSON."""
        return {"subject": self.subject, "about": self.about, "findings": [one._asdict() for one in self.findings]}

    @staticmethod
    def from_dict(value: Mapping[str, Any]) -> ConformanceReport:
        """Return the report that ``to_dict`` wrote."""
        return ConformanceReport(value["subject"], value["about"], [Finding(**one) for one in value["findings"]])

    def __str__(self) -> str:
        lines = [self.subject, *_wrapped(f"{name}: {value}" for name, value in self.about.items()), self.summary()]
        for group, title in GROUPS.items():
            own = [one for one in self.findings if one.group == group]
            lines += ["", title] if own else []
            for one in own:
                lines += _paragraph(f"{OUTCOMES[one.outcome]:14}", f"{one.name}: {one.found}")
                if one.outcome == "differs":
                    lines += _paragraph(" " * 14, f"usual: {one.meaning} ({one.link})")
                    lines += _paragraph(" " * 14, f"set: {one.setting}") if one.setting else []
        return "\n".join(lines)

    def to_html(self) -> str:
        """Return the report as one HTML page without scripts, which loads nothing."""
        about = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in self.about.items())
        parts = [self._section(group, title) for group, title in GROUPS.items()]
        different = self._table("Differences", "differences", self.differences) if self.differences else ""
        return PAGE.format(
            title=_text(f"Conformance of {self.subject}"),
            style=STYLE,
            subject=_text(self.subject),
            summary=_text(self.summary()),
            about=about,
            body=different + "".join(parts),
        )

    def _section(self, group: str, title: str) -> str:
        own = [one for one in self.findings if one.group == group and one.outcome != "differs"]
        return self._table(title, group, own) if own else ""

    @staticmethod
    def _table(title: str, name: str, findings: Sequence[Finding]) -> str:
        rows = []
        for one in findings:
            usual = f'{_text(one.meaning)} <a href="{DOCS}{_text(one.link)}">{_text(one.link)}</a>'
            if one.setting and one.outcome == "differs":
                usual += f"<br><strong>Set:</strong> {_text(one.setting)}"
            mark = f'<span class="{one.outcome.replace(" ", "-")}">{OUTCOMES[one.outcome]}</span>'
            cells = (("found", f"{mark} {_text(one.found)}"), ("documented", usual))
            body = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in cells)
            rows.append(f'<tr><th scope="row">{_text(one.name)}</th>{body}</tr>')
        head = "".join(f'<th scope="col">{each}</th>' for each in ("check", "found", "documented"))
        return (
            f'<section aria-labelledby="{name}"><h2 id="{name}">{_text(title)}</h2>'
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></section>"
        )


def _text(value: Any) -> str:
    return html.escape(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _paragraph(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _wrapped(lines: Iterable[str]) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, 100, subsequent_indent="  ")]


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
  td::before { content: attr(data-head) ": "; color: var(--soft); }
  dl { display: block; } dd { margin: 0 0 0.3rem; }
}
"""
