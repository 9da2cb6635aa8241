"""Checks the HTML of the built site: what it loads, where its links lead, and its headings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

LOADED = re.compile(r'<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)="(https?:)?//[^"]*"')
LINK = re.compile(r'<a\b[^>]*?\bhref="([^"#:]+)(?:#[^"]*)?"')
HEADING = re.compile(r"<h([1-6])\b")
STYLE = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


def site_problems(site: Path) -> list[str]:
    """Return what is wrong: resources of other hosts, links to nothing, skipped levels of headings."""
    found = [f"{path.relative_to(site)} loads from another host" for path in site.rglob("*.css") if _is_remote(path)]
    for path in sorted(site.rglob("*.html")):
        found += [f"{path.relative_to(site)}: {problem}" for problem in _page_problems(path)]
    return found


def _is_remote(style: Path) -> bool:
    return STYLE.search(style.read_text("utf-8")) is not None


def _page_problems(path: Path) -> Iterator[str]:
    text = path.read_text("utf-8")
    yield from (f"loads {found[0]}" for found in LOADED.finditer(text))
    for link in {unquote(found[1]) for found in LINK.finditer(text)}:
        if not Path(os.path.normpath(path.parent / link)).exists():
            yield f"links to {link}, which does not exist"
    article = text.partition("<article")[2].partition("</article>")[0]
    levels = [int(level) for level in HEADING.findall(article)]
    if article and levels.count(1) != 1 and path.name not in ("search.html", "genindex.html", "py-modindex.html"):
        yield f"has {levels.count(1)} main headings"
    if any(deeper > level + 1 for level, deeper in pairwise(levels)):
        yield "skips a level of headings"
