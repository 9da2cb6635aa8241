"""The engine beside its slow twin: the same pieces, whoever else is in the batch."""

from __future__ import annotations

import random

import pytest
from toy_requests import KINDS, alone, answers, drive, is_empty, random_request, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.outputs import Usage


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("blocks", [64, 500])
def test_pieces_are_those_of_the_slow_twin(llm: nc.LLM, kind: str, options: dict, blocks: int) -> None:
    rng = random.Random(f"{kind}{options}{blocks}")
    requests = [random_request(rng) for _ in range(25)]
    model = toy()
    engine = Engine(runner(kind, model, blocks), llm.tokenizer, **options, backend="reference")
    for request, events in zip(requests, drive(engine, requests), strict=True):
        wanted = alone(model, llm.tokenizer, request)
        assert answers(events, request.params.n) == wanted
        written = sum(len(piece.token_ids) for pieces in wanted for piece in pieces)
        assert [event.usage for event in events if event.finished] == [Usage(len(request.prompt_ids), written)]
        assert events[-1].finished
    assert is_empty(engine)
    if blocks == 64 and kind != "contexts" and not options:
        assert engine.stats.num_preemptions  # or the test would show less than it says
