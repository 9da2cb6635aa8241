"""Drafts that meet stop criteria, histories and grammars: single cases for every acceptance rule."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_proposers import Silent
from toy_requests import SIZE, alone, answers, drive, is_empty, runner, toy
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


class Once(Silent):
    """One draft, after the first token."""

    def __init__(self, once: Draft) -> None:
        super().__init__()
        self.once, self.told = once, []

    def draft(self, state: DraftContext, count: int) -> Draft:
        return self.once if state.position == 1 else Draft()

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        self.told.append(count)


def engine_of(llm: nc.LLM, once: Draft, says: Callable[[tuple[int, ...]], np.ndarray], rule: str) -> Engine:
    asked = Speculation(lambda: Once(once), 12, rule, adaptive=False, tree_width=3)
    return Engine(runner("paged", toy(of=says), 64), llm.tokenizer, speculative_config=asked, backend="reference")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("stop", [{"stop_token_ids": [5]}, {"stop": "f"}, {"max_tokens": 4}])
@pytest.mark.parametrize("past", [0, 1, 3])
def test_stop_within_a_draft(llm: nc.LLM, rule: str, tree: bool, stop: dict, past: int) -> None:
    """With its last token, whatever was drafted after it: even where nothing can be drawn there, as it is not to be."""
    ids = [llm.tokenizer.encode("x" + letter, add_special_tokens=False)[-1] for letter in "cdefghij"]
    if "stop_token_ids" in stop:
        stop = {"stop_token_ids": [ids[3]]}

    def says(seen: tuple[int, ...]) -> np.ndarray:
        if len(seen) > 4 and not past:
            return np.full(SIZE, np.nan, np.float32)
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[ids[len(seen) - 1]] = 50
        return logits_V

    draft = Draft(tuple(ids[1 : 4 + past]))
    if tree:
        draft = Draft((7, *draft.tokens), (ROOT, ROOT, *range(1, len(draft))))
    request = Request([1], nc.SamplingParams(**{"temperature": 0, "max_tokens": 8, "seed": 1, **stop}))
    engine = engine_of(llm, draft, says, rule)
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(of=says), llm.tokenizer, request)
    assert events[-1].chunk.finish_reason == ("length" if "max_tokens" in stop else "stop")
    assert events[-1].usage.completion_tokens == engine.stats.sampled_tokens == 4
    kept = 0 if tree and rule == "block" else 2  # that reads the first branch; the last token counts as drawn
    figures = engine.stats.speculative
    assert figures.accepted_tokens == sum(figures.accepted_tokens_per_position) == kept
    assert engine.stats.num_steps == 4 - kept
    assert is_empty(engine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", [{"presence_penalty": 2.0}, {"no_repeat_ngram_size": 2}, {"dry_multiplier": 50.0}])
def test_each_branch_has_its_own_history(llm: nc.LLM, rule: str, values: dict[str, float]) -> None:
    """What stands on another branch was not said: here these are the very tokens that come next."""

    def says(seen: tuple[int, ...]) -> np.ndarray:
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[[seen[-1] + 1, seen[-1] + 2]] = 9.0, 8.0
        return logits_V

    said = [21, 22, 23, 24, 25, 26]
    tree = Draft((23, 24, 25, 26, *said[1:]), (ROOT, ROOT, 0, 1, ROOT, 4, 5, 6, 7))
    request = Request([20], nc.SamplingParams(temperature=0, max_tokens=7, seed=1, **values))
    engine = engine_of(llm, tree, says, rule)
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(of=says), llm.tokenizer, request)
    assert [event.chunk.token_ids[0] for event in events] == [*said, 27]
    assert engine.stats.speculative.accepted_tokens == (0 if rule == "block" else 5)


@pytest.mark.parametrize("rule", RULES)
def test_processed_logprobs_with_a_grammar(llm: nc.LLM, rule: str) -> None:
    """Such a pipeline has a place for masks of its own, which stays."""
    params = nc.SamplingParams(
        seed=1,
        max_tokens=12,
        logprobs=2,
        logprobs_mode="processed",
        structured_outputs=nc.StructuredOutputs(regex="[a-z ]{5,30}"),
    )
    law_V = np.full(SIZE, 1 / SIZE)
    engine = engine_of(llm, Draft((7, 8), None, (law_V, law_V)), toy_rule, rule)
    [events] = drive(engine, [Request([1, 2], params)])
    assert events[-1].chunk.finish_reason in ("stop", "length")
    for event in events:
        assert [told.chosen.token_id for told in event.chunk.logprobs] == [*event.chunk.token_ids]
    assert is_empty(engine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", [0, 1])
def test_failed_grammar_ends_only_its_sequence(
    llm: nc.LLM, monkeypatch: pytest.MonkeyPatch, rule: str, when: int
) -> None:
    """Before a draft is asked for, and after it was found to be allowed: a copy shares the time that there is."""
    times, copied = 0, GrammarMatcher.copy

    def copy(self: GrammarMatcher) -> GrammarMatcher:
        nonlocal times
        times += 1
        if times > when:
            self._error = "it took too long"
        return copied(self)

    monkeypatch.setattr(GrammarMatcher, "copy", copy)
    law_V = np.full(SIZE, 1 / SIZE)
    engine = engine_of(llm, Draft((7, 8), None, (law_V, law_V)), toy_rule, rule)
    forms = [nc.SamplingParams(seed=1, max_tokens=12, structured_outputs=nc.StructuredOutputs(regex="[a-z ]{25,30}"))]
    events, others = drive(engine, [Request([1, 2], forms[0]), Request([3], nc.SamplingParams(seed=2, max_tokens=5))])
    if rule != "coupled" or not when:
        assert events[-1].chunk.finish_reason == "error"
        assert (
            events[-1].chunk.stop_reason
            == "the output cannot satisfy its structured-output constraint: it took too long"
        )
    assert others[-1].chunk.finish_reason in ("stop", "length")
    assert is_empty(engine)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize(("forced", "kept"), [((), 3), ((22,), 3), ((33,), 1), ((33, 34), 1), ((22, 33, 34), 2)])
def test_jump_forward_tokens_within_a_draft(rule: str, forced: tuple[int, ...], kept: int) -> None:
    """What was read of other tokens is of no use. forced: after the first token that was drafted."""
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

    def accept(_: Any, token: int, __: Any) -> None:
        ids.extend((token, *forced) if len(ids) == 1 else (token,))

    step: Any = SimpleNamespace(logits=logits, accept=accept)
    one = ScheduledSequence(sequence, 0, 1, last=True, draft=draft, logits_row=0)
    assert verify_by_rule(one, step, sampler, rule) == (0, 1, 2)[:kept]
    assert ids[: 1 + kept] == [20, 21, 22, 23][: 1 + kept]
