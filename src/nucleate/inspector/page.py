"""The files of the inspector's page as a server sends them, and the page's ES modules joined into one script.

The script is for the notebook widget, and for saved pages that need no server. The modules follow rules that make
joining a matter of lines, which `bundle` checks: imports are of the form ``import {a, b} from "./x.js";``, on lines of
their own; exports are declarations (``export function f``); no top-level name occurs twice. Imports nothing of the rest
of the package.
"""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, NamedTuple

STYLE = "inspector.css"
IMPORT = re.compile(r'import \{ ?([\w$]+(?:, [\w$]+)*) ?\} from "\./([\w-]+\.js)";')
DECLARATION = re.compile(r"(export )?(?:async )?(?:function\*?|class|const|let) ([\w$]+|\[[\w$, ]+\])(?=\W)")
FORBIDDEN = re.compile(r"\bimport\s*\(|\bimport\.meta\b|</script|<!--", re.IGNORECASE)
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


class BundleError(ValueError):
    """The modules break a rule."""


class Module(NamedTuple):
    """A parsed module. imports: the names it imports, by module. body: the source without imports and exports."""

    imports: Mapping[str, tuple[str, ...]]
    declared: frozenset[str]
    exported: frozenset[str]
    body: str


def bundle(entry: str = "inspector.js", sources: Mapping[str, str] | None = None) -> str:
    """Return one module with the code of an entry module and all that it imports, each after its imports.

    sources: module sources by file name; None: those of the page. Raises BundleError if a module breaks a rule.
    """
    modules = dict(_reachable(entry, sources))
    _check_names(modules)
    sorter = TopologicalSorter({name: sorted(module.imports) for name, module in modules.items()})
    try:
        order = list(sorter.static_order())
    except CycleError as error:
        raise BundleError(f"modules import each other: {' -> '.join(error.args[1])}") from None
    return "\n".join(f"// {name}\n{modules[name].body}" for name in order)


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


def _reachable(entry: str, sources: Mapping[str, str] | None) -> Iterator[tuple[str, Module]]:
    """The entry module and all modules that it imports, directly or not."""
    found, waiting = {entry}, [(entry, "the bundle")]
    while waiting:
        name, importer = waiting.pop()
        try:
            source = asset(name) if sources is None else sources[name]
        except (FileNotFoundError, KeyError):
            raise BundleError(f"{importer} imports {name}, which does not exist") from None
        module = _parse(name, source)
        yield name, module
        waiting += [(other, name) for other in module.imports if other not in found]
        found |= module.imports.keys()


def _parse(name: str, source: str) -> Module:
    """Read the top level of a module, whose lines are those without indentation."""
    imports: dict[str, tuple[str, ...]] = {}
    declared: list[str] = []
    exported: list[str] = []
    body: list[str] = []
    for number, line in enumerate(source.splitlines(), 1):
        where = f"{name}, line {number}"
        if FORBIDDEN.search(line):
            raise BundleError(f"{where}: {FORBIDDEN.search(line)[0]!r} cannot be part of a bundle")  # type: ignore[index]
        if re.match(r"import\b", line):
            if (found := IMPORT.fullmatch(line)) is None or found[2] in imports:
                raise BundleError(f'{where}: write one line import {{a, b}} from "./x.js"; per module')
            imports[found[2]] = tuple(found[1].split(", "))
            continue
        declaration = DECLARATION.match(line)
        if re.match(r"export\b", line) and declaration is None:
            raise BundleError(f"{where}: only declarations can be exported: export function, class, const or let")
        if declaration is None and re.match(r"(const|let|var|class|function)\b", line):
            raise BundleError(f"{where}: a top-level declaration must be const, let, class or function, with names")
        if declaration is not None:
            names = declaration[2].strip("[]").split(", ")
            declared += names
            exported += names if declaration[1] else []
        body.append(line.removeprefix("export ") if declaration else line)
    return Module(imports, frozenset(declared), frozenset(exported), "\n".join(body).strip("\n") + "\n")


def _check_names(modules: Mapping[str, Module]) -> None:
    homes: dict[str, str] = {}
    for name, module in modules.items():
        for one in module.declared:
            if one in homes:
                raise BundleError(f"{one} is declared in {homes[one]} and in {name}")
            homes[one] = name
        for other, names in module.imports.items():
            if missing := [one for one in names if one not in modules[other].exported]:
                raise BundleError(f"{name} imports {', '.join(missing)} from {other}, which does not export it")


TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
OFFLINE: Final = "offline.html"
"""A page without a trace, which the page fills to save itself."""


@cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    found = {file.name: file for file in (files("nucleate.inspector") / "assets").iterdir()}
    types = {name: TYPES[name.rpartition(".")[2]] for name in found if name.rpartition(".")[2] in TYPES}
    return {name: (found[name].read_bytes(), content_type) for name, content_type in types.items()}


@cache
def _offline() -> bytes:
    return offline_page().encode()


def inspector_file(name: str) -> tuple[bytes, str] | None:
    """The content and the content type of a file; None if there is none of this name."""
    return (_offline(), TYPES["html"]) if name == OFFLINE else _files().get(name)


@cache
def compressed_inspector_file(name: str) -> bytes:
    """The content of a file with gzip, about a third of its bytes. Raises KeyError if there is none of this name."""
    found = inspector_file(name)
    if found is None:
        raise KeyError(name)
    return gzip.compress(found[0], mtime=0)
