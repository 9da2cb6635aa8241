"""``CustomGenerate`` and ``SamplingLogitsProcessor`` in ``generate`` of Transformers: the tokens of ``LLM``."""

from __future__ import annotations

from typing import Any

import pytest

import nucleate as nc
from nucleate.models.loader import EMBEDDED

torch = pytest.importorskip("torch", reason="needs the extra 'torch'")
transformers = pytest.importorskip("transformers", reason="needs the extra 'torch'")
from random_models import CONFIGS, random_model  # noqa: E402

from nucleate.integrations.transformers import CustomGenerate, SamplingLogitsProcessor  # noqa: E402

PROMPTS = ["Once upon a time", "The fox", "A dog and a cat went to the market to", "The fox"]
PAD = 1
LENGTH = 12
SETTINGS: list[nc.SamplingParams] = [
    nc.SamplingParams(temperature=1.3, top_p=0.95, seed=7),
    nc.SamplingParams(temperature=0, repetition_penalty=1.3),
    nc.SamplingParams(temperature=0.9, top_k=40, min_p=0.01, dry_multiplier=0.8, seed=2**64 - 1, logprobs=2),
    nc.SamplingParams(mirostat_tau=3.0, frequency_penalty=0.4, bad_words=["the"], min_tokens=5, seed=3),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model().eval()


@pytest.fixture(scope="module")
def own(model: Any) -> nc.LLM:
    return nc.LLM(model, EMBEDDED)


def batch(llm: nc.LLM, prompts: list[str] = PROMPTS) -> dict[str, Any]:
    """The prompts with padding on the left."""
    ids = [llm.encode(prompt) for prompt in prompts]
    width = max(map(len, ids))
    rows = [[PAD] * (width - len(row)) + row for row in ids]
    masks = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks), "pad_token_id": PAD}


def outputs(completions: list[nc.Completion]) -> list[tuple[Any, ...]]:
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason)
        for completion in completions
        for one in completion.outputs
    ]


def run(model: Any, llm: nc.LLM, params: Any, prompts: list[str] = PROMPTS, **settings: Any) -> CustomGenerate:
    """Generate, and check that the sequences are those of the completions, with padding after them."""
    call = CustomGenerate(params, llm.tokenizer)
    given = batch(llm, prompts)
    found = model.generate(**given, custom_generate=call, **{"max_new_tokens": LENGTH, **settings})
    width = given["input_ids"].shape[1]
    sampled = [output.token_ids for completion in call.completions for output in completion.outputs]
    for row, tokens in zip(found[:, width:].tolist(), sampled, strict=True):
        assert row == [*tokens, *[PAD] * (len(row) - len(tokens))]
    return call


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_batch_with_parameters_per_row_gives_the_tokens_of_llm(name: str) -> None:
    model = random_model(name).eval()
    llm = nc.LLM(model, EMBEDDED)
    expected = llm.generate(PROMPTS, [params.override(max_tokens=LENGTH) for params in SETTINGS])
    call = run(model, llm, SETTINGS)
    assert outputs(call.completions) == outputs(expected)
    assert call.completions[0].outputs[0].seed == 7
    assert call.completions[2].outputs[0].logprobs is not None
    steps = zip(call.completions[2].outputs[0].logprobs, expected[2].outputs[0].logprobs or (), strict=True)
    assert all(abs(one.chosen.logprob - other.chosen.logprob) < 1e-3 for one, other in steps)


@pytest.mark.slow
def test_one_setting_for_all_rows_and_pipelines(model: Any, own: nc.LLM) -> None:
    stages = (nc.stages.Temperature(1.2), nc.stages.TopK(50), nc.stages.Gumbel(seed=5))
    for given in (SETTINGS[0], stages, [stages, *SETTINGS[1:]]):
        limited = [_limited(one) for one in given] if isinstance(given, list) else _limited(given)
        expected = own.generate(PROMPTS, limited)
        assert outputs(run(model, own, given).completions) == outputs(expected)


def _limited(given: Any) -> nc.SamplingParams:
    params = nc.SamplingParams(pipeline=given) if isinstance(given, tuple) else given
    return params.replace(max_tokens=LENGTH)


