"""Tree drafts in the engine: verified along the accepted branch, and the rest is discarded."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engine_storm import rule as broken_rule
from engine_storm import storm
from scripted_proposers import Answers, Oracle, Silent
from test_speculation_engine import any_request, known
from test_structured_random import holds
from toy_models import PagedToy
from toy_requests import SIZE, alone, answers, drive, is_empty, rule, runner, toy
from tree_proposers import Grove, Reading, Wild

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.models.runner import ModelInput
from nucleate.speculative.adaptive.controller import AdaptiveProposer
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import ROOT, Draft, DraftContext, Proposer
from nucleate.speculative.grammar_filter import filter_draft
from nucleate.speculative.tree import Candidate, best_first, draft_from_nodes, select_nodes, truncate
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


# as values


def random_tree(rng: random.Random, count: int, drawn: bool = False) -> Draft:
    parents = tuple(rng.randrange(-1, place) if place else -1 for place in range(count))
    laws = tuple(rng.choice((None, np.ones(5))) for _ in range(count)) if drawn else None
    return Draft(tuple(rng.randrange(5) for _ in range(count)), parents, laws)


@pytest.mark.parametrize("seed", range(20))
def test_tree_indices(seed: int) -> None:
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 12))
    depths = draft.depths()
    for place, parent in enumerate(draft.parent_indices()):
        path = draft.path(place)
        assert path[-1] == place
        assert len(path) == depths[place] + 1
        assert [*path[:-1]] == draft.path(parent)
    assert draft.depth == max((len(draft.path(place)) for place in range(len(draft))), default=0)
    assert draft.path(ROOT) == []


@pytest.mark.parametrize("seed", range(40))
def test_truncate_a_tree(seed: int) -> None:
    """First siblings, up to a depth, and of those the first so many: by their places alone."""
    rng = random.Random(seed)
    draft = random_tree(rng, rng.randint(0, 14), drawn=rng.random() < 0.5)
    branches, depth, count = rng.randint(1, 4), rng.randint(0, 6), rng.randint(0, 14)
    found = truncate(draft, branches, depth, count)
    wanted: list[int] = []
    for place, parent in enumerate(draft.parent_indices()):
        older = [each for each in draft.children()[parent] if each < place]
        if len(older) < branches and len(draft.path(place)) <= depth and set(draft.path(place)[:-1]) <= set(wanted):
            wanted.append(place)
    wanted = wanted[:count]
    assert found.tokens == tuple(draft.tokens[place] for place in wanted)
    for at, place in enumerate(wanted):
        assert [found.tokens[each] for each in found.path(at)] == [draft.tokens[each] for each in draft.path(place)]
        assert found.distribution(at) is draft.distribution(place)
    assert max((len(more) for more in found.children().values()), default=0) <= branches
    assert found.depth <= depth
    assert found.parents is None or not found.is_chain


def test_best_first_order() -> None:
    chances = (0.6, 0.3, 0.1)

    def offers(state: str, depth: int) -> list[Candidate]:
        return (
            [Candidate(token, chance, f"{state}{token}") for token, chance in enumerate(chances)] if depth < 3 else []
        )

    every = sorted(
        (np.prod([chances[int(token)] for token in text]) for size in (1, 2, 3) for text in texts(size)), reverse=True
    )
    nodes = best_first(offers, "", 12)
    assert [node.probability for node in nodes] == pytest.approx(every[:12])
    draft = draft_from_nodes(nodes)
    assert draft.depth == 3
    assert len({tuple(draft.tokens[each] for each in draft.path(place)) for place in range(12)}) == 12
    assert draft_from_nodes(best_first(offers, "", 2)).parents is None  # a chain: 0, then 0 again
    assert all(node.probability >= 0.1 for node in best_first(offers, "", 99, 0.1))


def test_best_first_ties() -> None:
    def offers(state: str, depth: int) -> list[Candidate]:
        return [Candidate(token, 0.5, state) for token in range(2)] if depth < 2 else []

    found = [(node.token, node.parent) for node in best_first(offers, "", 9)]
    assert found == [(0, ROOT), (1, ROOT), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(best_first(offers, "", 9, 0.25)) == 6  # none is less likely
    assert len(best_first(offers, "", 9, 0.26)) == 2


def texts(size: int) -> list[str]:
    return [""] if not size else [text + token for text in texts(size - 1) for token in "012"]


def test_grammar_filter_along_branches(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    a, b, c = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb", "xc"))
    guide = Guide(grammars.compile(nc.StructuredOutputs(regex="(a|ba)*bc")))
    tree = Draft((a, c, b, b, a, c, b, a, a), (ROOT, ROOT, ROOT, 0, 2, 2, 4, 1, 5))
    found = filter_draft(tree, SIZE, guide)
    assert found.tokens == (a, b, b, a, c, b)  # the first c and what follows it may not be; the other one is the end
    assert found.parents == (ROOT, ROOT, 0, 1, 1, 3)
    ones = np.ones(SIZE) / SIZE
    drawn = filter_draft(Draft(tree.tokens, tree.parents, (ones,) * 9), SIZE, guide)
    assert drawn.tokens == (a, c, b, b, a, c, b)  # what was drawn stays, but nothing after it
    assert drawn.parents == (ROOT, ROOT, ROOT, 0, 2, 2, 4)
    assert filter_draft(Draft((a, -1, b), (ROOT, ROOT, 0)), SIZE, guide).tokens == (a,)
    assert guide.matcher.copy() is not guide.matcher


# in an engine

PROPOSERS: dict[str, Callable[[Answers, random.Random], Proposer]] = {
    "knows": lambda answers, rng: Grove(answers, 1.0, rng),
    "half": lambda answers, rng: Grove(answers, 0.7, rng),
    "lies": lambda answers, rng: Grove(answers, 0.0, rng),
    "reads": lambda answers, rng: Reading(answers, 0.9, rng),
    "wild": lambda answers, rng: Wild(answers, 0.8, rng),
}


FEW = {"max_num_seqs": 3, "max_num_batched_tokens": 16}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("knows", "asynchronous", {}),
        ("half", "paged", FEW),
        ("lies", "asynchronous", FEW),
        ("reads", "paged", {}),
        ("wild", "paged", {}),
        *[pytest.param(name, kind, FEW, marks=pytest.mark.slow) for name in PROPOSERS for kind in DRAFTING],
    ],
)
@pytest.mark.fast_cases(2)
def test_chunks_are_those_without_drafts(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, options: dict[str, Any], name: str
) -> None:
    """Any parameter, forms and several answers, in a pool of 64 blocks of 4 tokens, with preemption."""
    rng = random.Random(f"{kind}{options}{name}")
    requests, model = [any_request(rng) for _ in range(24 if name == "wild" else 6)], toy()
    wanted = [alone(model, llm.tokenizer, request, grammars) for request in requests]
    proposer = PROPOSERS[name](known(requests, wanted), rng)
    count, adaptive = rng.choice([6, 9, 14]), rng.random() < 0.2 and name not in ("knows", "wild")
    proposer.whole = not adaptive
    asked = Speculation(lambda: proposer, count, adaptive=adaptive, tree_width=4)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, **options, speculative_config=asked, backend="reference")
    for request, own, events in zip(requests, wanted, drive(engine, requests), strict=True):
        assert answers(events, request.params.n) == own, request
    assert is_empty(engine)
    assert engine._speculator._failed == (name == "wild")  # whatever a proposer finds wrong is said there
    assert engine.stats.jump_forward_tokens or not getattr(proposer, "late", 0)
    figures = engine.stats.speculative
    if name == "knows" and not options:
        assert figures.mean_acceptance_length > 1.3
    assert figures.draft_tokens >= figures.accepted_tokens


@pytest.mark.parametrize(("kind", "name"), [("paged", "rejection"), ("asynchronous", "typical")])
@pytest.mark.fast_cases(1)
def test_distribution_rules_equal_coupled_for_greedy_decoding(
    llm: nc.LLM, grammars: GrammarCompiler, kind: str, name: str
) -> None:
    rng = random.Random(f"{kind}{name}")
    requests, model = [any_request(rng) for _ in range(8)], toy()
    for place in range(0, len(requests), 2):
        greedy = requests[place].params.replace(temperature=0.0, draw="gumbel", mirostat_tau=0.0)
        requests[place] = dataclasses.replace(requests[place], params=greedy)
    wanted = [alone(model, llm.tokenizer, request, grammars) for request in requests]
    made = Grove(known(requests, wanted), 0.8, rng)
    asked = Speculation(lambda: made, 9, name, adaptive=False, tree_width=3)
    engine = Engine(runner(kind, model, 64), llm.tokenizer, speculative_config=asked, backend="reference")
    for request, own, events in zip(requests, wanted, drive(engine, requests), strict=True):
        found = answers(events, request.params.n)
        if request.params.temperature == 0:
            assert found == own, request
        for pieces in found:
            assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
            if request.params.structured_outputs is not None and pieces[-1].finish_reason != "error":
                assert holds(grammars, request.params, pieces)
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > 0


def seeded(seed: int) -> Speculation:
    rng = random.Random(seed)
    best = lambda seen: int(broken_rule(seen).argmax())
    return Speculation(
        lambda: Wild({}, 0.9, rng, best), rng.randint(3, 12), adaptive=False, tree_width=rng.randint(2, 4)
    )


def test_a_short_storm(llm: nc.LLM) -> None:
    storm(llm, "paged", 1, steps=100, speculative_config=seeded(1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", DRAFTING)
def test_a_long_storm(llm: nc.LLM, kind: str) -> None:
    storm(llm, kind, 100, steps=6_000, speculative_config=seeded(100))


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_jump_forward_tokens_within_a_branch(llm: nc.LLM, grammars: GrammarCompiler, name: str) -> None:
    """They are there before they are drawn: the branch goes on after them."""
    form = nc.StructuredOutputs(regex="(The little fox|A big red bear|One old owl) (ran|sat) (home|down) today[.!]")
    params = nc.SamplingParams(structured_outputs=form, max_tokens=60, temperature=0)
    requests = [Request([5 + seed, 6], params.replace(seed=seed, logit_bias={97: seed * 0.01})) for seed in range(6)]
    requests += [Request([5 + seed, 6], params.replace(seed=seed)) for seed in range(6)]
    wanted = [alone(toy(), llm.tokenizer, request, grammars) for request in requests]
    grove = Grove(known(requests, wanted), 1.0, random.Random(3))
    engine = engine_of(llm, grove, asked={"num_speculative_tokens": 14, "acceptance_rule": name}, backend="reference")
    for request, own, events in zip(requests, wanted, drive(engine, requests), strict=True):
        assert answers(events, 1) == own, request
    assert engine.stats.jump_forward_tokens > 20
    assert engine.stats.speculative.accepted_tokens > 20


# one case at a time


class Fixed(Silent):
    """Says the same tree, whatever it is asked."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__()
        self.tree, self.told = Draft(tuple(tokens), tuple(parents)), []

    def draft(self, state: DraftContext, count: int) -> Draft:
        return self.tree

    def accepted(self, key: int, count: int) -> None:
        super().accepted(key, count)
        self.told.append(count)


