"""Kinds of models sharded over two processes: the tokens of one process. Only one may be open at a time."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
import random_models
from test_tensor_parallel import check_mixed_requests

import nucleate as nc
from nucleate.models.loader import EMBEDDED

SLOW = ("tied", "mixtral")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else pytest.mark.exhaustive)
        for kind in random_models.KINDS
        if kind not in ("llama", "gpt2")
    ],
)
def test_kinds_of_models(tmp_path: Path, kind: str) -> None:
    """Tied embeddings, biases, norms of heads, windows, soft caps, experts, fused projections, sinks."""
    path = random_models.save(tmp_path, kind)
    with closing(nc.LLM(path, tensor_parallel=2, device="cpu")) as sharded:
        check_mixed_requests(sharded, nc.LLM(path, device="cpu", runtime="torch"))


@pytest.mark.slow
def test_the_embedded_model(llm: nc.LLM) -> None:
    """Tied embeddings, text, and a companion model on rank 0; one process runs it with NumPy."""
    schema = json.dumps({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    params = [
        nc.SamplingParams(temperature=0, max_tokens=60),
        nc.SamplingParams(seed=1, max_tokens=60, stop=["."]),
        nc.SamplingParams(seed=2, max_tokens=40, structured_outputs=nc.StructuredOutputs(json_schema=schema)),
        nc.SamplingParams(seed=3, max_tokens=40, guidance_scale=1.5, negative_prompt="A sad story", n=2),
        nc.SamplingParams(seed=4, max_tokens=40, contrastive_beta=0.7, contrastive_temperature=0.5),
        nc.SamplingParams(seed=5, max_tokens=40, dry_multiplier=0.8, xtc_probability=0.5),
    ]
    prompts, one = ["Once upon a time"] * len(params), nc.LLM(companion_model=EMBEDDED)
    with closing(nc.LLM(tensor_parallel=2, device="cpu", dtype="float32", companion_model=EMBEDDED)) as sharded:
        random_models.assert_same(sharded.generate(prompts, params), one.generate(prompts, params))
