"""Requests with guidance and contrastive decoding: the engine returns the reference loop's chunks; single cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from companion_requests import companion_chunks, weaker
from toy_models import PagedToy
from toy_requests import KINDS, SIZE, chunks_by_index, drive, is_empty, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.protocol import ModelError
from nucleate.outputs import Usage
from nucleate.sampling.stage import Combine, param
from nucleate.sampling.stages import STAGES
from nucleate.server.openai.fields import read_beams

GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)
GUIDED = GREEDY.replace(guidance_scale=2.0, negative_prompt=(3, 4, 5))
CONTRASTIVE = GREEDY.replace(contrastive_beta=1.0)


def engine_of(llm: nc.LLM, kind: str = "paged", blocks: int = 100, **options: Any) -> Engine:
    others = runner(kind, weaker(), blocks)
    return Engine(runner(kind, toy(), blocks), llm.tokenizer, companion_runner=others, backend="reference", **options)


def test_both_sequences_decode_in_one_forward_pass(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=10, max_num_seqs=10)
    [events] = drive(engine, [Request(range(1, 25), GUIDED)])
    sizes = [[stop - start for _, start, stop in forward] for forward in engine.runner.forwards]
    assert sizes == [[10], [10], [4, 3], *[[1, 1]] * 5]
    assert events[-1].usage == Usage(24, 6)
    assert engine.stats.computed_tokens == 24 + 3 + 10


def test_the_first_one_waits_with_its_last_token(llm: nc.LLM) -> None:
    engine = engine_of(llm, max_num_batched_tokens=8, max_num_seqs=4)
    drive(engine, [Request([9, 8, 7], GUIDED.replace(negative_prompt=range(1, 20)))])
    sizes = [[stop - start for _, start, stop in forward] for forward in engine.runner.forwards]
    assert sizes == [[2, 5], [7], [1, 7], *[[1, 1]] * 5]


def test_the_companion_model_computes_its_own_tokens(llm: nc.LLM) -> None:
    main, other = runner("paged", toy(), 100), runner("paged", weaker(), 100)
    engine = Engine(main, llm.tokenizer, companion_runner=other, backend="reference")
    drive(engine, [Request(range(1, 25), CONTRASTIVE), Request([5, 6], GREEDY)])
    assert isinstance(main, PagedToy)
    assert isinstance(other, PagedToy)
    assert [len(forward) for forward in main.forwards] == [2] * 6
    assert [len(forward) for forward in other.forwards] == [1] * 6
    plain = Engine(runner("paged", toy(), 100), llm.tokenizer, companion_runner=other, backend="reference")
    drive(plain, [Request(range(1, 25), GREEDY), Request([5, 6], GUIDED)])
    assert len(other.forwards) == 6  # not used without contrastive decoding


@pytest.mark.parametrize("params", [GUIDED, CONTRASTIVE], ids=["guided", "contrastive"])
def test_outputs_share_the_prompts_of_sequence_and_companion(llm: nc.LLM, params: nc.SamplingParams) -> None:
    engine = engine_of(llm)
    request = Request(range(1, 23), params.replace(n=4, temperature=1.0, negative_prompt=range(30, 49)))
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 4) == companion_chunks(toy(), llm.tokenizer, request)
    computed = engine.stats.computed_tokens
    companion = 22 if params is CONTRASTIVE else 19
    cached = 3 * (20 + (20 if params is CONTRASTIVE else 16))
    assert computed == 4 * (22 + companion) - cached + 4 * 2 * 5
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (4 * (22 + companion), cached)


def test_prefixes_of_the_two_models_are_not_confused(llm: nc.LLM) -> None:
    engine = engine_of(llm)
    for params in (GREEDY, CONTRASTIVE, GREEDY, GUIDED.replace(negative_prompt=range(1, 23)), CONTRASTIVE):
        request = Request(range(1, 23), params)
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == companion_chunks(toy(), llm.tokenizer, request)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("raises", [True, False])
def test_a_failure_for_the_companion_ends_only_its_request(llm: nc.LLM, kind: str, raises: bool) -> None:
    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if seen[0] != 3 or len(seen) <= 4:
            return toy().rule(seen)
        if raises:
            raise RuntimeError("a kernel\nhas failed")
        return np.full(SIZE, np.nan, np.float32)

    engine = Engine(runner(kind, toy(of=fails), 100), llm.tokenizer, backend="reference")
    requests = [Request([8, 1], GREEDY), Request([9, 1], GUIDED), Request([7, 1], GUIDED.replace(negative_prompt=[4]))]
    found = drive(engine, requests)
    reason = "the model failed: a kernel has failed" if raises else "invalid logits: NaN"
    assert str(found[1][-1].chunk.stop_reason).startswith(reason)
    for index in (0, 2):
        assert chunks_by_index(found[index], 1) == reference_chunks(toy(), llm.tokenizer, requests[index])
    assert is_empty(engine)


class Halved(Combine):
    """Average the log-probabilities after the prompt and after its first token."""

    on: bool = param("Enabled", neutral=False, name="halved")
    fails: bool = param("Whether the rule raises", default=False, name="halved_fails")

    def companion_prompt(self, prompt_ids: Any) -> Any:
        return prompt_ids[:1]

    def apply(self, x: Any, other: Any) -> Any:
        if self.fails:
            raise OSError("no row")
        return (x + other) / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_of_a_user_combines_rows(llm: nc.LLM, kind: str) -> None:
    assert "halved" not in STAGES  # it need not be registered
    requests = [
        Request([9, 8, 7], nc.SamplingParams(pipeline=(Halved(on=True),), max_tokens=9, seed=3, n=2)),
        Request([9, 8, 7], nc.SamplingParams(pipeline=(Halved(on=True, fails=True),), max_tokens=9, seed=3)),
        Request([4, 5], GREEDY),
    ]
    found = drive(engine := engine_of(llm, kind), requests)
    for index in (0, 2):
        expected = companion_chunks(toy(), llm.tokenizer, requests[index])
        assert chunks_by_index(found[index], requests[index].params.n) == expected
    assert found[1][-1].chunk.stop_reason == "OSError: no row"
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("options", "request_", "field", "words"),
    [
        ({"max_num_seqs": 1}, Request([1], GUIDED), "guidance_scale", "runs two sequences at a time"),
        ({"companion_runner": None}, Request([1], CONTRASTIVE), "contrastive_beta", "needs a companion model"),
        ({}, Request([1], GUIDED.replace(negative_prompt=[SIZE])), "negative_prompt", f"names token {SIZE}"),
        ({}, Request([1], GUIDED.replace(negative_prompt=[1] * 256)), "negative_prompt", "has 256 tokens, but"),
        ({}, Request([1] * 240, CONTRASTIVE), "prompt", "the companion model's context holds 230"),
        ({"blocks": 40}, Request([1] * 100, GUIDED.replace(negative_prompt=[1] * 70)), "negative_prompt", "KV cache"),
        ({}, Request([1] * 200, CONTRASTIVE.replace(max_tokens=None, min_tokens=40)), "prompt", "holds 230"),
    ],
)
def test_a_request_that_cannot_run_is_an_error(
    llm: nc.LLM, options: dict[str, Any], request_: Request, field: str, words: str
) -> None:
    blocks = options.pop("blocks", 100)
    options = {"companion_runner": runner("paged", weaker(), blocks), **options}
    engine = Engine(runner("paged", toy(), blocks), llm.tokenizer, backend="reference", **options)
    with pytest.raises(nc.ParameterError, match=words) as caught:
        engine.add(request_)
    assert caught.value.field == field
    assert is_empty(engine)


def test_a_pair_that_fills_the_kv_cache_ends_with_length(llm: nc.LLM) -> None:
    engine = engine_of(llm, blocks=10)  # of 4 tokens
    request = Request([1, 2, 3], GUIDED.replace(max_tokens=None, negative_prompt=[7] * 6))
    [events] = drive(engine, [request])
    assert events[-1].chunk.finish_reason == "length"
    assert events[-1].usage == Usage(3, 14)  # 17 and 20 tokens
    assert engine.stats.num_preemptions == 0


def test_the_companion_model_needs_the_same_vocabulary_and_blocks(llm: nc.LLM) -> None:
    for other, words in ((PagedToy(toy(), 10, 8), "block size"), (PagedToy(toy(), 10, 4), "vocabulary")):
        other.vocab_size = SIZE - (words == "vocabulary")
        with pytest.raises(ModelError, match=f"the companion model needs the {words} of the model"):
            Engine(runner("paged", toy()), llm.tokenizer, companion_runner=other)


def test_beam_search_rejects_guidance(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="guidance_scale"):
        llm.beam_search("Once", guidance_scale=2.0)
    body = {"use_beam_search": True, "guidance_scale": 2.0}
    with pytest.raises(nc.ParameterError, match="guidance_scale is not supported with use_beam_search"):
        read_beams(body, nc.SamplingParams(guidance_scale=2.0), best_of=4, stream=False, echo=False)


def test_logits_may_be_tensors_of_inference_mode(llm: nc.LLM) -> None:
    """As on a GPU: such tensors cannot be changed in place. The companion model may return NumPy arrays."""
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

    class Tensors(PagedToy):
        def forward(self, parts: Any) -> Any:
            with torch.inference_mode():
                return torch.from_numpy(super().forward(parts))

    requests = [Request([9, 8, 7], GUIDED), Request([4, 5], CONTRASTIVE), Request([4, 5], GREEDY)]
    for kind in (PagedToy, Tensors):
        others = kind(weaker(), 100, 4)
        engine = Engine(Tensors(toy(), 100, 4), llm.tokenizer, companion_runner=others, backend="reference")
        for request, events in zip(requests, drive(engine, requests), strict=True):
            tokens = [token for event in events for token in event.chunk.token_ids]
            [expected] = companion_chunks(toy(), llm.tokenizer, request)
            assert tokens == [token for chunk in expected for token in chunk.token_ids]
