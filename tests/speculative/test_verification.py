"""Drafts that meet stop criteria, histories and grammars: single cases for every acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_proposers import NoDrafts
from toy_requests import SIZE, chunks_by_index, drive, is_empty, reference_chunks, runner, toy
from toy_requests import rule as toy_rule

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.engine.scheduler import ScheduledSequence
from nucleate.engine.verification import verify_by_rule
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import ROOT, Draft, DraftContext
from nucleate.structured_output import GrammarMatcher

RULES = ("coupled", "rejection", "block", "typical")


class Once(NoDrafts):
    """One draft, after the first token."""

    def __init__(self, once: Draft) -> None:
        super().__init__()
        self.once = once

    def draft(self, state: DraftContext, count: int) -> Draft:
        return self.once if state.position == 1 else Draft()


def engine_of(llm: nc.LLM, once: Draft, scripted: Callable[[tuple[int, ...]], np.ndarray], rule: str) -> Engine:
    config = Speculation(lambda: Once(once), 12, rule, adaptive=False, tree_width=3)
    return Engine(runner("paged", toy(of=scripted), 64), llm.tokenizer, speculative_config=config, backend="reference")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("stop", [{"stop_token_ids": [5]}, {"stop": "f"}, {"max_tokens": 4}])
@pytest.mark.parametrize("past", [0, 1, 3])
def test_stop_within_a_draft(llm: nc.LLM, rule: str, tree: bool, stop: dict, past: int) -> None:
    """Draft tokens after the stop have no effect, even where nothing could be sampled."""
    ids = [llm.tokenizer.encode("x" + letter, add_special_tokens=False)[-1] for letter in "cdefghij"]
    if "stop_token_ids" in stop:
        stop = {"stop_token_ids": [ids[3]]}

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        if len(seen) > 4 and not past:
            return np.full(SIZE, np.nan, np.float32)
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[ids[len(seen) - 1]] = 50
        return logits_V

    draft = Draft(tuple(ids[1 : 4 + past]))
    if tree:
        draft = Draft((7, *draft.tokens), (ROOT, ROOT, *range(1, len(draft))))
    request = Request([1], nc.SamplingParams(**{"temperature": 0, "max_tokens": 8, "seed": 1, **stop}))
    engine = engine_of(llm, draft, scripted, rule)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(of=scripted), llm.tokenizer, request)
    assert events[-1].chunk.finish_reason == ("length" if "max_tokens" in stop else "stop")
    assert events[-1].usage.completion_tokens == engine.stats.sampled_tokens == 4
    accepted = 0 if tree and rule == "block" else 2  # which verifies the first branch; the last token counts as sampled
    stats = engine.stats.speculative
    assert stats.accepted_tokens == sum(stats.accepted_tokens_per_position) == accepted
    assert engine.stats.num_steps == 4 - accepted
    assert is_empty(engine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", [{"presence_penalty": 2.0}, {"no_repeat_ngram_size": 2}, {"dry_multiplier": 50.0}])
def test_each_branch_has_its_own_history(llm: nc.LLM, rule: str, values: dict[str, float]) -> None:
    """Tokens of other branches are not in the history. Here they are the next correct tokens."""

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[[seen[-1] + 1, seen[-1] + 2]] = 9.0, 8.0
        return logits_V

    ids = [21, 22, 23, 24, 25, 26]
    tree = Draft((23, 24, 25, 26, *ids[1:]), (ROOT, ROOT, 0, 1, ROOT, 4, 5, 6, 7))
    request = Request([20], nc.SamplingParams(temperature=0, max_tokens=7, seed=1, **values))
    engine = engine_of(llm, tree, scripted, rule)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(of=scripted), llm.tokenizer, request)
    assert [event.chunk.token_ids[0] for event in events] == [*ids, 27]
    assert engine.stats.speculative.accepted_tokens == (0 if rule == "block" else 5)


@pytest.mark.parametrize("rule", RULES)
def test_processed_logprobs_with_a_grammar(llm: nc.LLM, rule: str) -> None:
    """The mask keeps its position in the pipeline."""
    params = nc.SamplingParams(
        seed=1,
        max_tokens=12,
        logprobs=2,
        logprobs_mode="processed",
        structured_outputs=nc.StructuredOutputs(regex="[a-z ]{5,30}"),
    )
    distribution_V = np.full(SIZE, 1 / SIZE)
    engine = engine_of(llm, Draft((7, 8), None, (distribution_V, distribution_V)), toy_rule, rule)
    [events] = drive(engine, [Request([1, 2], params)])
    assert events[-1].chunk.finish_reason in ("stop", "length")
    for event in events:
        assert [step.chosen.token_id for step in event.chunk.logprobs] == [*event.chunk.token_ids]
    assert is_empty(engine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", [0, 1])
def test_failed_grammar_ends_only_its_sequence(
    llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, rule: str, when: int
) -> None:
    """Before a draft is proposed, and after it passed the filter: a copy shares the time budget."""
    times, copied = 0, GrammarMatcher.copy

    def copy(self: GrammarMatcher) -> GrammarMatcher:
        nonlocal times
        times += 1
        if times > when:
            self._error = "it took too long"
        return copied(self)

    monkeypatch.setattr(GrammarMatcher, "copy", copy)
    distribution_V = np.full(SIZE, 1 / SIZE)
    engine = engine_of(llm, Draft((7, 8), None, (distribution_V, distribution_V)), toy_rule, rule)
    params = [nc.SamplingParams(seed=1, max_tokens=12, structured_outputs=nc.StructuredOutputs(regex="[a-z ]{25,30}"))]
    events, others = drive(engine, [Request([1, 2], params[0]), Request([3], nc.SamplingParams(seed=2, max_tokens=5))])
    if rule != "coupled" or not when:
        assert events[-1].chunk.finish_reason == "error"
        assert (
            events[-1].chunk.stop_reason
            == "the output cannot satisfy its structured-output constraint: it took too long"
        )
    assert others[-1].chunk.finish_reason in ("stop", "length")
    assert is_empty(engine)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize(("forced", "accepted"), [((), 3), ((22,), 3), ((33,), 1), ((33, 34), 1), ((22, 33, 34), 2)])
def test_jump_forward_tokens_within_a_draft(rule: str, forced: tuple[int, ...], accepted: int) -> None:
    """Logits computed after other tokens are discarded. forced: tokens forced after the first draft token."""
    draft, ids, sampler = Draft((21, 22, 23)), [20], Sampler(SIZE, "reference")
    logits = np.zeros((4, SIZE), np.float32)
    logits[range(4), range(21, 25)] = 50.0
    sequence: Any = SimpleNamespace(
        row=sampler.add(nc.SamplingParams(temperature=0.0), [20]),
        token_ids=ids,
        running=SimpleNamespace(request=SimpleNamespace(prompt_ids=(20,))),
        processor=SimpleNamespace(guide=None, seed=1),
        done=False,
    )

    def accept(_: Any, token: int, *__: Any) -> None:
        ids.extend((token, *forced) if len(ids) == 1 else (token,))

    token_sampler: Any = SimpleNamespace(accept=accept)
    one = ScheduledSequence(sequence, 0, 1, last=True, draft=draft, logits_row=0)
    assert verify_by_rule(one, logits, token_sampler, sampler, rule) == (0, 1, 2)[:accepted]
    assert ids[: 1 + accepted] == [20, 21, 22, 23][: 1 + accepted]
