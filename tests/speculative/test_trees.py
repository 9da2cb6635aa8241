"""Tree drafts in the engine: verified along the accepted branch, and the rest is discarded."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_storm import run_stress, sometimes_invalid
from scripted_proposers import FaultyTrees, HiddenStateOracle, NoDrafts, Oracle, Outputs, TreeOracle
from test_speculation_engine import any_request, outputs_by_prompt
from test_structured_random import follows_grammar
from toy_models import PagedToy
from toy_requests import SIZE, chunks_by_index, drive, is_empty, reference_chunks, rule, runner, toy

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.engine.verification import filter_draft
from nucleate.models.runner import ModelInput
from nucleate.speculative.adaptive_proposer import AdaptiveProposer
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import (
    ROOT,
    Candidate,
    Draft,
    DraftContext,
    Proposer,
    best_first,
    select_nodes,
    tree_draft,
    truncate,
)
from nucleate.structured_output import GrammarCompiler, Guide

DRAFTING = ("paged", "asynchronous")
GREEDY = nc.SamplingParams(temperature=0, ignore_eos=True, max_tokens=8, seed=1)


@pytest.fixture(scope="module", autouse=True)
def _patient() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nucleate.structured_output.guide.VALIDATION_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def grammars(llm: nc.LLM) -> GrammarCompiler:
    return GrammarCompiler(llm.tokenizer, SIZE)


# draft objects


def random_tree(rng: random.Random, count: int, sampled: bool = False) -> Draft:
    parents = tuple(rng.randrange(-1, index) if index else -1 for index in range(count))
    distributions = tuple(rng.choice((None, np.ones(5))) for _ in range(count)) if sampled else None
    return Draft(tuple(rng.randrange(5) for _ in range(count)), parents, distributions)


@pytest.mark.parametrize("seed", range(20))
def test_tree_indices(seed: int) -> None:
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 12))
    depths = draft.depths()
    for index, parent in enumerate(draft.parent_indices()):
        path = draft.path(index)
        assert path[-1] == index
        assert len(path) == depths[index] + 1
        assert [*path[:-1]] == draft.path(parent)
    assert draft.depth == max((len(draft.path(index)) for index in range(len(draft))), default=0)
    assert draft.path(ROOT) == []


@pytest.mark.parametrize("seed", range(40))
def test_truncate_a_tree(seed: int) -> None:
    """Keeps the first siblings up to a depth, and the first ``count`` of those, by node index."""
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 14), sampled=rng.random() < 0.5)
    branches, depth, count = rng.randint(1, 4), rng.randint(0, 6), rng.randint(0, 14)
    found = truncate(draft, branches, depth, count)
    expected: list[int] = []
    for index, parent in enumerate(draft.parent_indices()):
        older = [each for each in draft.children()[parent] if each < index]
        if len(older) < branches and len(draft.path(index)) <= depth and set(draft.path(index)[:-1]) <= set(expected):
            expected.append(index)
    expected = expected[:count]
    assert found.tokens == tuple(draft.tokens[index] for index in expected)
    for at, index in enumerate(expected):
        assert [found.tokens[each] for each in found.path(at)] == [draft.tokens[each] for each in draft.path(index)]
        assert found.distribution(at) is draft.distribution(index)
    assert max((len(more) for more in found.children().values()), default=0) <= branches
    assert found.depth <= depth
    assert found.parents is None or not found.is_chain


def test_best_first_order() -> None:
    chances = (0.6, 0.3, 0.1)

    def candidates(state: str, depth: int) -> list[Candidate]:
        return (
            [Candidate(token, chance, f"{state}{token}") for token, chance in enumerate(chances)] if depth < 3 else []
        )

    every = sorted(
        (np.prod([chances[int(token)] for token in text]) for size in (1, 2, 3) for text in texts(size)), reverse=True
    )
    nodes = best_first(candidates, "", 12)
    assert [node.probability for node in nodes] == pytest.approx(every[:12])
    draft = tree_draft([node.token for node in nodes], [node.parent for node in nodes])
    assert draft.depth == 3
    assert len({tuple(draft.tokens[each] for each in draft.path(index)) for index in range(12)}) == 12
    assert tree_draft([0, 0], [node.parent for node in best_first(candidates, "", 2)]).parents is None  # a chain


def test_best_first_ties() -> None:
    def candidates(state: str, depth: int) -> list[Candidate]:
        return [Candidate(token, 0.5, state) for token in range(2)] if depth < 2 else []

    found = [(node.token, node.parent) for node in best_first(candidates, "", 9)]
    assert found == [(0, ROOT), (1, ROOT), (0, 0), (1, 0), (0, 1), (1, 1)]


def texts(size: int) -> list[str]:
    return [""] if not size else [text + token for text in texts(size - 1) for token in "012"]


def test_grammar_filter_along_branches(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    a, b, c = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb", "xc"))
    guide = Guide(grammars.compile(nc.StructuredOutputs(regex="(a|ba)*bc")))
    tree = Draft((a, c, b, b, a, c, b, a, a), (ROOT, ROOT, ROOT, 0, 2, 2, 4, 1, 5))
    found = filter_draft(tree, SIZE, guide)
    assert found.tokens == (
        a,
        b,
        b,
        a,
        c,
        b,
    )  # the first c is rejected with all that follows; the other one ends the text
    assert found.parents == (ROOT, ROOT, 0, 1, 1, 3)
    ones = np.ones(SIZE) / SIZE
    sampled = filter_draft(Draft(tree.tokens, tree.parents, (ones,) * 9), SIZE, guide)
    assert sampled.tokens == (a, c, b, b, a, c, b)  # sampled tokens are kept, but nothing after them
    assert sampled.parents == (ROOT, ROOT, ROOT, 0, 2, 2, 4)
    assert filter_draft(Draft((a, -1, b), (ROOT, ROOT, 0)), SIZE, guide).tokens == (a,)
    assert guide.matcher.copy() is not guide.matcher


# in the engine

PROPOSERS: dict[str, Callable[[Outputs, random.Random], Proposer]] = {
    "correct": lambda outputs, rng: TreeOracle(outputs, 1.0, rng),
    "half": lambda outputs, rng: TreeOracle(outputs, 0.7, rng),
    "wrong trees": lambda outputs, rng: TreeOracle(outputs, 0.0, rng),
    "hidden states": lambda outputs, rng: HiddenStateOracle(outputs, 0.9, rng),
    "faulty": lambda outputs, rng: FaultyTrees(outputs, 0.8, rng),
}


FEW = {"max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("correct", "asynchronous", {}),
        ("half", "paged", FEW),
        ("wrong trees", "asynchronous", FEW),
        ("hidden states", "paged", {}),
        ("faulty", "paged", {}),
        *[pytest.param(name, kind, FEW, marks=pytest.mark.slow) for name in PROPOSERS for kind in DRAFTING],
    ],
)
@pytest.mark.fast_cases(2)
def test_chunks_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, Any], name: str
) -> None:
    """With any parameter, structured output and n > 1, in 64 blocks of 4 tokens, with preemption."""
    rng = random.Random(f"{kind}{options}{name}")
    requests, model = [any_request(rng) for _ in range(24 if name == "faulty" else 6)], toy()
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    proposer = PROPOSERS[name](outputs_by_prompt(requests, expected), rng)
    count, adaptive = rng.choice([6, 9, 14]), rng.random() < 0.2 and name not in ("correct", "faulty")
    proposer.complete = not adaptive
    config = Speculation(lambda: proposer, count, adaptive=adaptive, tree_width=4)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, **options, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, request.params.n) == own, request
    assert is_empty(engine)
    assert engine._speculator._failed == (name == "faulty")  # proposer failures are reported there
    assert engine.stats.jump_forward_tokens or not getattr(proposer, "late", 0)
    stats = engine.stats.speculative
    if name == "correct" and not options:
        assert stats.mean_acceptance_length > 1.3
    assert stats.draft_tokens >= stats.accepted_tokens


@pytest.mark.parametrize(("kind", "name"), [("paged", "rejection"), ("asynchronous", "typical")])
@pytest.mark.fast_cases(1)
def test_distribution_rules_equal_coupled_for_greedy_decoding(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, name: str
) -> None:
    rng = random.Random(f"{kind}{name}")
    requests, model = [any_request(rng) for _ in range(8)], toy()
    for index in range(0, len(requests), 2):
        greedy = requests[index].params.replace(temperature=0.0, draw="gumbel", mirostat_tau=0.0)
        requests[index] = dataclasses.replace(requests[index], params=greedy)
    expected = [reference_chunks(model, llm.tokenizer, request, grammars) for request in requests]
    made = TreeOracle(outputs_by_prompt(requests, expected), 0.8, rng)
    config = Speculation(lambda: made, 9, name, adaptive=False, tree_width=3)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, speculative_config=config, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        found = chunks_by_index(events, request.params.n)
        if request.params.temperature == 0:
            assert found == own, request
        for chunks in found:
            assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
            if request.params.structured_outputs is not None and chunks[-1].finish_reason != "error":
                assert follows_grammar(grammars, request.params, chunks)
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


def seeded(seed: int) -> Speculation:
    rng = random.Random(seed)
    best = lambda seen: int(sometimes_invalid(seen).argmax())
    return Speculation(
        lambda: FaultyTrees({}, 0.9, rng, best), rng.randint(3, 12), adaptive=False, tree_width=rng.randint(2, 4)
    )


def test_short_stress(llm: nc.LLM) -> None:
    run_stress(llm, "paged", 1, steps=100, speculative_config=seeded(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTING)
def test_long_stress(llm: nc.LLM, kind: str) -> None:
    run_stress(llm, kind, 100, steps=6_000, speculative_config=seeded(100))


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_jump_forward_tokens_within_a_branch(llm: nc.LLM, grammars: GrammarCompiler, name: str) -> None:
    """They are in the sequence before sampling; the branch continues after them."""
    grammar = nc.StructuredOutputs(regex="(The little fox|A big red bear|One old owl) (ran|sat) (home|down) today[.!]")
    params = nc.SamplingParams(structured_outputs=grammar, max_tokens=60, temperature=0)
    requests = [Request([5 + seed, 6], params.replace(seed=seed, logit_bias={97: seed * 0.01})) for seed in range(6)]
    requests += [Request([5 + seed, 6], params.replace(seed=seed)) for seed in range(6)]
    expected = [reference_chunks(toy(), llm.tokenizer, request, grammars) for request in requests]
    oracle = TreeOracle(outputs_by_prompt(requests, expected), 1.0, random.Random(3))
    engine = engine_of(llm, oracle, config={"num_speculative_tokens": 14, "acceptance_rule": name}, backend="reference")
    for request, own, events in zip(requests, expected, drive(engine, requests), strict=True):
        assert chunks_by_index(events, 1) == own, request
    assert engine.stats.jump_forward_tokens > 20
    assert engine.stats.speculative.accepted_tokens > 20


# single cases


class FixedTree(NoDrafts):
    """Always proposes the same tree."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__()
        self.tree, self.accepted_counts = Draft(tuple(tokens), tuple(parents)), []

    def draft(self, state: DraftContext, count: int) -> Draft:
        return self.tree

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


