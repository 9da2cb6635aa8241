"""Beam search on the engine equals ``generate(num_beams=...)`` of Transformers for a thousand random searches.

Tokens are equal, and scores within 1e-4. Models are small Llamas with random weights; all searches on a model
run on one engine, many at a time.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tiers
from toy_requests import drive

import nucleate as nc
from nucleate.engine.beam_params import BeamCompletion, BeamParams, BeamRequest
from nucleate.engine.engine import Engine
from nucleate.models.loader import runner_of

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
from random_models import small_llama  # noqa: E402  # it needs both

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PENALTIES = (-1.0, 0.0, 0.5, 1.0, 2.0)
EARLY: tuple[Any, ...] = (True, False, "never")
SIZES = (40, 53, 64, 101)
SETTINGS = list(itertools.product(PENALTIES, EARLY, (1, 2, 3)))  # the last one is the number of stop ids
ALL = 1000


class Beams(transformers.GenerationConfig):
    def get_generation_mode(self, *_: object) -> Any:  # also for one beam, which would be greedy search
        return transformers.generation.GenerationMode.BEAM_SEARCH


def request_of(number: int, size: int) -> BeamRequest:
    rng = np.random.default_rng(number)
    penalty, early, ends = SETTINGS[number % len(SETTINGS)]
    num_beams = int(rng.integers(1, 7))
    params = BeamParams(
        num_beams=num_beams,
        max_tokens=int(rng.integers(1, 13)),
        length_penalty=penalty,
        early_stopping=early,
        num_return_sequences=int(rng.integers(1, num_beams + 1)),
        stop_token_ids=rng.choice(size, ends, replace=False).tolist(),
        ignore_eos=True,
    )
    return BeamRequest(rng.integers(0, size, rng.integers(1, 20)).tolist(), params)


def transformers_search(model: Any, request: BeamRequest, count: int) -> list[tuple[tuple[int, ...], float]]:
    params, prompt = request.params, list(request.prompt_ids)
    config = Beams(
        num_beams=params.num_beams, num_return_sequences=count, max_new_tokens=params.max_tokens, pad_token_id=0,
        eos_token_id=list(params.stop_token_ids), length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    lengths = (out.beam_indices >= 0).sum(1).tolist()  # padding equals an EOS id
    texts = [tuple(text[len(prompt) :][:n]) for text, n in zip(out.sequences.tolist(), lengths, strict=True)]
    return list(zip(texts, out.sequences_scores.tolist(), strict=True))


def compare(ours: BeamCompletion, model: Any, request: BeamRequest) -> None:
    """Transformers sums scores in float32, so large ones differ by up to 1e-5 of their value."""
    expected = transformers_search(model, request, request.params.n)
    assert [beam.token_ids for beam in ours.outputs] == [ids for ids, _ in expected]
    assert [beam.score for beam in ours.outputs] == pytest.approx([score for _, score in expected], abs=1e-4, rel=1e-5)


def run(llm: nc.LLM, numbers: range) -> int:
    """Compare searches. Returns the number compared."""
    from nucleate.models.transformers.transformers_model import TransformersModel

    equal = 0
    for index, size in enumerate(SIZES):
        model = small_llama(size)
        requests = [request_of(number, size) for number in numbers if number % len(SIZES) == index]
        engine = Engine(runner_of(TransformersModel.of(model), 8 << 20), llm.tokenizer, max_num_seqs=48)
        assert engine.runner.paged
        for request, events in zip(requests, drive(engine, requests), strict=True):
            compare(BeamCompletion.from_chunks(request.prompt_ids, [one.chunk for one in events]), model, request)
        equal += len(requests)
    return equal


@pytest.mark.slow
def test_searches_of_all_settings_equal_transformers(llm: nc.LLM) -> None:
    assert run(llm, range(len(SETTINGS) * tiers.count(1, 2))) == len(SETTINGS) * tiers.count(1, 2)


@pytest.mark.exhaustive
def test_a_thousand_searches_equal_transformers(llm: nc.LLM) -> None:
    assert run(llm, range(ALL)) == ALL
