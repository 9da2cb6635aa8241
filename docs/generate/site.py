"""Builds the site: writes the sources of all pages into a folder, and runs Sphinx with warnings as errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import nucleate as nc
from generate import DOCS
from generate.api_check import undocumented
from generate.llms import write_llms
from generate.navigation import Section, decisions, hand_written, toctree
from generate.pages import Pages
from generate.reference import reference_pages
from generate.site_checks import site_problems

CONFIGURATION = DOCS / "generate" / "sphinx"
"""The folder with the configuration of Sphinx, and static files."""
TOCTREE = re.compile(r"^```\{toctree\}\n:hidden:\n\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def build_site(out: Path) -> int:
    """Build the site into a folder, which is replaced. Return the exit status: 1 for any problem."""
    problems = undocumented()
    with tempfile.TemporaryDirectory() as temporary:
        sources = Path(temporary, "sources")
        pages = write_sources(sources)
        shutil.rmtree(out, ignore_errors=True)
        problems += run_sphinx(sources, out, "html")
        texts = [name for name in pages if "{eval-rst}" in (sources / f"{name}.md").read_text("utf-8")]
        problems += run_sphinx(sources, Path(temporary, "text"), "text", texts)
        write_llms(pages, sources, Path(temporary, "text"), out)
        if (sources / "repository").exists():  # the Markdown of a page links to these files, the HTML to copies
            shutil.copytree(sources / "repository", out / "repository", dirs_exist_ok=True)
        problems += site_problems(out)
    print("\n".join(problems) or f"site: {len(pages)} pages in {out}")
    return 1 if problems else 0


def write_sources(sources: Path) -> list[str]:
    """Write all pages, and return their paths without ``.md`` in the order of the navigation."""
    pages = Pages(sources)
    sections = hand_written(pages)
    generated = reference_pages(sources)
    sections["reference"].entries = [*generated, *sections["reference"].entries]
    adr = decisions(pages)
    sections["explanation"].entries.append(adr.write(sources))
    used = [section for section in sections.values() if section.entries]
    indexes = [section.write(sources) for section in used]
    (sources / "index.md").write_text(front_page(used, indexes, pages.add(DOCS / "pictures" / "overview.svg")), "utf-8")
    for orphan in pages.orphans:
        path = sources / orphan
        path.write_text(f"---\norphan: true\n---\n\n{path.read_text('utf-8')}", "utf-8")
    return [*in_order(sources, "index"), *sorted(name.removesuffix(".md") for name in pages.orphans)]


def in_order(sources: Path, name: str) -> list[str]:
    """Return a page and all pages below it in the navigation, in order."""
    below = TOCTREE.findall((sources / f"{name}.md").read_text("utf-8"))
    entries = [str(PurePosixPath(name).parent / entry) for tree in below for entry in tree.split()]
    return [name, *(page for entry in entries for page in in_order(sources, os.path.normpath(entry)))]


FRONT = """\
# nucleate

nucleate is {about}: penalties, temperature, truncation, sampling, stop criteria and detokenization, as a library, a
command line and an OpenAI-compatible server. A small model is bundled. This is version {version}
([changes](project/changelog.md)); it needs Python 3.11 to 3.13 on Linux.

![One step: the probabilities of some tokens after each sampling stage, and the text]({picture})

## Install

In a copy of [the repository](https://github.com/nucleate/nucleate), as nucleate is on no package index yet:

```sh
make demo                  # a virtual environment with nucleate, and a first story; no GPU and no model download
. .venv/bin/activate
nucleate chat              # or: nucleate chat -m model.gguf
```

```python
import nucleate as nc

llm = nc.LLM()  # the bundled model
[completion] = llm.generate("Once upon a time", temperature=0.8, min_p=0.05, seed=1, max_tokens=60)
print(completion.text)
```

## Three doors

- **Run a model.** [A first story in 60 seconds](tutorials/first_story.md), then [which model, which
  runtime](how-to/choose_a_runtime.md): bundled, GGUF, OpenVINO, Transformers.
- **Serve it.** [Serve a model](tutorials/serve_a_model.md) to the clients of OpenAI, Anthropic and Ollama, then
  [everything about the server](server.md).
- **Study sampling.** [Sample your own logits](tutorials/sample_your_logits.md), [look into every
  stage](inspector.md), and [sweep over parameters](compare.md#sweeps).

## All pages

{sections}

For language models: <a href="llms.txt">llms.txt</a> lists all pages as Markdown, and
<a href="llms-full.txt">llms-full.txt</a> has them in one file.

{toctree}
"""


def front_page(sections: Sequence[Section], indexes: Sequence[str], picture: str) -> str:
    """Return the first page: what nucleate is, and the sections. picture: its path in the sources."""
    about = (nc.__doc__ or "").strip().splitlines()[0].removeprefix("nucleate: ").rstrip(".")
    links = [f"- **[{one.heading}]({index}.md)**: {one.about}" for one, index in zip(sections, indexes, strict=True)]
    return FRONT.format(
        about=about, version=nc.__version__, picture=picture, sections="\n".join(links), toctree=toctree(indexes)
    )


def run_sphinx(sources: Path, out: Path, builder: str, names: Sequence[str] = ()) -> list[str]:
    """Run a builder, and return its warnings. names: the pages to write; none: all."""
    folders = ["-c", str(CONFIGURATION), "-d", str(sources.parent / "doctrees")]
    options = ["-q", "--no-color", "-j", "auto", "-b", builder, *folders]
    files = [str(sources / f"{name}.md") for name in names]
    command = [sys.executable, "-m", "sphinx", *options, str(sources), str(out), *files]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603
    warnings = [line.replace(f"{sources}/", "") for line in done.stderr.splitlines() if line.strip()]
    return warnings or (["Sphinx failed"] if done.returncode else [])