def engine_of(llm: nc.LLM, proposer: Any, of: type[RecordingToy] = RecordingToy, blocks: int = 100, **more: Any) -> Any:
    config = {"num_speculative_tokens": 9, "acceptance_rule": "coupled", "tree_width": 3, **more.pop("config", {})}
    speculation = Speculation(lambda: proposer, adaptive=False, **config)
    return Engine(of(toy(), blocks, 4), llm.tokenizer, speculative_config=speculation, **more)


def output_ids_of(llm: nc.LLM, request: Request) -> list[int]:
    return [token for chunk in reference_chunks(toy(), llm.tokenizer, request)[0] for token in chunk.token_ids]


@pytest.mark.parametrize(
    ("of", "config"),
    [
        (WithoutTrees, {}),
        (RecordingToy, {"tree_width": 1}),
        (RecordingToy, {"acceptance_rule": "block"}),
        (RecordingToy, {}),
    ],
    ids=["a runner without", "one branch", "block", "a tree"],
)
def test_runners_without_tree_attention_use_the_first_branch(llm: nc.LLM, of: Any, config: dict[str, Any]) -> None:
    request = Request([4, 5, 6], GREEDY)
    ids = output_ids_of(llm, request)
    proposer = FixedTree((9, ids[1], ids[2], 9), (ROOT, ROOT, 1, 0))
    engine = engine_of(llm, proposer, of, config=config)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    trees = [part for part in engine.runner.parts if part.parents is not None]
    if config or of is WithoutTrees:
        assert not trees
        assert proposer.accepted_counts[0] == 0
        assert engine.runner.parts[1].token_ids[3:] == (ids[0], 9, 9)
    else:
        assert trees[0].token_ids[4:] == (9, ids[1], ids[2], 9)
        assert trees[0].parents == (ROOT, ROOT, 1, 0)
        assert (trees[0].num_logits, trees[0].stop - trees[0].start) == (5, 5)
        assert proposer.accepted_counts[0] == 2


