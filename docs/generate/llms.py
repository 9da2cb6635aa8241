"""Writes the site for language models: every page as Markdown, ``llms.txt`` that lists them, and all in one file."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import nucleate as nc
from generate.pages import summary, title

_DIRECTIVE = re.compile(r"^```\{toctree\}.*?^```\n?", re.DOTALL | re.MULTILINE)
_PLOT = re.compile(r"^<svg .*?</svg>\n", re.DOTALL | re.MULTILINE)


def write_llms(pages: Sequence[str], sources: Path, texts: Path, out: Path) -> None:
    """Write the files. texts: the folder with the pages that Sphinx wrote as text, as they contain directives."""
    about = " ".join((nc.__doc__ or "").strip().splitlines()[0].split())
    listed, whole = ["# nucleate", "", f"> {about}", ""], list[str]()
    for name in pages:
        source = (sources / f"{name}.md").read_text("utf-8")
        written = texts / f"{name}.txt"
        text = written.read_text("utf-8") if written.exists() else plain(source)
        target = out / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        whole.append(text.rstrip())
        if name.startswith("repository/"):
            continue
        if name.endswith("/index") and name.count("/") == 1:
            listed += ["", f"## {title(source)}", ""]
        line = summary(plain(source))
        listed.append(f"- [{title(source)}]({name}.md){': ' if line else ''}{line}")
    (out / "llms.txt").write_text("\n".join(listed) + "\n", "utf-8")
    (out / "llms-full.txt").write_text("\n\n\n".join(whole) + "\n", "utf-8")
    shutil.rmtree(texts, ignore_errors=True)


def plain(source: str) -> str:
    """Return a page without front matter, navigation and plots."""
    source = re.sub(r"\A---\n.*?\n---\n+", "", source, flags=re.DOTALL)
    return _PLOT.sub("", _DIRECTIVE.sub("", source))
