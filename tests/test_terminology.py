"""User-facing text uses standard terms: help texts, metrics, parameters and documentation."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nucleate.cli import main
from nucleate.engine.beam_params import BeamParams
from nucleate.outputs import EngineStats
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS
from nucleate.server.limits import ServerLimits
from nucleate.server.metrics import Metrics

ROOT = Path(__file__).parents[1]
TERMS = {
    r"fulfil": "conform to, validate",
    r"\bat work\b": "running",
    r"\btheir turn\b": "queued",
    r"\bcome again\b": "retry",
    r"\bguess": "propose draft tokens",
    r"\blikeliest\b": "most likely",
    r"\bkeys and values\b": "KV cache",
    r"\bshared beginning|\bbegin alike|\bbegin with the same": "prefix caching",
    r"\b(cannot|not) be held\b|\bheld in full\b|\bwhat is held\b": "enforced",
    r"\b(is|are|was|were|be) told\b|\btells of\b": "reported",
    r"\b(compiled|hot) chain\b": "fused kernel",
    r"\bwhoever\b|\banew\b|\bas ever\b|\bof one's own\b": "plain words",
    r"\banswers? of (some|a) form\b|\b(have|has|had|with|of) a form\b": "structured output",
    r"\bform of (the|its|an|their) (text|answer)": "structured output",
    r"\bthose that write\b": "decoding sequences",
    r"\bthe figures\b|\bin figures\b": "metrics, measurements",
    r"\blaws?\b": "target distribution, property",
    r"\btwins?\b": "reference implementation",
    r"\bcoins?\b": "random decision",
    r"\bspeller\b": "tokenizer",
    r"--limit-": "standard flags",
    r"\bnucleate_(answers|forms|draft_|tokens_|forwards|mask_seconds|disconnects)": "standard metrics",
}
"""Patterns of replaced words, and the standard terms."""

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = sorted(path for kind in ("*.md", "*.py", "*/*.py", "*/*.ipynb") for path in (ROOT / "examples").glob(kind))
COMMANDS = ("generate", "chat", "serve", "batch", "inspect", "bench", "warm", "stages", "detect")


def found(text: str) -> dict[str, list[str]]:
    """The passages of a text that use replaced words, by their standard term."""
    passages: dict[str, list[str]] = {}
    for pattern, term in TERMS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            passages.setdefault(term, []).append(text[max(0, match.start() - 40) : match.end() + 40].replace("\n", " "))
    return passages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documentation(page: Path) -> None:
    assert found(page.read_text("utf-8")) == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert len(text) > 100
    assert found(text) == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main.main([command, "--help-all" if command in ("generate", "chat", "serve", "batch") else "--help"])
    assert len(text.getvalue()) > 100
    assert found(text.getvalue()) == {}


def _helps() -> Iterator[str]:
    for parameters in (FIELDS, BeamParams.PARAMETERS, ServerLimits.PARAMETERS):
        for name, parameter in parameters.items():
            yield f"{name}: {parameter.help}"
    yield from (str(stage.__doc__) for stage in STAGES.values())


def test_parameters_and_stages() -> None:
    assert found("\n".join(_helps())) == {}


def test_metrics() -> None:
    metrics = Metrics("tiny", lambda: EngineStats(*range(len(EngineStats._fields) - 1)))
    text, _ = metrics.render()
    assert b"nucleate_prefix_cache_hits_total" in text
    assert found(text.decode()) == {}
