"""``LLM`` with guidance and with a companion model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import nucleate as nc
from nucleate.generation.loop import generate
from nucleate.models.loader import EMBEDDED
from nucleate.models.protocol import ModelError

PROMPT = "Once upon a time"
GUIDED = nc.SamplingParams(guidance_scale=1.5, negative_prompt="A sad story", max_tokens=16, seed=3, n=2)
CONTRASTIVE = nc.SamplingParams(contrastive_beta=0.7, contrastive_temperature=0.5, max_tokens=16, seed=3)


@pytest.fixture(scope="module")
def contrastive(llm: nc.LLM) -> nc.LLM:
    return nc.LLM(companion_model=EMBEDDED)


def from_loop(llm: nc.LLM, params: nc.SamplingParams, index: int = 0) -> list[int]:
    ids, companion, params = llm.encode(PROMPT), llm.companion_model, params.with_defaults(llm.default_params)
    chunks = generate(llm.model, llm.tokenizer, ids, params, index, companion_model=companion)
    return [token for chunk in chunks for token in chunk.token_ids]


@pytest.mark.slow
def test_outputs_equal_the_loop(llm: nc.LLM, contrastive: nc.LLM) -> None:
    [completion] = llm.generate(PROMPT, GUIDED)
    assert [[*output.token_ids] for output in completion.outputs] == [from_loop(llm, GUIDED, at) for at in range(2)]
    [completion] = contrastive.generate(PROMPT, CONTRASTIVE)
    assert [*completion.outputs[0].token_ids] == from_loop(contrastive, CONTRASTIVE)


def test_other_ways_to_pass_guidance_are_equal(llm: nc.LLM) -> None:
    text = llm.generate(PROMPT, GUIDED)[0].text
    ids = llm.encode("A sad story")
    assert llm.generate(PROMPT, GUIDED.replace(negative_prompt=ids))[0].text == text
    assert "".join(chunk.text for chunk in llm.stream(PROMPT, GUIDED.replace(n=1))) == text
    pipeline = "guidance(1.5, 'A sad story') | top_k(50) | top_p(0.9) | gumbel"
    plain = nc.SamplingParams(pipeline=pipeline, max_tokens=16, seed=3)
    given = GUIDED.replace(n=1, top_k=50, top_p=0.9, temperature=1.0)
    assert llm.generate(PROMPT, plain)[0].text == llm.generate(PROMPT, given)[0].text


def test_a_companion_model_with_another_vocabulary_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(EMBEDDED, folder)
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(ModelError, match=r"must have the vocabulary of the model; .*other has other tokens"):
        nc.LLM(companion_model=folder)