class Watching(PagedToy):
    """Keeps the parts it has read."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.parts: list[ModelInput] = []

    def forward(self, parts: Sequence[ModelInput]) -> Any:
        self.parts += [part._replace(token_ids=tuple(part.token_ids)) for part in parts]
        return super().forward(parts)


class Narrow(Watching):
    tree_attention = False

    def move(self, moves: Any) -> None:
        raise AssertionError("there is nothing to move")


def engine_of(llm: nc.LLM, proposer: Any, of: type[Watching] = Watching, blocks: int = 100, **more: Any) -> Any:
    asked = {"num_speculative_tokens": 9, "acceptance_rule": "coupled", "tree_width": 3, **more.pop("asked", {})}
    speculation = Speculation(lambda: proposer, adaptive=False, **asked)
    return Engine(of(toy(), blocks, 4), llm.tokenizer, speculative_config=speculation, **more)


def said_by(llm: nc.LLM, request: Request) -> list[int]:
    return [token for piece in alone(toy(), llm.tokenizer, request)[0] for token in piece.token_ids]


@pytest.mark.parametrize(
    ("of", "asked"),
    [(Narrow, {}), (Watching, {"tree_width": 1}), (Watching, {"acceptance_rule": "block"}), (Watching, {})],
    ids=["a runner without", "one branch", "block", "a tree"],
)
def test_runners_without_tree_attention_use_the_first_branch(llm: nc.LLM, of: Any, asked: dict[str, Any]) -> None:
    request = Request([4, 5, 6], GREEDY)
    said = said_by(llm, request)
    proposer = Fixed((9, said[1], said[2], 9), (ROOT, ROOT, 1, 0))
    engine = engine_of(llm, proposer, of, asked=asked)
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(), llm.tokenizer, request)
    trees = [part for part in engine.runner.parts if part.parents is not None]
    if asked or of is Narrow:
        assert not trees
        assert proposer.told[0] == 0
        assert engine.runner.parts[1].token_ids[3:] == (said[0], 9, 9)
    else:
        assert trees[0].token_ids[4:] == (9, said[1], said[2], 9)
        assert trees[0].parents == (ROOT, ROOT, 1, 0)
        assert (trees[0].num_logits, trees[0].stop - trees[0].start) == (5, 5)
        assert proposer.told[0] == 2


def test_stats_count_tree_depths(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=6))
    said = said_by(llm, request)
    engine = engine_of(llm, Fixed((9, said[1], said[2], 8, 8), (ROOT, ROOT, 1, 1, 0)))
    drive(engine, [request])
    figures = (
        engine.stats.speculative
    )  # the first token alone; two of the tree, and one more; none of two; the last alone
    assert figures[:3] == (4, 7, 2)
    assert (figures.verified_tokens_per_position[:3], figures.accepted_tokens_per_position[:3]) == (
        (2, 1, 0),
        (1, 1, 0),
    )


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_no_branch_goes_past_the_last_token(llm: nc.LLM, most: int) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=most))
    said = said_by(llm, request)
    tree = Fixed((9, *said[1:], 7, 7, 7), (ROOT, ROOT, *range(1, len(said)), 0, 0))
    engine = engine_of(llm, tree)
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(), llm.tokenizer, request)
    for part in engine.runner.parts:
        if part.parents is not None:
            depth = Draft((0,) * len(part.parents), tuple(part.parents)).depth
            assert part.stop - len(part.parents) + depth <= 3 + most - 1
    assert engine.stats.num_steps == min(most, 2)


def test_tree_blocks_are_freed_without_preemption(llm: nc.LLM) -> None:
    star = Fixed([*range(9)], [ROOT] * 3 + [0] * 3 + [1] * 3)
    requests = [Request([place + 1] * 5, GREEDY.replace(max_tokens=40)) for place in range(3)]
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
    """Blocks hold what was said, in its order, though it was read in another: later requests find it there."""
    request = Request([4] * 5, GREEDY.replace(max_tokens=20))
    said = said_by(llm, request)
    engine = engine_of(llm, Grove({((4,) * 5, 1): said}, 1.0, random.Random(2)), asked={"num_speculative_tokens": 14})
    drive(engine, [request])
    assert engine.stats.speculative.accepted_tokens > 8
    prompt = [*[4] * 5, *said]
    for length in range(5, len(prompt) + 1):
        request = Request(prompt[:length], GREEDY)
        [events] = drive(engine, [request])
        assert answers(events, 1) == alone(toy(), llm.tokenizer, request)
    assert engine.stats.prefix_cache_hits > 30


def test_forward_failures_caused_by_trees(llm: nc.LLM) -> None:
    class Failing(Watching):
        def forward(self, parts: Sequence[ModelInput]) -> Any:
            if any(part.parents is not None for part in parts):
                raise RuntimeError("of the tree")
            return super().forward(parts)

    tree = Fixed((9, 7, 8), (ROOT, ROOT, 0))
    engine = engine_of(llm, tree, Failing)
    request = Request([4, 5, 6], GREEDY)
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(), llm.tokenizer, request)
    assert set(tree.told) == {0}
    assert is_empty(engine)


def test_eos_within_a_branch(llm: nc.LLM) -> None:
    ids = llm.tokenizer.encode("The little fox ran home. It was happy.", add_special_tokens=False)

    def says(seen: tuple[int, ...]) -> np.ndarray:
        logits_V = np.zeros(SIZE, np.float32)
        logits_V[ids[min(len(seen) - 1, len(ids) - 1)]] = 50
        return logits_V

    for more, text, reason in (
        ({"stop": "ran"}, "The little fox ", "ran"),
        ({"stop_token_ids": [ids[3]]}, llm.tokenizer.decode(ids[:3]), ids[3]),
        ({"stop_regex": "h[a-z]+e"}, "The little fox ran ", "h[a-z]+e"),
    ):
        request = Request([1], GREEDY.replace(max_tokens=30, **more))
        asked = Speculation(lambda: Grove({((1,), 1): ids}, 1.0, random.Random(1)), 30, adaptive=False, tree_width=9)
        engine = Engine(runner("paged", toy(of=says)), llm.tokenizer, speculative_config=asked)
        [events] = drive(engine, [request])
        [wanted] = alone(toy(of=says), llm.tokenizer, request)
        assert answers(events, 1) == [wanted]
        assert "".join(event.chunk.text for event in events) == text
        assert events[-1].chunk.stop_reason == reason
        assert engine.stats.sampled_tokens == events[-1].usage.completion_tokens == len(wanted)
        assert engine.stats.num_steps <= 3


class Last(Oracle):
    """The right token is the last of three siblings."""

    def draft(self, state: DraftContext, count: int) -> Draft:
        right = super().draft(state, count).tokens
        tokens = [token for one in right for token in (4095, 4094, one)]
        parents = [ROOT if depth == 0 else depth * 3 - 1 for depth in range(len(right)) for _ in range(3)]
        return Draft(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("name", ["coupled", "rejection"])
def test_jump_forward_tokens_in_trees_and_chains(llm: nc.LLM, grammars: GrammarCompiler, name: str) -> None:
    digits = [llm.tokenizer.encode(f"x{digit}", add_special_tokens=False)[-1] for digit in range(10)]
    form = nc.StructuredOutputs(regex="([0-9] and [0-9] or){4}")
    request = Request([5, 6], GREEDY.replace(structured_outputs=form, max_tokens=60))
    wanted = alone(toy(), llm.tokenizer, request, grammars)
    found = known([request], [wanted])

    class Three(Last):
        """All siblings are digits, which a form allows at some places, and at the others leaves out."""

        def draft(self, state: DraftContext, count: int) -> Draft:
            draft = super().draft(state, count)
            wrong = [[digit for digit in digits if digit != right] for right in draft.tokens[2::3]]
            tokens = [right if at % 3 == 2 else wrong[at // 3][at % 3] for at, right in enumerate(draft.tokens)]
            return Draft(tuple(tokens), draft.parents)

    steps = []
    for proposer, asked in (
        (Oracle(found), {"tree_width": 1, "num_speculative_tokens": 5}),
        (Three(found), {"num_speculative_tokens": 15}),
    ):
        engine = engine_of(llm, proposer, asked={"acceptance_rule": name, **asked}, backend="reference")
        [events] = drive(engine, [request])
        assert answers(events, 1) == wanted
        steps.append((engine.stats.num_steps, engine.stats.speculative.accepted_tokens))
    assert steps[0][1] > 2
    assert steps[0] == steps[1]


def test_perfect_trees_need_as_few_steps_as_perfect_chains(llm: nc.LLM) -> None:
    request = Request([4, 5, 6], GREEDY.replace(max_tokens=13))
    said = said_by(llm, request)
    engine = engine_of(llm, Last({((4, 5, 6), 1): said}), asked={"num_speculative_tokens": 12})
    [events] = drive(engine, [request])
    assert answers(events, 1) == alone(toy(), llm.tokenizer, request)
    assert engine.stats.num_steps == 1 + -(-12 // 5)
    assert rule((1,)).shape == (SIZE,)


def test_select_all_nodes() -> None:
    tree = Draft((1, 2, 3), (ROOT, ROOT, 0))
    assert select_nodes(tree, [0, 1, 2]) is tree
    assert select_nodes(Draft((1, 2), (ROOT, 0)), [0, 1]).parents is None
    assert select_nodes(tree, [0, 2]).parents is None


class Bushy(Silent):
    """Three siblings at each of four depths; the second one is right until a depth."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def draft(self, state: DraftContext, count: int) -> Draft:
        self.counts.append(count)
        parents = [-1 if depth == 0 else 3 * depth - 2 for depth in range(4) for _ in range(3)]
        return Draft(tuple(range(12))[:count], tuple(parents)[:count])


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_adaptive_trees_are_truncated(right: int) -> None:
    """Its tokens are all asked for, and each depth has the price of three."""
    proposer = AdaptiveProposer(made := Bushy(), trees=True)
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
    """On the branch that is right it ends the answer, after what was right before; on another it does not matter."""

    def broken(seen: tuple[int, ...]) -> np.ndarray:
        return np.full(SIZE, np.nan, np.float32) if len(seen) == 6 or seen[-1] == 4000 else rule(seen)

    request, model = Request([4, 5, 6], GREEDY), toy(of=broken)
    wanted = alone(model, llm.tokenizer, request)
    assert wanted[0][-1].finish_reason == "error"
    said = [token for piece in wanted[0] for token in piece.token_ids]
    for tree in (Fixed((4000, said[1], said[2], 7), (ROOT, ROOT, 1, 2)), Fixed((said[1], 4000), (ROOT, ROOT))):
        asked = Speculation(lambda tree=tree: tree, 6, name, adaptive=False, tree_width=2)
        engine = Engine(runner("paged", model), llm.tokenizer, speculative_config=asked, backend="reference")
        [events] = drive(engine, [request])
        assert answers(events, 1) == wanted
        assert is_empty(engine)