def test_stats_count_tree_depths(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=6))
    ids = output_ids_of(llm, request)
    engine = engine_of(llm, FixedTree((9, ids[1], ids[2], 8, 8), (ROOT, ROOT, 1, 1, 0)))
    drive(engine, [request])
    stats = engine.stats.speculative  # the first token; two of the tree, and one more; none of two; the last token
    assert stats[:3] == (4, 7, 2)
    assert (stats.verified_tokens_per_position[:3], stats.accepted_tokens_per_position[:3]) == (
        (2, 1, 0),
        (1, 1, 0),
    )


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_branch_goes_past_the_last_token(llm: nc.LLM, most: int) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=most))
    ids = output_ids_of(llm, request)
    tree = FixedTree((9, *ids[1:], 7, 7, 7), (ROOT, ROOT, *range(1, len(ids)), 0, 0))
    engine = engine_of(llm, tree)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    for part in engine.runner.parts:
        if part.parents is not None:
            depth = Draft((0,) * len(part.parents), tuple(part.parents)).depth
            assert part.stop - len(part.parents) + depth <= 3 + most - 1
    assert engine.stats.num_steps == min(most, 2)


def test_tree_blocks_are_freed_without_preemption(llm: nc.LLM) -> None:
    star = FixedTree([*range(9)], [ROOT] * 3 + [0] * 3 + [1] * 3)
    requests = [Request([index + 1] * 5, GREEDY.replace(max_tokens=40)) for index in range(3)]
    for blocks in (100, 24, 13):
        engine = engine_of(llm, star, blocks=blocks)
        for request in requests:
            engine.add(request)
        while len(engine):
            engine.step()
            for job in engine._scheduler.running:
                assert len(job.block_ids) <= engine._kv_cache.blocks_needed(len(job.token_ids))
        plain = Engine(runner("paged", toy(), blocks), llm.tokenizer)
        drive(plain, requests)
        assert engine.stats.num_preemptions == plain.stats.num_preemptions
        assert engine.stats.speculative.draft_tokens > 50
        assert is_empty(engine)


