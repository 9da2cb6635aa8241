"""The bundled model with other chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nucleate as nc
from nucleate.models.loader import ModelSource

OPENED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|><think>\n"
)
"""A template that opens the reasoning section."""
OPTIONAL = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""A template that may close the reasoning section, as that of Qwen3."""


def folder(path: Path, template: str) -> Path:
    """Copy the bundled model with another chat template."""
    source = ModelSource.find(None, device="auto", dtype="auto", runtime="auto", revision=None).folder
    shutil.copytree(source, path, dirs_exist_ok=True)
    config = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return path


def model(path: Path, template: str, **options: Any) -> nc.LLM:
    return nc.LLM(folder(path, template), **options)


def run(llm: nc.LLM, request: nc.Request) -> list[nc.CompletionChunk]:
    """Run a request on a new engine."""
    engine = llm.new_engine()
    engine.add(request)
    chunks = []
    while len(engine):
        chunks += [output.chunk for output in engine.step()]
    return chunks
