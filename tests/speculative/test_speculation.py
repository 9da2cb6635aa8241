"""``Speculation`` configurations, and single cases of speculative decoding in the engine: chains and trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted_proposers import NoDrafts, Oracle, TreeOracle
from test_speculation_engine import outputs_by_prompt
from toy_models import PagedToy, Toy
from toy_requests import SIZE, chunks_by_index, drive, is_empty, reference_chunks, rule, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.protocol import ModelError
from nucleate.models.runner import ModelInput
from nucleate.outputs import SpeculativeStats
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.config import ACCEPTANCE_RULES, METHODS, Speculation
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer
from nucleate.speculative.ngram import NgramProposer
from nucleate.structured_output import GrammarCompiler

GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, seed=1)


class Fixed(NoDrafts):
    """Always proposes the same draft."""

    def __init__(self, tokens: Sequence[int] = (), parents: Sequence[int] | None = None) -> None:
        super().__init__()
        self.fixed = Draft(tuple(tokens), None if parents is None else tuple(parents))
        self.states: list[DraftContext] = []
        self.accepted_counts: list[int] = []

    def draft(self, state: DraftContext, count: int) -> Draft:
        self.states.append(state)
        return self.fixed

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        self.accepted_counts.append(count)


class RecordingToy(PagedToy):
    """Records its inputs."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.parts: list[ModelInput] = []

    def forward(self, parts: Sequence[ModelInput]) -> Any:
        self.parts += [part._replace(token_ids=tuple(part.token_ids)) for part in parts]
        return super().forward(parts)


class WithoutTrees(RecordingToy):
    tree_attention = False

    def move(self, moves: Any) -> None:
        raise AssertionError("there is nothing to move")


class CheckedEngine(Engine):
    """Checks after each step that no sequence has blocks of rejected draft tokens."""

    def step(self) -> Any:
        outputs = super().step()
        for job in self._scheduler.running:
            assert len(job.block_ids) <= self._kv_cache.blocks_needed(len(job.token_ids))
        return outputs


def engine_of(
    llm: nc.LLM, proposer: Proposer, tokens: int = 9, rule_name: str = "coupled", width: int = 3, *, of: Any = rule,
    runner_class: type[PagedToy] = RecordingToy, blocks: int = 100, **more: Any,
) -> Any:  # fmt: skip
    config = Speculation(lambda: proposer, tokens, rule_name, adaptive=False, tree_width=width)
    made = runner_class(toy(of=of), blocks, 4)
    return CheckedEngine(made, llm.tokenizer, speculative_config=config, backend="reference", **more)


def assert_as_without_drafts(llm: nc.LLM, engine: Any, request: Request, of: Any = rule) -> list[Any]:
    """Run a request, and compare it with the reference loop."""
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(of=of), llm.tokenizer, request)
    assert is_empty(engine)
    return events


def output_ids_of(llm: nc.LLM, request: Request, of: Any = rule) -> list[int]:
    return [token for chunk in reference_chunks(toy(of=of), llm.tokenizer, request)[0] for token in chunk.token_ids]


def oracle(llm: nc.LLM, request: Request, kind: type[Oracle] = Oracle, of: Any = rule) -> Any:
    """A proposer that knows the output of a request."""
    known = {(tuple(request.prompt_ids), request.params.seed): output_ids_of(llm, request, of)}
    return kind(known, 1.0, random.Random(2))


@pytest.mark.parametrize("adaptive", [False, True])
def test_objects_that_are_no_proposers(adaptive: bool) -> None:
    with pytest.raises(nc.ParameterError, match="a proposer has layers and the methods of Proposer, got None"):
        Speculation(lambda: None, adaptive=adaptive).create_proposer()  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "none"}, "method must be one of ngram, suffix, draft, medusa, eagle, dflash, mtp, got 'none'"),
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
    with pytest.raises(nc.ParameterError, match="needs a model with a paged KV cache"):
        Engine(runner("contexts", toy()), llm.tokenizer, speculative_config="ngram")


def test_draft_weights_of_another_model(llm: nc.LLM) -> None:
    with pytest.raises(ModelError):
        Speculation("medusa").bind_model(toy())


@pytest.mark.slow
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