def test_stop_criteria_end_each_row(model: Any, own: nc.LLM) -> None:
    free = own.generate(PROMPTS, nc.SamplingParams(temperature=1.2, seed=4, max_tokens=LENGTH, ignore_eos=True))
    texts = [one.text for one in free]
    params = [
        nc.SamplingParams(temperature=1.2, seed=4, max_tokens=LENGTH, stop=[texts[0][6:9]]),
        nc.SamplingParams(temperature=1.2, seed=4, max_tokens=3),
        nc.SamplingParams(temperature=1.2, seed=4, max_tokens=LENGTH, stop_token_ids=[free[2].outputs[0].token_ids[4]]),
        nc.SamplingParams(temperature=1.2, seed=4, max_tokens=LENGTH, stop_regex=[r"\w+ \w"]),
    ]
    expected = own.generate(PROMPTS, params)
    assert len({len(one.outputs[0].token_ids) for one in expected}) > 1
    call = run(model, own, params)
    assert outputs(call.completions) == outputs(expected)
    assert call.completions[1].outputs[0].finish_reason == "length"


def test_eos_and_ignore_eos_per_row(model: Any, own: nc.LLM) -> None:
    wide = nc.SamplingParams(temperature=3.0, seed=1, max_tokens=LENGTH)
    first = own.generate("The fox", wide.replace(ignore_eos=True))[0].outputs[0].token_ids
    llm = nc.LLM(model, EMBEDDED)
    llm.tokenizer.eos_token_ids = frozenset({first[3], first[7]})
    params = [wide, wide.replace(ignore_eos=True), wide.replace(min_tokens=6)]
    prompts = ["The fox"] * 3
    expected = llm.generate(prompts, params)
    assert len(expected[0].outputs[0].token_ids) == 4
    call = run(model, llm, params, prompts, eos_token_id=[first[3], first[7]])
    assert outputs(call.completions) == outputs(expected)


def test_structured_output(model: Any, own: nc.LLM) -> None:
    pytest.importorskip("llguidance", reason="needs the extra 'structured'")
    params = [
        nc.SamplingParams(seed=1, max_tokens=LENGTH, structured_outputs={"choice": ["red fox", "blue dog"]}),
        nc.SamplingParams(seed=1, max_tokens=LENGTH, temperature=0),
    ]
    call = run(model, own, params, PROMPTS[:2])
    assert outputs(call.completions) == outputs(own.generate(PROMPTS[:2], params))
    assert call.completions[0].text in ("red fox", "blue dog")


def test_several_sequences_per_prompt_use_consecutive_seeds(model: Any, own: nc.LLM) -> None:
    expected = own.generate(PROMPTS[:2], nc.SamplingParams(temperature=1.1, seed=2**64 - 1, n=3, max_tokens=LENGTH))
    call = run(
        model,
        own,
        nc.SamplingParams(temperature=1.1, seed=2**64 - 1),
        PROMPTS[:2],
        num_return_sequences=3,
        do_sample=True,
    )
    assert outputs(call.completions) == outputs(expected)
    assert [output.seed for output in call.completions[0].outputs] == [2**64 - 1, 0, 1]


