"""``SamplingLogitsProcessor`` in the loops of ``generate``, with and without its stop criteria."""

from __future__ import annotations

from typing import Any

import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
from random_models import random_model  # noqa: E402
from test_custom_generate import LENGTH, PAD, PROMPTS, SETTINGS, batch, outputs  # noqa: E402

from nucleate.integrations.transformers import SamplingLogitsProcessor  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model().eval()


@pytest.fixture(scope="module")
def own(model: Any) -> nc.LLM:
    return nc.LLM(model, EMBEDDED)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_the_tokens_are_those_of_llm(model: Any, own: nc.LLM, *, do_sample: bool, mask: bool) -> None:
    given = batch(own)
    shared = {"attention_mask": given["attention_mask"]} if mask else {"pad_token_id": PAD}
    processor = SamplingLogitsProcessor(SETTINGS, own.tokenizer, **shared, **({"pad_token_id": PAD} if mask else {}))
    out = model.generate(
        **given, max_new_tokens=LENGTH, do_sample=do_sample, top_k=0, logits_processor=[processor],
        stopping_criteria=[processor.stopping_criteria],
    )  # fmt: skip
    expected = own.generate(PROMPTS, [params.override(max_tokens=LENGTH) for params in SETTINGS])
    assert outputs(processor.completions) == outputs(expected)
    for row, completion in zip(out[:, given["input_ids"].shape[1] :].tolist(), expected, strict=True):
        tokens = completion.outputs[0].token_ids
        assert row == [*tokens, *[PAD] * (len(row) - len(tokens))]


def test_rows_end_by_their_own_stop_criteria(model: Any, own: nc.LLM) -> None:
    free = own.generate(PROMPTS, temperature=1.2, seed=4, max_tokens=LENGTH, ignore_eos=True)
    params = [nc.SamplingParams(temperature=1.2, seed=4, stop=[one.text[7:9]], max_tokens=LENGTH) for one in free]
    processor = SamplingLogitsProcessor(params, own.tokenizer, pad_token_id=PAD)
    model.generate(
        **batch(own), max_new_tokens=LENGTH, logits_processor=[processor],
        stopping_criteria=[processor.stopping_criteria],
    )  # fmt: skip
    assert outputs(processor.completions) == outputs(own.generate(PROMPTS, params))


def test_rows_that_generate_ends(model: Any, own: nc.LLM) -> None:
    """Without our criteria, and with an EOS that the processor does not know."""
    params = nc.SamplingParams(temperature=1.2, seed=4, ignore_eos=True, max_tokens=LENGTH)
    tokens = [one.outputs[0].token_ids for one in own.generate(PROMPTS, params)]
    eos, processor = tokens[0][3], SamplingLogitsProcessor(params, pad_token_id=PAD)
    model.generate(**batch(own), max_new_tokens=LENGTH, logits_processor=[processor], eos_token_id=eos)
    ends = [row.index(eos) + 1 if eos in row else LENGTH for row in tokens]
    found = [one.outputs[0].token_ids for one in processor.completions]
    assert found == [row[:end] for row, end in zip(tokens, ends, strict=True)]
    unknowing = SamplingLogitsProcessor(params)
    with pytest.raises(nc.ParameterError, match="pass pad_token_id"):
        model.generate(**batch(own), max_new_tokens=LENGTH, logits_processor=[unknowing], eos_token_id=eos)


def test_a_processor_serves_one_call(model: Any, own: nc.LLM) -> None:
    processor = SamplingLogitsProcessor(SETTINGS[0], pad_token_id=PAD)
    model.generate(**batch(own), max_new_tokens=3, logits_processor=[processor])
    with pytest.raises(nc.ParameterError, match="is for one call of generate"):
        model.generate(**batch(own), max_new_tokens=3, logits_processor=[processor])


def test_beam_search_is_an_error(model: Any, own: nc.LLM) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        processor = SamplingLogitsProcessor(SETTINGS[0], pad_token_id=PAD)
        with pytest.raises(nc.ParameterError, match="beam search and assisted decoding are not supported"):
            model.generate(**batch(own, prompts), max_new_tokens=5, num_beams=2, logits_processor=[processor])


def test_assisted_decoding_is_an_error(model: Any, own: nc.LLM) -> None:
    for settings in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": random_model("llama").eval()}):
        processor = SamplingLogitsProcessor(SETTINGS[0], pad_token_id=PAD)
        given = batch(own, ["the fox and the fox and the fox and the"])
        with pytest.raises(nc.ParameterError, match="beam search and assisted decoding are not supported"):
            model.generate(**given, max_new_tokens=20, logits_processor=[processor], **settings)


def test_a_processor_after_it_that_changes_the_token_is_an_error(model: Any, own: nc.LLM) -> None:
    class Other(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores.roll(1, -1)

    processor = SamplingLogitsProcessor(SETTINGS[0], pad_token_id=PAD)
    with pytest.raises(nc.ParameterError, match="must be its last processor"):
        model.generate(**batch(own), max_new_tokens=5, logits_processor=[processor, Other()])


def test_a_mask_of_another_shape(model: Any, own: nc.LLM) -> None:
    processor = SamplingLogitsProcessor(SETTINGS[0], attention_mask=torch.ones(4, 3))
    with pytest.raises(nc.ParameterError, match=r"attention_mask must have the shape of the prompts, got \[4, 3\] for"):
        model.generate(**batch(own), max_new_tokens=5, logits_processor=[processor])
