"""The files of the inspector's page as a server sends them, and the page's ES modules joined into one script.

The script is for the notebook widget, and for saved pages that need no server. The modules follow rules that make
joining a matter of lines: imports are of the form ``import {a, b} from "./x.js";``, on lines of their own, and have no
cycles; exports are declarations (``export function f``); no top-level name occurs twice. Imports nothing of nucleate.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final

STYLE = "inspector.css"
IMPORT = re.compile(r'^import \{.+\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Saved trace - nucleate inspector</title>
<style>{style}</style>
</head>
<body>
<div id="nci-root"></div>
<noscript>This page shows a saved trace and needs JavaScript.</noscript>
<script type="application/json" id="nci-document">{document}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def bundle(entry: str = "inspector.js", sources: Mapping[str, str] | None = None) -> str:
    """Return one module with the code of an entry module and all that it imports, each after its imports.

    sources: module sources by file name; None: those of the page.
    """
    seen, parts = set[str](), list[str]()

    def add(name: str) -> None:
        seen.add(name)
        source = asset(name) if sources is None else sources[name]
        for other in IMPORT.findall(source):
            if other not in seen:
                add(other)
        body = EXPORT.sub("", IMPORT.sub("", source)).strip("\n")
        parts.append(f"// {name}\n{body}\n")

    add(entry)
    return "\n".join(parts)


def asset(name: str) -> str:
    """The text of a file of the page. Raises FileNotFoundError."""
    return (files("nucleate.inspector") / "assets" / name).read_text("utf-8")


def offline_page(document: Mapping[str, Any] | None = None) -> str:
    """Return a page that shows a saved trace without a server: one HTML file that loads nothing else.

    document: the saved trace; None: the page offers to open one, and has ``null`` in its place.
    """
    style, script = f"\n{asset(STYLE)}", f"\n{bundle('offline.js')}"
    policy = (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src {_hash_source(style)}; "
        "img-src blob: data:; base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(policy=policy, style=style, script=script, document=script_json(document))


def script_json(value: Any) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash_source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
OFFLINE: Final = "offline.html"
"""A page without a trace, which the page fills to save itself."""


@cache
def page_files(package: str, folder: str) -> Mapping[str, tuple[bytes, str]]:
    """The content and the content type of each file of a page."""
    named = [(file, file.name.rpartition(".")[2]) for file in (files(package) / folder).iterdir()]
    return {file.name: (file.read_bytes(), TYPES[kind]) for file, kind in named if kind in TYPES}


@cache
def _offline() -> bytes:
    return offline_page().encode()


def inspector_file(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of a file; None if there is none of this name."""
    return (_offline(), TYPES["html"]) if name == OFFLINE else page_files("nucleate.inspector", "assets").get(name)
