"""The sections of the site, and their pages: which page is where, and in which order.

A page in docs/tutorials/, docs/how-to/ or docs/explanation/ belongs to that section. The pages directly in docs/ are
listed here; others are how-to guides. Within a section, the pages of its folder come first, by path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from generate import DOCS, ROOT
from generate.links import links
from generate.pages import PROJECT, Pages, relative, summary, title

CAPTIONS = {
    "tutorials": ("Tutorials", "Lessons for a first contact, from an installed package to a result."),
    "how-to": ("How-to guides", "Steps to a goal, for readers who know what they want."),
    "reference": ("Reference", "What every name, parameter, flag, metric and error is and means."),
    "explanation": ("Explanation", "How nucleate works, and why it is built that way."),
    "project": ("Project", "Architecture, contributions and changes."),
}
"""Title and description of each section, by folder."""

LISTED = {
    "how-to": (
        *("server", "protocols", "tools", "structured", "batch", "beam", "guidance", "speculation", "watermarks"),
        *("chat_page", "compare", "conformance", "inspector", "custom_stages", "integrations", "other_engines"),
        *("gguf", "cuda"),
        *("scale", "scale_offline", "scale_online"),
    ),
    "reference": ("semantics", "differences", "stages", "cli", "architectures", "benchmarks"),
    "explanation": ("engine", "scale_analysis"),
}
"""The pages directly in docs/, by section."""


@dataclass
class Section:
    """A page that lists other pages. entries: paths in the sources without ``.md``."""

    folder: str
    heading: str
    about: str
    entries: list[str] = field(default_factory=list)

    def write(self, sources: Path) -> str:
        """Write the index of the section, and return its path without ``.md``."""
        name = f"{self.folder}/index"
        path = sources / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.read_text("utf-8") if path.exists() else f"# {self.heading}\n\n{self.about}\n"
        linked = {os.path.normpath(f"{self.folder}/{found[1]}") for found in links(own)}
        others = [entry for entry in self.entries if f"{entry}.md" not in linked]
        more = "\n## More pages\n" if linked and others else ""
        tree = toctree(relative(entry, name) for entry in self.entries)
        path.write_text(f"{own}{more}\n{self.listing(sources, others)}\n{tree}", "utf-8")
        return name

    def listing(self, sources: Path, entries: Iterable[str]) -> str:
        """Return pages with their first sentences."""
        lines = []
        for entry in entries:
            text = (sources / f"{entry}.md").read_text("utf-8")
            about = summary(text)
            link = f"[{title(text)}]({relative(f'{entry}.md', f'{self.folder}/index')})"
            lines.append(f"- **{link}**{': ' if about else ''}{about}\n")
        return "".join(lines)


def toctree(entries: Iterable[str]) -> str:
    """Return the directive that puts pages into the navigation."""
    return "\n".join(["```{toctree}", ":hidden:", "", *entries, "```", ""])


def hand_written(pages: Pages) -> dict[str, Section]:
    """Add all hand-written pages, and return the sections with them."""
    sections = {folder: Section(folder, *words) for folder, words in CAPTIONS.items()}
    listed = {name: folder for folder, names in LISTED.items() for name in names}
    others = sorted({path.stem for path in DOCS.glob("*.md")} - {"README", *listed})
    for folder in ("tutorials", "how-to", "reference", "explanation"):
        for path in sorted((DOCS / folder).rglob("*.md")):
            entry = pages.add(path).removesuffix(".md")
            if entry != f"{folder}/index":
                sections[folder].entries.append(entry)
    for name, folder in [*listed.items(), *((name, "how-to") for name in others)]:
        sections[folder].entries.append(pages.add(DOCS / f"{name}.md").removesuffix(".md"))
    sections["project"].entries += [pages.add(ROOT / name).removesuffix(".md") for name in PROJECT]
    return sections


def decisions(pages: Pages) -> Section:
    """Add the design decisions, and return their section."""
    section = Section("decisions", "Design decisions", "")
    for path in sorted((DOCS / "decisions").glob("*.md")):
        entry = pages.add(path).removesuffix(".md")
        if path.name != "README.md":
            section.entries.append(entry)
    return section
