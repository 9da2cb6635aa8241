"""``Speculation`` configurations, and single cases of speculative decoding in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripted_proposers import NoDrafts, Oracle
from toy_models import PagedToy, Toy
from toy_requests import SIZE, chunks_by_index, drive, is_empty, reference_chunks, rule, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.protocol import ModelError
from nucleate.outputs import SpeculativeStats
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.config import ACCEPTANCE_RULES, METHODS, Speculation
from nucleate.speculative.draft import ROOT, Draft, DraftContext, truncate
from nucleate.speculative.ngram import NgramProposer

GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)


class Fixed(NoDrafts):
    """Always proposes the same tokens."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.states: list[DraftContext] = []
        self.accepted_counts: list[int] = []

    def draft(self, state: DraftContext, count: int) -> Draft:
        self.states.append(state)
        return Draft(self.tokens)

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        self.accepted_counts.append(count)


def engine_of(
    llm: nc.LLM, proposer: Any, tokens: int = 4, of: Any = rule, rule_name: str = "coupled", **more: Any
) -> Any:
    config = Speculation(lambda: proposer, tokens, rule_name, adaptive=False)
    made = {"blocks": 100, **more}
    return Engine(runner("paged", toy(of=of), made.pop("blocks")), llm.tokenizer, speculative_config=config, **made)


# the limit


@pytest.mark.parametrize("adaptive", [False, True])
def test_objects_that_are_no_proposers(adaptive: bool) -> None:
    with pytest.raises(nc.ParameterError, match="a proposer has layers and the methods of Proposer, got None"):
        Speculation(lambda: None, adaptive=adaptive).create_proposer()  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"method": "none"},
            "method must be one of ngram, suffix, draft, medusa, eagle, dflash, mtp, got 'none'",
        ),
        ({"method": 3}, "method must be one of"),
        (
            {"acceptance_rule": "greedy"},
            "acceptance_rule must be one of coupled, rejection, block, typical, got 'greedy'",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer in 1..64, got 0"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be an integer in 1..64, got 65"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens must be an integer in 1..64, got True"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens must be an integer in 1..64, got 2.0"),
        ({"tree_width": 0}, "tree_width must be an integer in 1..64, got 0"),
        ({"tree_width": 65, "method": "suffix"}, "tree_width must be an integer in 1..64, got 65"),
        ({"tree_width": True}, "tree_width must be an integer in 1..64, got True"),
        ({"tree_width": 2}, "tree_width must be 1 for the method 'ngram', got 2; only suffix, medusa, eagle propose"),
        ({"adaptive": 1}, "adaptive must be True or False, got 1"),
    ],
)
def test_invalid_configurations(values: dict[str, Any], message: str) -> None:
    with pytest.raises(nc.ParameterError) as caught:
        Speculation(**values)
    assert str(caught.value).endswith(message) or message in str(caught.value)
    assert caught.value.field == "speculative_config"


def test_valid_configurations() -> None:
    assert Speculation.of(None) is None
    assert Speculation.of("suffix") == Speculation("suffix", 4, "coupled", adaptive=True)
    config = Speculation(NgramProposer, adaptive=False)
    assert Speculation.of(config) is config
    assert type(config.create_proposer()) is NgramProposer
    assert config.create_proposer() is not config.create_proposer()
    assert type(Speculation("ngram").create_proposer()) is AdaptiveProposer
    assert Speculation.of({"method": "suffix", "num_speculative_tokens": 7}) == Speculation("suffix", 7)
    with pytest.raises(nc.ParameterError, match="unknown parameter 'num_speculative_token'; did you mean num_specu"):
        Speculation.of({"num_speculative_token": 7})
    with pytest.raises(nc.ParameterError, match="must be a method, a Speculation, a mapping of its fields or None"):
        Speculation.of(4)
    with pytest.raises(nc.ParameterError, match="'eagle' needs the weights of a model"):
        Speculation("eagle").create_proposer()
    assert len({*METHODS, *ACCEPTANCE_RULES}) == 11


def test_unbatched_models_are_rejected(llm: nc.LLM) -> None:
    with pytest.raises(nc.ParameterError, match="needs a model that runs batched"):
        Engine(runner("contexts", toy()), llm.tokenizer, speculative_config="ngram")


def test_draft_weights_of_another_model(llm: nc.LLM) -> None:
    with pytest.raises(ModelError):
        Speculation("medusa").bind_model(toy())


def test_llm_with_speculation() -> None:
    llm = nc.LLM(speculative_config=Speculation("suffix", adaptive=False))
    engine = llm.new_engine()
    text = "the cat and the dog and the cat and the dog and the cat and"
    params = GREEDY.replace(max_tokens=30)
    engine.add(Request(llm.encode(text), params))
    while len(engine):
        engine.step()
    assert engine.stats.speculative.draft_tokens > 0
    assert llm.new_engine(speculative_config=None).stats.speculative == SpeculativeStats()
    assert llm.generate(text, params) == nc.LLM().generate(text, params)
    with pytest.raises(nc.ParameterError, match="method must be one of"):
        nc.LLM(speculative_config="sufix")


