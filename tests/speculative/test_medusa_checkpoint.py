"""Medusa heads in their public layouts: the drafts of a plain twin, and errors that name what does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draft_heads import medusa, write
from test_eagle_checkpoint import TEXT, drafts, hidden_states, without

import nucleate as nc
from nucleate.speculative.neural.medusa_checkpoint import load_medusa


def twin(tensors: Any, target: Any, hidden_X: Any, heads: int, blocks: int) -> list[int]:
    """The best token of each head in float64."""
    w, found = {name.removeprefix("medusa_heads."): each.astype(float) for name, each in tensors.items()}, []
    x = hidden_X.astype(float)
    x = x / np.sqrt((x * x).mean() + float(target.epsilon)) * target.norm.astype(float)
    for head in range(heads):
        y = x
        for block in range(blocks):
            name = next(
                name for name in (f"{head}.{block}.linear", f"blocks.{head}.layers.{block}") if f"{name}.weight" in w
            )
            z = w[f"{name}.weight"] @ y + w.get(f"{name}.bias", 0.0)
            y = y + z / (1 + np.exp(-z))
        names = (f"{head}.{blocks}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight")
        best = int((w[next(name for name in names if name in w)] @ y).argmax())
        found.append(int(tensors["token_map"][best]) if "token_map" in w else best)
    return found


@pytest.mark.parametrize("layout", ["medusa", "vllm", "vllm, shared", "vllm, map"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_drafts_are_those_of_a_twin(tmp_path: Path, llm: nc.LLM, layout: str, blocks: int) -> None:
    target: Any = llm.model
    file = "medusa_lm_head.safetensors" if layout == "medusa" else "model.safetensors"
    tensors = write(tmp_path, *medusa(target, layout, blocks=blocks), file)
    proposer, ids = load_medusa(tmp_path, target, 1)(), llm.encode(TEXT)
    assert proposer.layers == (len(target.layers),)
    hidden_TX = hidden_states(target, proposer.layers, ids)
    assert drafts(proposer, ids, hidden_TX) == twin(tensors, target, hidden_TX[-2], 3, blocks)


def test_whole_unembeddings_with_a_token_map(tmp_path: Path, llm: nc.LLM) -> None:
    """Those of all tokens are reduced to the ones that can be drafted."""
    target: Any = llm.model
    config, tensors = medusa(target, "vllm")
    tensors["token_map"] = np.array([5, 900, 17])
    write(tmp_path, config, tensors)
    proposer, ids = load_medusa(tmp_path, target, 1)(), llm.encode(TEXT)
    assert {*drafts(proposer, ids, hidden_states(target, proposer.layers, ids))} <= {5, 900, 17}


ERRORS: list[tuple[str, Any, str]] = [
    ("medusa", lambda t: without(t, "1.1.linear.weight"), "1.1.linear.weight is missing"),
    ("medusa", lambda t: without(t, "2.2.weight"), "2.2.weight is missing"),
    ("medusa", lambda t: without(t, "0.0.linear.weight"), "it has no 0.0.linear.weight or blocks.0.layers.0"),
    ("medusa", lambda t: {**t, "0.0.linear.weight": t["0.2.weight"]}, "0.0.linear.weight has the shape"),
    ("medusa", lambda t: {**t, "0.0.linear.bias": t["0.2.weight"]}, "0.0.linear.bias has the shape"),
    ("medusa", lambda t: {**t, "0.2.weight": t["0.2.weight"][1:]}, "0.2.weight has the shape (4095, 192)"),
    ("medusa", lambda t: {**t, "0.mixer": t["0.2.weight"]}, "do not have: 0.mixer"),
    ("vllm", lambda t: without(t, "lm_heads.2.weight"), "lm_heads.2.weight is missing"),
    ("vllm, map", lambda t: {**t, "token_map": t["token_map"] + 5000}, "token_map does not map its 300"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "change", "message"), ERRORS)
def test_other_checkpoints_are_errors(tmp_path: Path, llm: nc.LLM, layout: str, change: Any, message: str) -> None:
    config, tensors = medusa(llm.model, layout)
    write(tmp_path, config, change(tensors))
    with pytest.raises(nc.ModelError, match=re.escape(message)):
        nc.LLM(speculative_config={"method": "medusa", "model": str(tmp_path)})
