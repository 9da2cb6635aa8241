"""The pictures of docs/explanation are those that docs/figures.py draws."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
PAGES = "".join(path.read_text("utf-8") for path in (DOCS / "explanation").glob("*.md"))
SHOWN = sorted(set(re.findall(r"/([\w-]+\.svg)", PAGES)))


@pytest.mark.slow
def test_the_pictures_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DOCS / "figures.py"), str(tmp_path)], check=True, capture_output=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == SHOWN
    for path in tmp_path.iterdir():
        drawn, stored = path.read_text("utf-8"), (DOCS / "pictures" / path.name).read_text("utf-8")
        assert NUMBER.sub("", drawn) == NUMBER.sub("", stored)
        for one, other in zip(NUMBER.findall(drawn), NUMBER.findall(stored), strict=True):
            assert float(one) == pytest.approx(float(other), abs=1.0)  # logits differ in their last digits


@pytest.mark.parametrize("name", SHOWN)
def test_a_picture_is_small_and_has_a_dark_form(name: str) -> None:
    content = (DOCS / "pictures" / name).read_text("utf-8")
    assert len(content) < 30_000
    assert "prefers-color-scheme:dark" in content
    assert "<title>" in content
