"""Guidance equals ``generate`` of Transformers, and contrastive decoding its definition: in tokens and in logits.

Models are small Llamas with random weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiers
from toy_requests import drive, tokens_of

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.models.loader import runner_of
from nucleate.models.transformers.transformers_model import TransformersModel
from nucleate.sampling.companion import combine
from nucleate.sampling.stages import Contrastive, Guidance

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
pytest.importorskip("transformers", reason="needs the extra 'torch'")
from random_models import small_llama as model_of  # noqa: E402  # it needs both

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = (40, 53, 101)
LENGTH = 12


def random_case(rng: np.random.Generator, size: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt and the fields of guidance."""
    prompt = rng.integers(0, size, rng.integers(1, 20)).tolist()
    scale = float(rng.choice([0.0, 0.5, 1.5, 2.0, 4.0, -1.0]))
    negative = rng.integers(0, size, rng.integers(0, 20)).tolist()
    return prompt, {"guidance_scale": scale, "negative_prompt": negative}


def generated(model: Any, prompt: list[int], fields: dict[str, Any], penalty: float) -> tuple[list[int], np.ndarray]:
    """The tokens of ``generate``, and the scores of each step."""
    negative = fields["negative_prompt"]
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        guidance_scale=fields["guidance_scale"],
        negative_prompt_ids=torch.tensor([negative]) if negative else None,
        repetition_penalty=penalty,
        max_new_tokens=LENGTH,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores).numpy()


def greedy(**fields: Any) -> nc.SamplingParams:
    return nc.SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, **fields)


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("size", SIZES)
def test_tokens_equal_generate(llm: nc.LLM, size: int) -> None:
    """All requests run together, with a repetition penalty in half of them."""
    rng, model = np.random.default_rng(size), model_of(size)
    cases = [(*random_case(rng, size), float(rng.choice([1.0, 1.3]))) for _ in range(tiers.count(12, 60))]
    engine = Engine(runner_of(TransformersModel.of(model), 1 << 20), llm.tokenizer, backend="reference")
    requests = [nc.Request(ids, greedy(repetition_penalty=penalty, **fields)) for ids, fields, penalty in cases]
    for (prompt, fields, penalty), events in zip(cases, drive(engine, requests), strict=True):
        assert tokens_of(events) == generated(model, prompt, fields, penalty)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_logits_equal_generate(size: int) -> None:
    rng, model = np.random.default_rng(size + 1), model_of(size)
    for _ in range(4):
        prompt, fields = random_case(rng, size)
        tokens, scores = generated(model, prompt, fields, 1.0)
        stage = Guidance(fields["guidance_scale"], tuple(fields["negative_prompt"]))
        own, other = prompt, [*stage.companion_prompt(prompt)]
        for token, expected in zip(tokens, scores, strict=True):
            with torch.inference_mode():
                rows = [model(torch.tensor([ids])).logits[0, -1] for ids in (own, other)]
            np.testing.assert_allclose(combine(stage, *(row.numpy() for row in rows)), expected, rtol=1e-4, atol=2e-4)
            np.testing.assert_allclose(combine(stage, *rows).numpy(), expected, rtol=1e-4, atol=2e-4)
            own, other = [*own, token], [*other, token]


def contrastive_tokens(expert: Any, amateur: Any, prompt: list[int], stage: Contrastive) -> list[int]:
    """Contrastive decoding in float64: the highest log p - beta log q of the tokens with p >= alpha max p."""
    ids = list(prompt)
    for _ in range(LENGTH):
        with torch.inference_mode():
            x, y = (model(torch.tensor([ids])).logits[0, -1].double() for model in (expert, amateur))
        p, q = x.softmax(-1), (y / stage.tau).softmax(-1)
        scores = torch.where(p >= stage.alpha * p.max(), p.log() - stage.beta * q.log(), -torch.inf)
        ids.append(int(scores.argmax()))
    return ids[len(prompt) :]


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("size", SIZES)
def test_contrastive_decoding_equals_its_definition(llm: nc.LLM, size: int) -> None:
    rng, expert, amateur = np.random.default_rng(size), model_of(size), model_of(size, 1, 16)
    runners = [runner_of(TransformersModel.of(model), 1 << 20) for model in (expert, amateur)]
    engine = Engine(runners[0], llm.tokenizer, companion_runner=runners[1], backend="reference")
    expected, requests = [], []
    for _ in range(tiers.count(8, 40)):
        prompt = rng.integers(0, size, rng.integers(1, 20)).tolist()
        stage = Contrastive(float(rng.choice([0.5, 1.0])), float(rng.choice([0.01, 0.1])), float(rng.choice([0.5, 1])))
        fields = {
            "contrastive_beta": stage.beta,
            "contrastive_alpha": stage.alpha,
            "contrastive_temperature": stage.tau,
        }
        requests.append(nc.Request(prompt, greedy(**fields)))
        expected.append(contrastive_tokens(expert, amateur, prompt, stage))
    assert [tokens_of(events) for events in drive(engine, requests)] == expected
