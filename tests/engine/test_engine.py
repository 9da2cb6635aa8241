"""The engine returns the same chunks as the reference loop, whatever else is in the batch."""

from __future__ import annotations

import random

import pytest
from toy_requests import KINDS, chunks_by_index, drive, is_empty, random_request, reference_chunks, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.outputs import Usage


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("blocks", [64, 500])
def test_chunks_equal_the_reference(llm: nc.LLM, kind: str, options: dict, blocks: int) -> None:
    rng = random.Random(f"{kind}{options}{blocks}")
    requests = [random_request(rng) for _ in range(25)]
    model = toy()
    engine = Engine(runner(kind, model, blocks), llm.tokenizer, **options, backend="reference")
    for request, events in zip(requests, drive(engine, requests), strict=True):
        expected = reference_chunks(model, llm.tokenizer, request)
        assert chunks_by_index(events, request.params.n) == expected
        written = sum(len(chunk.token_ids) for chunks in expected for chunk in chunks)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
        assert events[-1].finished
    assert is_empty(engine)
    if blocks == 64 and kind != "contexts" and not options:
        assert engine.stats.num_preemptions  # the test must include preemption
