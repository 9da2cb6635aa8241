"""The bundle of the page's modules, and the page that shows a saved trace without a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nucleate.inspector import page as bundling
from nucleate.inspector.page import asset, bundle, offline_page

ENTRIES = ("inspector.js", "offline.js", "widget.js")
HOSTILE = {"text": "</script><script>alert(1)</script><!-- \u2028 é 🙂 $& {0}"}
node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run_node(source: str, tmp_path: Path, *flags: str) -> str:
    (tmp_path / "bundle.mjs").write_text(source, "utf-8")
    done = subprocess.run(["node", *flags, tmp_path / "bundle.mjs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_are_joined_after_their_imports() -> None:
    sources = {
        "a.js": 'import {b, Counter} from "./b.js";\nimport { c } from "./c.js";\nexport const a = b + c;\n',
        "b.js": 'import {c} from "./c.js";\nexport const b = c;\nexport class Counter {\n  export = 1;\n}\n',
        "c.js": "export const c = 1;\n",
        "unused.js": "export const d = 1;\n",
    }
    b, c = "const b = c;\nclass Counter {\n  export = 1;\n}\n", "const c = 1;\n"
    assert bundle("a.js", sources) == f"// c.js\n{c}\n// b.js\n{b}\n// a.js\nconst a = b + c;\n"


@node
def test_a_bundle_does_what_its_modules_do(tmp_path: Path) -> None:
    sources = {
        "main.js": 'import {twice} from "./twice.js";\nimport {one} from "./one.js";\nconsole.log(await twice(one));\n',
        "twice.js": 'import {one} from "./one.js";\nexport async function twice(x) {\n  return x + one;\n}\n',
        "one.js": "export const [one, two] = [1, 2];\n",
    }
    assert run_node(bundle("main.js", sources), tmp_path) == "2\n"


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_modules_of_the_page_can_be_joined(entry: str, tmp_path: Path) -> None:
    source = bundle(entry)
    assert not re.search(r"^(import|export)\b|\bimport\s*\(|\bimport\.meta\b|</script|<!--", source, re.MULTILINE)
    if shutil.which("node"):
        run_node(source, tmp_path, "--check")  # also finds names that two modules declare


def test_modules_import_what_others_export() -> None:
    for path in (Path(bundling.__file__).parent / "assets").glob("*.js"):
        for names, other in re.findall(r'^import \{(.+)\} from "\./(.+)";$', path.read_text("utf-8"), re.MULTILINE):
            for name in names.split(","):
                assert re.search(rf"^export (async )?\w+\*? {name.strip()}\b", asset(other), re.MULTILINE), path


class Parser(HTMLParser):
    """The elements of a page with their attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], str]] = [("", {}, "")]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.elements.append(("", {}, ""))

    def handle_data(self, data: str) -> None:
        tag, attributes, text = self.elements[-1]
        self.elements[-1] = (tag, attributes, text + data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.elements if name == tag]


@pytest.mark.parametrize("document", [None, HOSTILE])
def test_an_offline_page_allows_only_its_own_script_and_style(document: dict[str, str] | None) -> None:
    page = Parser(offline_page(document))
    [(_, style)] = page.all("style")
    [(kept, data), (module, script)] = page.all("script")
    assert kept == {"type": "application/json", "id": "nci-document"}
    assert json.loads(data) == document
    assert module == {"type": "module"}
    policy = next(a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    hashes = [f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in (script, style)]
    assert policy == (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src blob: data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert not page.all("link")
    assert not any("src" in a or "style" in a or any(name.startswith("on") for name in a) for _, a, _ in page.elements)


def test_the_place_of_the_document_is_found_once() -> None:
    """The page puts the saved trace in place of null."""
    assert offline_page().count('<script type="application/json" id="nci-document">null</script>') == 1


def test_the_json_in_a_page_cannot_end_its_script() -> None:
    text = bundling.script_json(HOSTILE)
    assert "<" not in text
    assert json.loads(text) == HOSTILE
    with pytest.raises(ValueError, match="JSON"):
        bundling.script_json({"p": float("nan")})