def test_scores_are_the_distributions_and_completions_come_with_the_result(model: Any, own: nc.LLM) -> None:
    params = nc.SamplingParams(temperature=0.8, top_k=5, seed=1)
    found = model.generate(
        **batch(own, PROMPTS[:2]), custom_generate=CustomGenerate(params), max_new_tokens=3,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    assert len(found.scores) == len(found.logits) == 3
    for logits, scores in zip(found.logits, found.scores, strict=True):
        assert torch.allclose(scores.exp().sum(-1), torch.ones(2))
        expected = nc.probabilities(logits, params)
        assert torch.allclose(scores.exp().double(), torch.as_tensor(expected), atol=1e-6)
        assert (scores.isfinite().sum(-1) == 5).all()
    assert [len(one.outputs[0].token_ids) for one in found.completions] == [3, 3]
    assert found.completions[0].text == ""  # without a tokenizer


def test_streamers_get_the_prompt_and_the_tokens(model: Any, own: nc.LLM) -> None:
    class Recorder(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.found: list[list[int]] = []
            self.ended = False

        def put(self, value: Any) -> None:
            self.found.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended = True

    recorder, given = Recorder(), batch(own, PROMPTS[:1])
    call = CustomGenerate(SETTINGS[0], streamer=recorder)
    out = model.generate(**given, custom_generate=call, max_new_tokens=4)
    assert recorder.found == [given["input_ids"][0].tolist(), *([token] for token in out[0, -4:].tolist())]
    assert recorder.ended


@pytest.mark.slow
def test_fields_that_are_not_set_come_from_the_generation_config(own: nc.LLM) -> None:
    model = random_model().eval()
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.2)
    llm = nc.LLM(model, EMBEDDED)
    for params in (nc.SamplingParams(seed=1), nc.SamplingParams(seed=1, temperature=1.5, top_k=0), None):
        seeded = nc.SamplingParams(seed=0, temperature=0) if params is None else params
        expected = llm.generate(PROMPTS, seeded.replace(max_tokens=LENGTH))
        assert outputs(run(model, llm, seeded).completions) == outputs(expected)
    plain, seeded = nc.LLM(model, EMBEDDED, generation_config="none"), nc.SamplingParams(seed=1)
    expected = plain.generate(
        PROMPTS, seeded.replace(max_tokens=LENGTH, temperature=0.9, top_k=20, repetition_penalty=1.2)
    )
    assert outputs(run(model, llm, seeded, temperature=0.9).completions) == outputs(expected)


def test_processors_of_the_caller_and_other_criteria_apply(model: Any, own: nc.LLM) -> None:
    class Ban(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores.index_fill(1, torch.arange(2000), -torch.inf)

    class Fourth(transformers.StoppingCriteria):  # type: ignore[misc]
        calls = 0

        def __call__(self, input_ids: Any, scores: Any, **settings: Any) -> Any:
            self.calls += 1
            return torch.tensor([self.calls == 4] + [False] * (len(input_ids) - 1))

    params = nc.SamplingParams(temperature=1.0, seed=3)
    call = run(model, own, params, logits_processor=[Ban()], stopping_criteria=[Fourth()])
    banned = params.replace(max_tokens=LENGTH, suppress_token_ids=range(2000))
    expected = own.generate(PROMPTS, banned)
    assert [one.outputs[0].token_ids for one in call.completions[1:]] == [
        one.outputs[0].token_ids for one in expected[1:]
    ]
    assert call.completions[0].outputs[0].token_ids == expected[0].outputs[0].token_ids[:4]
    assert call.completions[0].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("params", "settings", "field", "message"),
    [
        (None, {"num_beams": 2}, "num_beams", "samples one sequence per row: beam search is not supported"),
        (None, {"num_beams": 2, "do_sample": True}, "num_beams", "beam sample is not supported"),
        (None, {"prompt_lookup_num_tokens": 3}, "generation_config", "assisted generation is not supported"),
        ([SETTINGS[0]], {}, "sampling_params", "one per prompt; got 1 of them for 2 prompts"),
        (5, {}, "sampling_params", "sampling_params must be .*, got 5"),
        (nc.SamplingParams(n=2), {}, "n", "n must be 1: num_return_sequences"),
        (nc.SamplingParams(prompt_logprobs=1), {}, "prompt_logprobs", "prompt_logprobs needs LLM"),
        (nc.SamplingParams(stop=["x"]), {}, "stop", "stop needs the tokenizer"),
        (nc.SamplingParams(logit_bias={4096: 1.0}), {}, "logit_bias", "4096"),
    ],
)
def test_what_is_not_possible_is_an_error(
    params: Any, settings: dict[str, Any], field: str, message: str, model: Any, own: nc.LLM
) -> None:
    with pytest.raises(nc.ParameterError, match=message) as caught:
        model.generate(**batch(own, PROMPTS[:2]), custom_generate=CustomGenerate(params), max_new_tokens=3, **settings)
    assert caught.value.field == field


def test_invalid_logits_are_an_error_that_names_the_row(model: Any, own: nc.LLM) -> None:
    class Spoil(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores[1] = torch.nan
            return scores

    with pytest.raises(nc.LogitsError, match="row 1: invalid logits"):
        run(model, own, None, PROMPTS[:2], logits_processor=[Spoil()])


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_the_tokens_of_a_processor_are_those_of_llm(model: Any, own: nc.LLM, *, do_sample: bool, mask: bool) -> None:
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


def test_a_processor_ends_rows_by_their_own_stop_criteria(model: Any, own: nc.LLM) -> None:
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


def test_a_processor_rejects_beam_search(model: Any, own: nc.LLM) -> None:
    for prompts in (PROMPTS[:1], PROMPTS):
        processor = SamplingLogitsProcessor(SETTINGS[0], pad_token_id=PAD)
        with pytest.raises(nc.ParameterError, match="beam search and assisted decoding are not supported"):
            model.generate(**batch(own, prompts), max_new_tokens=5, num_beams=2, logits_processor=[processor])


def test_a_processor_rejects_assisted_decoding(model: Any, own: nc.LLM) -> None:
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