# draft lengths


def test_chains_use_the_first_branch() -> None:
    tree = Draft((1, 2, 3, 4, 5), (ROOT, ROOT, 0, 0, 2), (None, None, *[np.ones(1)] * 3))
    found = truncate(tree, 1, 9, 9)
    assert found.tokens == (1, 3, 5)
    assert found.parents is None
    assert found.distributions[0] is None
    assert truncate(found, 1, 9, 9) is found
    assert truncate(Draft(), 1, 9, 9).tokens == ()


def test_draft_contexts(llm: nc.LLM) -> None:
    """A context has the tokens so far, the prompt length, the seed and the temperature."""
    proposer = Fixed()
    engine = engine_of(llm, proposer)
    cool = Request([7, 8], GREEDY.replace(temperature=0.3, seed=5, n=2))
    drive(engine, [Request([4, 5, 6], GREEDY), cool, Request([9], GREEDY.replace(temperature=2.0, top_k=1))])
    seen = {(state.num_prompt_tokens, state.seed, state.temperature, state.shared_noise) for state in proposer.states}
    assert seen == {(3, 1, 0.0, True), (2, 5, 0.3, True), (2, 6, 0.3, True), (1, 1, 0.0, True)}
    assert not proposer.keys


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_drafts_longer_than_the_remaining_tokens(llm: nc.LLM, name: str, tokens: int, most: int) -> None:
    """No draft exceeds the last token. A perfect draft needs one step for the first token and one for the rest."""
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=most))
    expected = reference_chunks(toy(), llm.tokenizer, request)
    ids = [token for chunk in expected[0] for token in chunk.token_ids]
    engine = engine_of(llm, Oracle({((4, 5, 6), 1): [*ids, 1, 2, 3]}), tokens, rule_name=name)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == expected
    read = max(stop for forward in engine.runner.forwards for _, _, stop in forward)
    assert read <= 3 + most - 1  # nothing is drafted after the last token
    rest = max(0, most - 1)
    assert engine.stats.num_steps == 1 + -(-rest // (tokens + 1))
    assert engine.stats.speculative.accepted_tokens == engine.stats.speculative.draft_tokens


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
@pytest.mark.parametrize("size", [3, 31, 33, 257])
def test_a_vocabulary_of_any_size(llm: nc.LLM, name: str, size: int) -> None:
    table = np.random.default_rng(size).normal(0, 3, (size, size)).astype(np.float32)
    model = Toy(lambda seen: table[seen[-1]], size, 64)
    params = nc.SamplingParams(max_tokens=20, ignore_eos=True, seed=3, temperature=0, presence_penalty=0.5)
    request = Request([1, 2], params)
    expected = reference_chunks(model, llm.tokenizer, request)
    proposer = Oracle({((1, 2), 3): [token for chunk in expected[0] for token in chunk.token_ids]}, 0.8)
    config = Speculation(lambda: proposer, 5, name, adaptive=False)
    engine = Engine(PagedToy(model, 40, 4), llm.tokenizer, speculative_config=config, backend="reference")
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == expected
    assert engine.stats.speculative.accepted_tokens > 0


@pytest.mark.parametrize("name", ACCEPTANCE_RULES)
@pytest.mark.parametrize("kind", ["paged", "asynchronous"])
def test_invalid_logits_within_a_draft(llm: nc.LLM, name: str, kind: str) -> None:
    """They end the output at the first accepted position with invalid logits; elsewhere they have no effect."""

    def broken(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(SIZE, np.nan, np.float32) if len(seen) == 6 or seen[-1] == 4000 else rule(seen)

    request, model = Request([4, 5, 6], GREEDY.replace(max_tokens=9)), toy(of=broken)
    expected = reference_chunks(model, llm.tokenizer, request)
    assert expected[0][-1].finish_reason == "error"
    ids = [token for chunk in expected[0] for token in chunk.token_ids]
    for draft in ([*ids, 7, 7, 7], [ids[0], 4000, 4000, 7, 7]):
        config = Speculation(lambda draft=draft: Oracle({((4, 5, 6), 1): draft}), 6, name, adaptive=False)
        engine = Engine(runner(kind, model), llm.tokenizer, speculative_config=config, backend="reference")
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == expected
        assert is_empty(engine)


def test_draft_blocks_are_freed(llm: nc.LLM) -> None:
    """Without free blocks there is no draft; nothing is preempted for one."""
    proposer = Fixed(*range(20))
    engine = engine_of(llm, proposer, 20, max_num_seqs=4)
    for index in range(4):
        engine.add(Request([index + 1] * 5, GREEDY.replace(max_tokens=40)))
    while len(engine):
        engine.step()
        for job in engine._scheduler.running:
            assert len(job.block_ids) <= engine._kv_cache.blocks_needed(len(job.token_ids))
    assert engine.stats.num_preemptions == 0
    assert engine.stats.speculative.draft_tokens > 100
    tight = engine_of(llm, Fixed(*range(20)), 20, blocks=12)  # of 4 tokens: enough for one output and a little more
    requests = [Request([index + 1] * 5, GREEDY.replace(max_tokens=40)) for index in range(2)]
    plain = Engine(runner("paged", toy(), 12), llm.tokenizer)
    found, expected = drive(tight, requests), drive(plain, requests)
    assert [chunks_by_index(events, 1) for events in found] == [chunks_by_index(events, 1) for events in expected]
    assert tight.stats.num_preemptions == plain.stats.num_preemptions
    assert is_empty(tight)


def test_rejected_tokens_are_not_in_the_prefix_cache(llm: nc.LLM) -> None:
    """Shared blocks contain only output tokens."""
    ids = reference_chunks(toy(), llm.tokenizer, Request([4] * 5, GREEDY.replace(max_tokens=12)))
    tokens = [token for chunk in ids[0] for token in chunk.token_ids]
    engine = engine_of(llm, Fixed(*range(30)), 20)
    drive(engine, [Request([4] * 5, GREEDY.replace(max_tokens=12))])
    prompt = [*[4] * 5, *tokens]
    for length in range(5, len(prompt) + 1):
        request = Request(prompt[:length], GREEDY)
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert engine.stats.prefix_cache_hits > 20


def test_drafts_count_towards_the_token_budget(llm: nc.LLM) -> None:
    """No step exceeds the budget, and waiting prompts come before drafts."""
    engine = engine_of(llm, Fixed(*range(30)), 20, max_num_batched_tokens=10, max_num_seqs=3)
    drive(engine, [Request([index + 1] * 9, GREEDY.replace(max_tokens=12)) for index in range(6)])
    assert max(sum(stop - start for _, start, stop in forward) for forward in engine.runner.forwards) == 10


def test_forward_failures_caused_by_drafts(llm: nc.LLM) -> None:
    """The step is repeated without drafts."""

    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if seen[-1] == 77:
            raise RuntimeError("of the draft")
        return rule(seen)

    proposer = Fixed(77, 1)
    engine = engine_of(llm, proposer, of=fails)
    request = Request([4, 5, 6], GREEDY)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert proposer.accepted_counts
    assert set(proposer.accepted_counts) == {0}
    assert is_empty(engine)


def test_failing_proposers(llm: nc.LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NoDrafts):
        def propose(self, states: Any, counts: Any) -> Any:
            raise RuntimeError("out of\nideas")

    engine = engine_of(llm, Failing())
    request = Request([4, 5, 6], GREEDY)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert caplog.text.count("the proposer failed, continuing without drafts") == 1
    assert engine.stats.speculative.draft_tokens == 0


def test_eos_within_a_draft(llm: nc.LLM) -> None:
    """Draft tokens after EOS are not reported, counted or sampled."""
    ids = llm.tokenizer.encode("The little fox ran home. It was happy.", add_special_tokens=False)

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        return np.eye(SIZE, dtype=np.float32)[ids[min(len(seen) - 1, len(ids) - 1)]] * 50

    for more, text, reason in (
        ({"stop": "ran"}, "The little fox ", "ran"),
        ({"stop_token_ids": [ids[3]]}, llm.tokenizer.decode(ids[:3]), ids[3]),
        ({"stop_regex": "h[a-z]+e"}, "The little fox ran ", "h[a-z]+e"),
    ):
        request = Request([1], GREEDY.replace(max_tokens=30, **more))
        proposer = Oracle({((1,), 1): ids})
        engine = engine_of(llm, proposer, 8, of=scripted)
        [events] = drive(engine, [request])
        [expected] = reference_chunks(toy(of=scripted), llm.tokenizer, request)
        assert chunks_by_index(events, 1) == [expected]
        assert "".join(event.chunk.text for event in events) == text
        assert events[-1].chunk.stop_reason == reason
        assert engine.stats.sampled_tokens == events[-1].usage.completion_tokens == len(expected)
        assert engine.stats.num_steps <= 2


def test_speculative_stats(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=9))
    ids = [token for chunk in reference_chunks(toy(), llm.tokenizer, request)[0] for token in chunk.token_ids]
    wrong = [*ids[:3], (ids[3] + 1) % SIZE, *ids[4:]]
    engine = engine_of(llm, Oracle({((4, 5, 6), 1): wrong}), 3)
    drive(engine, [request])
    stats = engine.stats.speculative  # the first token; 2 of 3 accepted, and one more; 3 of 3, and one more; the last
    assert stats[:3] == (4, 6, 5)
    assert (stats.verified_tokens_per_position, stats.accepted_tokens_per_position) == ((2, 2, 2), (2, 2, 1))
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (5 / 6, 1 + 5 / 4)
    assert stats.draft_seconds > 0
    assert (SpeculativeStats().acceptance_rate, SpeculativeStats().mean_acceptance_length) == (0, 1)