def test_only_accepted_tokens_enter_the_prefix_cache(llm: nc.LLM) -> None:
    """Cached blocks contain the output in order, though it was computed in another: later requests hit them."""
    request = Request([4] * 5, GREEDY.replace(max_tokens=20))
    ids = output_ids_of(llm, request)
    engine = engine_of(
        llm, TreeOracle({((4,) * 5, 1): ids}, 1.0, random.Random(2)), config={"num_speculative_tokens": 14}
    )
    drive(engine, [request])
    assert engine.stats.speculative.accepted_tokens > 8
    prompt = [*[4] * 5, *ids]
    for length in range(5, len(prompt) + 1):
        request = Request(prompt[:length], GREEDY)
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert engine.stats.prefix_cache_hits > 30


def test_forward_failures_caused_by_trees(llm: nc.LLM) -> None:
    class Failing(RecordingToy):
        def forward(self, parts: Sequence[ModelInput]) -> Any:
            if any(part.parents is not None for part in parts):
                raise RuntimeError("of the tree")
            return super().forward(parts)

    tree = FixedTree((9, 7, 8), (ROOT, ROOT, 0))
    engine = engine_of(llm, tree, Failing)
    request = Request([4, 5, 6], GREEDY)
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert set(tree.accepted_counts) == {0}
    assert is_empty(engine)


