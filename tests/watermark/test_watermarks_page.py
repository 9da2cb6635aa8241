"""The example of docs/watermarks.md runs and finds the watermark; the plot is drawn from the results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watermarks.md").read_text("utf-8")


@pytest.mark.slow
def test_the_example_finds_the_watermark(capsys):
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    exec(block, {})
    found = re.search(r"p_value=([0-9.e-]+), .*expected=0.25", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) < 1e-3


def test_the_figures_of_the_page_are_those_of_the_results():
    results = json.loads((ROOT / "benchmarks" / "results" / "watermarks.json").read_text("utf-8"))
    for kind, shares in results["false_alarms"].items():
        row = " | ".join(f"{share:.4f}" for share in shares.values())
        assert f"| {kind} | {row} |" in PAGE
        for level, share in shares.items():
            assert share < float(level) * 1.3 + 1e-3
    for kind, microseconds in results["microseconds"].items():
        assert f"| {kind} | {microseconds:.0f} |" in PAGE
