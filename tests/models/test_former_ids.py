"""Hugging Face ids that once had no owner."""

from __future__ import annotations

from pathlib import Path

import pytest

import nucleate as nc


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "there is no model folder 'gpt2' .the Hugging Face id of that name is now 'openai-community/gpt2'"),
        ("distilgpt2", "is now 'distilbert/distilgpt2'"),
        ("gpt3", "there is no model folder 'gpt3' .a Hugging Face id has the form 'owner/name'"),
    ],
)
def test_an_id_without_an_owner(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nc.ModelError, match=message):
        nc.LLM(name)
