"""Reads what the hand-written pages say about a stage: its definition, and its differences to other projects."""

from __future__ import annotations

import re
from collections.abc import Iterator

from generate import DOCS
from generate.stage_facts import Facts
from nucleate.sampling.stage import Stage

ROW = re.compile(r"^\|(?P<cells>.+)\|$", re.MULTILINE)
TO_DOCS = "../../"
"""From the page of a stage to the hand-written pages."""


def semantics(name: str) -> Iterator[str]:
    """Yield what docs/semantics.md says about a stage: the row of a table, or an item of a list."""
    text = (DOCS / "semantics.md").read_text("utf-8")
    found = [row for row in tables(text) if f"`{name}`" in row[:2]]
    items = re.findall(rf"^- The `{name}` draw .+?(?=^- |^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    said = [row[-1] for row in found] + [re.sub(r"^- ", "", item).rstrip() for item in items]
    if not said:
        raise ValueError(f"docs/semantics.md does not define {name}")
    for each in said:
        sentence = f"{each[0].upper()}{each[1:]}" if each[:2].isalpha() else each
        sentence += "" if sentence.endswith(".") else "."
        yield from_docs(sentence.replace("](#", "](semantics.md#"))


def tables(text: str) -> Iterator[list[str]]:
    """Yield the rows of all tables of a page as lists of cells."""
    for found in ROW.finditer(text):
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", found["cells"])]


def differences(kind: type[Stage], facts: Facts) -> Iterator[str]:
    """Yield the rows of docs/differences.md that name the stage, its parameters or its names elsewhere."""
    names = {kind.name, *(p.name for p in kind.parameters.values() if p.public and p.name not in ("seed", "min_keep"))}
    names |= {name for other in facts.others.values() for name in re.findall(r"`(\w+)`", other)}
    sections = re.split(r"^## (.+)$", (DOCS / "differences.md").read_text("utf-8"), flags=re.MULTILINE)
    for heading, body in zip(sections[1::2], sections[2::2], strict=True):
        if heading == "In general" or "structured output" in heading:
            continue
        for what, theirs, ours, *reason in tables(body):
            if names & set(re.findall(r"`(\w+)(?:=[^`]*)?`", what)) and theirs:
                why = f" Reason: {reason[0]}." if reason and reason[0] else ""
                yield from_docs(f"- {what} in {heading.split(',')[0]}: {theirs}. In nucleate: {ours}.{why}")


def from_docs(text: str) -> str:
    """Return text of a page in docs/ with its links."""
    return re.sub(r"\]\((?!http)", f"]({TO_DOCS}", text)