# in the engine


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
    ids = output_ids_of(llm, request)
    engine = engine_of(llm, Oracle({((4, 5, 6), 1): [*ids, 1, 2, 3]}), tokens, name, 1)
    assert_as_without_drafts(llm, engine, request)
    read = max(stop for forward in engine.runner.forwards for _, _, stop in forward)
    assert read <= 3 + most - 1  # nothing is drafted after the last token
    assert engine.stats.num_steps == 1 + -(-max(0, most - 1) // (tokens + 1))
    assert engine.stats.speculative.accepted_tokens == engine.stats.speculative.draft_tokens


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_branch_goes_past_the_last_token(llm: nc.LLM, most: int) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=most))
    ids = output_ids_of(llm, request)
    engine = engine_of(llm, Fixed((9, *ids[1:], 7, 7, 7), (ROOT, ROOT, *range(1, len(ids)), 0, 0)))
    assert_as_without_drafts(llm, engine, request)
    for part in engine.runner.parts:
        if part.parents is not None:
            depth = Draft((0,) * len(part.parents), tuple(part.parents)).depth
            assert part.stop - len(part.parents) + depth <= 3 + most - 1
    assert engine.stats.num_steps == min(most, 2)


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

    request = Request([4, 5, 6], GREEDY.replace(max_tokens=9))
    ids = output_ids_of(llm, request, broken)
    for proposer in (
        Oracle({((4, 5, 6), 1): [*ids, 7, 7, 7]}),
        Oracle({((4, 5, 6), 1): [ids[0], 4000, 4000, 7, 7]}),
        Fixed((4000, ids[1], ids[2], 7), (ROOT, ROOT, 1, 2)),
        Fixed((ids[1], 4000), (ROOT, ROOT)),
    ):
        engine = engine_of(llm, proposer, 6, name, of=broken)
        engine.runner.asynchronous = kind == "asynchronous"
        events = assert_as_without_drafts(llm, engine, request, broken)
        assert events[-1].chunk.finish_reason == "error"


@pytest.mark.slow
@pytest.mark.parametrize("draft", [Fixed(range(20)), Fixed(range(9), [ROOT] * 3 + [0] * 3 + [1] * 3)])
def test_draft_blocks_are_freed(llm: nc.LLM, draft: Fixed) -> None:
    """Without free blocks there is no draft; nothing is preempted for one."""
    requests = [Request([index + 1] * 5, GREEDY.replace(max_tokens=40)) for index in range(3)]
    for blocks in (100, 24, 13):
        engine, plain = engine_of(llm, draft, 20, blocks=blocks), Engine(runner("paged", toy(), blocks), llm.tokenizer)
        found, expected = drive(engine, requests), drive(plain, requests)
        assert [chunks_by_index(events, 1) for events in found] == [chunks_by_index(events, 1) for events in expected]
        assert engine.stats.num_preemptions == plain.stats.num_preemptions
        assert engine.stats.speculative.draft_tokens > 50
        assert is_empty(engine)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [False, True])
def test_only_accepted_tokens_are_in_the_prefix_cache(llm: nc.LLM, tree: bool) -> None:
    """Cached blocks contain the output in order, though trees compute it in another: later requests hit them."""
    request = Request([4] * 5, GREEDY.replace(max_tokens=20))
    ids = output_ids_of(llm, request)
    engine = engine_of(llm, oracle(llm, request, TreeOracle) if tree else Fixed(range(30)), 14)
    drive(engine, [request])
    assert not tree or engine.stats.speculative.accepted_tokens > 8
    prompt = [*[4] * 5, *ids]
    for length in range(5, len(prompt) + 1):
        assert_as_without_drafts(llm, engine, Request(prompt[:length], GREEDY))
    assert engine.stats.prefix_cache_hits > 30


def test_drafts_count_towards_the_token_budget(llm: nc.LLM) -> None:
    """No step exceeds the budget, and waiting prompts come before drafts."""
    engine = engine_of(llm, Fixed(range(30)), 20, max_num_batched_tokens=10, max_num_seqs=3)
    drive(engine, [Request([index + 1] * 9, GREEDY.replace(max_tokens=12)) for index in range(6)])
    assert max(sum(stop - start for _, start, stop in forward) for forward in engine.runner.forwards) == 10


def test_forward_failures_caused_by_drafts(llm: nc.LLM) -> None:
    """The step is repeated without drafts."""

    def fails(seen: tuple[int, ...]) -> np.ndarray:
        if seen[-1] == 77:
            raise RuntimeError("of the draft")
        return rule(seen)

    for proposer in (Fixed((77, 1)), Fixed((9, 77, 8), (ROOT, ROOT, 0))):
        assert_as_without_drafts(llm, engine_of(llm, proposer, of=fails), Request([4, 5, 6], GREEDY))
        assert proposer.accepted_counts
        assert set(proposer.accepted_counts) == {0}


