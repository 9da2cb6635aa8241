"""The configuration of Sphinx, see ``generate.site``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from generate import docstrings

import nucleate as nc

project = "nucleate"
author = "The nucleate authors"
copyright = "The nucleate authors"  # noqa: A001  # Sphinx's name
version = release = nc.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
add_module_names = False
smartquotes = False  # they would change code in prose
html_theme = "furo"
html_title = "nucleate"
html_static_path = ["static"]
html_css_files = ["nucleate.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"


def make_focusable(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Let the keyboard scroll wide code and tables."""
    body = context.get("body", "").replace("<pre>", '<pre tabindex="0">')
    context["body"] = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')


LANDMARKS = {'<aside class="sidebar-drawer"': "All pages", '<aside class="toc-drawer': "This page"}
"""The beginnings of regions that the theme leaves without a name, and their names."""


def name_landmarks(app: Any, error: Exception | None) -> None:
    """Name the regions of each page, so that a screen reader can tell them apart."""
    for path in () if error or app.builder.name != "html" else Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        for begin, name in LANDMARKS.items():
            text = text.replace(begin, begin.replace("<aside", f'<aside aria-label="{name}"'))
        path.write_text(text, "utf-8")


def setup(app: Any) -> None:
    """Connect the handlers of events."""
    app.connect("build-finished", name_landmarks)
    app.connect("html-page-context", make_focusable)
    app.connect("autodoc-process-docstring", docstrings.process)
