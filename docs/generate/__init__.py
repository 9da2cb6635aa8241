"""Generates the documentation: the committed files, and the site. ``docs/build.py`` is the command."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