def test_eos_within_a_branch(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("The little fox ran home. It was happy.", add_special_tokens=False)

    def scripted(seen: tuple[int, ...]) -> np.ndarray:
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[ids[min(len(seen) - 1, len(ids) - 1)]] = 50
        return logits_V

    for more, text, reason in (
        ({"stop": "ran"}, "The little fox ", "ran"),
        ({"stop_token_ids": [ids[3]]}, llm.tokenizer.decode(ids[:3]), ids[3]),
        ({"stop_regex": "h[a-z]+e"}, "The little fox ran ", "h[a-z]+e"),
    ):
        request = Request([1], GREEDY.replace(max_tokens=30, **more))
        config = Speculation(
            lambda: TreeOracle({((1,), 1): ids}, 1.0, random.Random(1)), 30, adaptive=False, tree_width=9
        )
        engine = Engine(runner("paged", toy(of=scripted)), llm.tokenizer, speculative_config=config)
        [events] = drive(engine, [request])
        [expected] = reference_chunks(toy(of=scripted), llm.tokenizer, request)
        assert chunks_by_index(events, 1) == [expected]
        assert "".join(event.chunk.text for event in events) == text
        assert events[-1].chunk.stop_reason == reason
        assert engine.stats.sampled_tokens == events[-1].usage.completion_tokens == len(expected)
        assert engine.stats.num_steps <= 3


class LastSibling(Oracle):
    """The correct token is the last of three siblings."""

    def draft(self, state: DraftContext, count: int) -> Draft:
        right = super().draft(state, count).tokens
        tokens = [token for one in right for token in (4095, 4094, one)]
        parents = [ROOT if depth == 0 else depth * 3 - 1 for depth in range(len(right)) for _ in range(3)]
        return Draft(tuple(tokens), tuple(parents))


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
    for proposer, config in (
        (Oracle(found), {"tree_width": 1, "num_speculative_tokens": 5}),
        (Digits(found), {"num_speculative_tokens": 15}),
    ):
        engine = engine_of(llm, proposer, config={"acceptance_rule": name, **config}, backend="reference")
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == expected
        steps.append((engine.stats.num_steps, engine.stats.speculative.accepted_tokens))
    assert steps[0][1] > 2
    assert steps[0] == steps[1]


def test_perfect_trees_need_as_few_steps_as_perfect_chains(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=13))
    ids = output_ids_of(llm, request)
    engine = engine_of(llm, LastSibling({((4, 5, 6), 1): ids}), config={"num_speculative_tokens": 12})
    [events] = drive(engine, [request])
    assert chunks_by_index(events, 1) == reference_chunks(toy(), llm.tokenizer, request)
    assert engine.stats.num_steps == 1 + -(-12 // 5)
    assert rule((1,)).shape == (SIZE,)


def test_select_all_nodes() -> None:
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0))
    assert select_nodes(tree, [0, 1, 2]) is tree
    assert select_nodes(Draft((1, 2), (ROOT, 0)), [0, 1]).parents is None
    assert select_nodes(tree, [0, 2]).parents is None


class ThreeSiblings(NoDrafts):
    """Three siblings at each of four depths; the second one is correct up to a depth."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def draft(self, state: DraftContext, count: int) -> Draft:
        self.counts.append(count)
        parents = [-1 if depth == 0 else 3 * depth - 2 for depth in range(4) for _ in range(3)]
        return Draft(tuple(range(12))[:count], tuple(parents)[:count])


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_adaptive_trees_are_truncated(right: int) -> None:
    """All tokens are requested, and each depth costs three."""
    proposer = AdaptiveProposer(made := ThreeSiblings(), trees=True)
    depths = []
    for _ in range(60):
        [draft] = proposer.propose([DraftContext(7, [1, 2, 3])], [12])
        depths.append(draft.depth)
        assert len(draft) == 3 * draft.depth
        proposer.accepted(7, min(right, draft.depth))
        proposer.end_step(1, 1 + len(draft), 1.0 + 0.05 * len(draft))
    assert proposer._tokens_per_depth == pytest.approx(3.0, abs=0.1) or not right
    assert max(made.counts) == 12
    assert max(depths[-20:]) == right or (right == 0 and max(depths[-20:]) <= 1)


@pytest.mark.parametrize("name", ["coupled", "rejection", "typical"])
def test_invalid_logits_within_a_draft(llm: nc.LLM, name: str) -> None:
    """On the correct branch they end the output after the tokens before; on another branch they have no effect."""

    def broken(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(SIZE, np.nan, np.float32) if len(seen) == 6 or seen[-1] == 4000 else rule(seen)

    request, model = Request([4, 5, 6], GREEDY), toy(of=broken)
    expected = reference_chunks(model, llm.tokenizer, request)
    assert expected[0][-1].finish_reason == "error"
    ids = [token for chunk in expected[0] for token in chunk.token_ids]
    for tree in (FixedTree((4000, ids[1], ids[2], 7), (ROOT, ROOT, 1, 2)), FixedTree((ids[1], 4000), (ROOT, ROOT))):
        config = Speculation(lambda tree=tree: tree, 6, name, adaptive=False, tree_width=2)
        engine = Engine(runner("paged", model), llm.tokenizer, speculative_config=config, backend="reference")
        [events] = drive(engine, [request])
        assert chunks_by_index(events, 1) == expected
        assert is_empty(engine)