def test_failing_proposers(llm: nc.LLM, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(NoDrafts):
        def propose(self, states: Any, counts: Any) -> Any:
            raise RuntimeError("out of\nideas")

    engine = engine_of(llm, Failing())
    assert_as_without_drafts(llm, engine, Request([4, 5, 6], GREEDY))
    assert caplog.text.count("the proposer failed, continuing without drafts") == 1
    assert engine.stats.speculative.draft_tokens == 0


def test_speculative_stats(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=9))
    ids = output_ids_of(llm, request)
    wrong = [*ids[:3], (ids[3] + 1) % SIZE, *ids[4:]]
    engine = engine_of(llm, Oracle({((4, 5, 6), 1): wrong}), 3)
    drive(engine, [request])
    stats = engine.stats.speculative  # the first token; 2 of 3 accepted, and one more; 3 of 3, and one more; the last
    assert stats[:3] == (4, 6, 5)
    assert (stats.verified_tokens_per_position, stats.accepted_tokens_per_position) == ((2, 2, 2), (2, 2, 1))
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (5 / 6, 1 + 5 / 4)
    assert stats.draft_seconds > 0
    assert (SpeculativeStats().acceptance_rate, SpeculativeStats().mean_acceptance_length) == (0, 1)
    engine = engine_of(llm, Fixed((9, ids[1], ids[2], 8, 8), (ROOT, ROOT, 1, 1, 0)))
    drive(engine, [Request([4, 5, 6], GREEDY)])
    stats = engine.stats.speculative  # the first token; two of the tree, and one more; none of two; the last token
    assert stats[:3] == (4, 7, 2)
    assert stats.verified_tokens_per_position[:3] == (2, 1, 0)
    assert stats.accepted_tokens_per_position[:3] == (1, 1, 0)


@pytest.mark.parametrize(
    ("runner_class", "options"),
    [(WithoutTrees, {}), (RecordingToy, {"width": 1}), (RecordingToy, {"rule_name": "block"}), (RecordingToy, {})],
    ids=["a runner without", "one branch", "block", "a tree"],
)
def test_runners_without_tree_attention_use_the_first_branch(llm: nc.LLM, runner_class: Any, options: Any) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=8))
    ids = output_ids_of(llm, request)
    proposer = Fixed((9, ids[1], ids[2], 9), (ROOT, ROOT, 1, 0))
    engine = engine_of(llm, proposer, runner_class=runner_class, **options)
    assert_as_without_drafts(llm, engine, request)
    trees = [part for part in engine.runner.parts if part.parents is not None]
    if options or runner_class is WithoutTrees:
        assert not trees
        assert proposer.accepted_counts[0] == 0
        assert engine.runner.parts[1].token_ids[3:] == (ids[0], 9, 9)
    else:
        assert trees[0].token_ids[4:] == (9, ids[1], ids[2], 9)
        assert trees[0].parents == (ROOT, ROOT, 1, 0)
        assert (trees[0].num_logits, trees[0].stop - trees[0].start) == (5, 5)
        assert proposer.accepted_counts[0] == 2


class LastSibling(Oracle):
    """The correct token is the last of three siblings."""

    def draft(self, state: DraftContext, count: int) -> Draft:
        right = super().draft(state, count).tokens
        tokens = [token for one in right for token in (4095, 4094, one)]
        parents = [ROOT if depth == 0 else depth * 3 - 1 for depth in range(len(right)) for _ in range(3)]
        return Draft(tuple(tokens), tuple(parents))


def test_perfect_trees_need_as_few_steps_as_perfect_chains(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=13))
    engine = engine_of(llm, oracle(llm, request, LastSibling), 12)
    assert_as_without_drafts(llm, engine, request)
    assert engine.stats.num_steps == 1 + -(-12 // 5)


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_jump_forward_tokens_in_trees_and_chains(llm: nc.LLM, grammars: GrammarCompiler, name: str) -> None:
    digits = [llm.tokenizer.encode(f"x{digit}", add_special_tokens=False)[-1] for digit in range(10)]
    grammar = nc.StructuredOutputs(regex="([0-9] and [0-9] or){4}")
    request = Request([5, 6], GREEDY.replace(structured_outputs=grammar, max_tokens=60))
    expected = reference_chunks(toy(), llm.tokenizer, request, grammars)
    found = outputs_by_prompt([request], [expected])

    class Digits(LastSibling):
        """All siblings are digits, which the grammar allows at some positions only."""

        def draft(self, state: DraftContext, count: int) -> Draft:
            draft = super().draft(state, count)
            wrong = [[digit for digit in digits if digit != right] for right in draft.tokens[2::3]]
            tokens = [right if at % 3 == 2 else wrong[at // 3][at % 3] for at, right in enumerate(draft.tokens)]
            return Draft(tuple(tokens), draft.parents)

    steps = []
    for proposer, tokens, width in ((Oracle(found), 5, 1), (Digits(found), 15, 3)):
        engine = engine_of(llm, proposer, tokens, name, width)
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == expected
        steps.append((engine.stats.num_steps, engine.stats.speculative.accepted_tokens))
    assert steps[0][1] > 2
    assert steps[0] == steps[1]
