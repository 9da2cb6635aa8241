"""Trained proposers: acceptance length, independence of the batch, and cleanup after rejection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from neural_loop import Loop
from tokenizers import Tokenizer

from nucleate.models.llama.batched_llama import BatchedLlama
from nucleate.models.llama.numpy_llama import Llama
from nucleate.models.loader import EMBEDDED
from nucleate.models.runner import ModelInput
from nucleate.speculative.draft import Draft, DraftContext, Proposer, TargetOutput
from nucleate.speculative.proposers.neural import EMBEDDED_METHODS, load
from nucleate.speculative.proposers.neural.hidden_states import MAX_PENDING

HEADS = ("medusa", "eagle", "dflash")
BEGINNINGS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park",
    "Tom and his dog Max went to the lake. They saw a big boat",
    "One day, a small bird found a shiny red button in the grass. She wanted to",
    "<|user|>Tell me a story about a fox and a drum.<|end|><|assistant|>",
    "The old farmer had a cow that could not sleep. Every night",
    "<|user|>Write a short story about a bear, a cake and a hat.<|end|><|assistant|>",
)


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(EMBEDDED)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in BEGINNINGS]


@pytest.fixture(scope="module")
def texts(model: Llama, prompts: list[list[int]]) -> list[list[int]]:
    """The prompts, and 60 tokens that the model says after each."""
    loop = Loop(model)
    for ids in prompts:
        loop.add(ids, temperature=0)
    loop.run(60)
    return [text.ids for text in loop.texts]


def features(model: Llama, layers: tuple[int, ...], ids: list[int]) -> np.ndarray:
    """What the target makes of all tokens, read at once."""
    runner = BatchedLlama(model, 8 << 20)
    runner.capture_hidden_states(layers)
    runner.forward([ModelInput(0, ids, 0, len(ids), [*range(20)], 1)])
    return runner.hidden_states


def told(proposer: Proposer, model: Llama, key: int, ids: list[int], start: int = 0) -> None:
    """All but the last token have been read, the proposer learns of those from a place on."""
    if proposer.layers:
        proposer.observe([TargetOutput(key, start, ids[start:-1], features(model, proposer.layers, ids[:-1])[start:])])


def fresh(name: str, model: Llama, ids: list[int], count: int = 4, **state: Any) -> Draft:
    """The draft of a proposer that has seen nothing else."""
    proposer = load(name, model)
    told(proposer, model, 9, ids)
    [draft] = proposer.propose([DraftContext(9, ids, **state)], [count])
    return draft


@pytest.mark.parametrize(("name", "least"), [("draft", 2.4), ("medusa", 1.6), ("eagle", 2.6), ("dflash", 2.1)])
@pytest.mark.fast_cases(2)
def test_mean_acceptance_length(name: str, least: float, model: Llama, prompts: list[list[int]]) -> None:
    plain, loop = Loop(model), Loop(model, load(name, model))
    for ids in prompts:
        plain.add(ids, temperature=0)
        loop.add(ids, temperature=0)
    plain.run(48)
    loop.run(48)
    for with_drafts, without in zip(loop.texts, plain.texts, strict=True):
        assert with_drafts.ids[: len(without.ids)] == without.ids
    assert loop.tau > least


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_sampled_text_is_that_without_drafts(name: str, model: Llama, prompts: list[list[int]]) -> None:
    plain, loop = Loop(model), Loop(model, load(name, model))
    for seed, ids in enumerate(prompts):
        for each in (plain, loop):
            each.add(ids, temperature=(1.0, 0.7)[seed % 2], seed=seed)
    plain.run(30)
    loop.run(30)
    for with_drafts, without in zip(loop.texts, plain.texts, strict=True):
        assert with_drafts.ids[: len(without.ids)] == without.ids
    assert loop.tau > 1.15


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_shared_noise_increases_acceptance(name: str, model: Llama, prompts: list[list[int]]) -> None:
    class Deaf:
        """Draws its drafts with the noise of others."""

        def __init__(self, proposer: Proposer) -> None:
            self.proposer, self.layers, self.observe = proposer, proposer.layers, proposer.observe

        def propose(self, states: list[DraftContext], counts: list[int]) -> list[Draft]:
            return self.proposer.propose([state._replace(seed=state.seed + 77) for state in states], counts)

    def tau_of(proposer: Any) -> float:
        loop = Loop(model, proposer)
        for seed, ids in enumerate(prompts):
            loop.add(ids, temperature=1.0, seed=seed)
        loop.run(40)
        return loop.tau

    assert tau_of(load(name, model)) > tau_of(Deaf(load(name, model))) + 0.1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_rejections_do_not_change_later_drafts(name: str, model: Llama, prompts: list[list[int]]) -> None:
    loop = Loop(model, load(name, model), tokens=4)
    for seed, ids in enumerate(prompts):
        loop.add(ids, temperature=1.0, seed=seed)
    for _ in range(6):
        drafts = loop.proposer.propose([text.state for text in loop.texts], [4] * len(loop.texts))
        for text, draft in zip(loop.texts, drafts, strict=True):
            if text.read or name == "draft":
                assert len(draft) == 4
                state = text.state._asdict() | {"key": 9}
                assert (
                    fresh(name, model, state.pop("token_ids"), **{k: v for k, v in state.items() if k != "key"}).tokens
                    == draft.tokens
                )
        loop.step(loop.texts, drafts)


@pytest.mark.parametrize("name", ["draft", "eagle", "dflash"])
def test_rejections_do_not_change_the_kv_cache(name: str, model: Llama, prompts: list[list[int]]) -> None:
    loop = Loop(model, load(name, model))
    text = loop.add(prompts[0], temperature=1.0, seed=3)
    loop.run(40)
    loop.proposer.propose([text.state], [1])
    alone = load(name, model)
    told(alone, model, text.key, text.ids)
    alone.propose([text.state], [1])
    count = len(text.ids) - 1
    for ours, theirs in zip(kept(loop.proposer, text.key, count), kept(alone, text.key, count), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=2e-3)


def kept(proposer: Any, key: int, count: int) -> list[np.ndarray]:
    """Keys and values of the tokens of a sequence, of all layers."""
    if hasattr(proposer, "runner"):
        pools, rooms = proposer.runner.caches, proposer._kv_slots
    else:
        layers = getattr(proposer, "_layers", None) or [proposer._layer]
        pools, rooms = [layer.pool for layer in layers], proposer._sequences._kv_slots
    table = rooms.tables[key]
    found = []
    for keys, values in pools:
        found.append(keys[table].transpose(0, 3, 1, 2).reshape(-1, keys.shape[1], keys.shape[2])[:count])
        found.append(values[table].transpose(0, 2, 1, 3).reshape(-1, values.shape[1], values.shape[3])[:count])
    return found


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
@pytest.mark.fast_cases(2)
def test_a_draft_does_not_depend_on_others_in_the_batch(name: str, model: Llama, texts: list[list[int]]) -> None:
    proposer = load(name, model)
    cuts = [text[: 20 + 9 * row] for row, text in enumerate(texts)]
    for key, ids in enumerate(cuts):
        told(proposer, model, key, ids)
    counts = [4, 0, 1, 3, 2, 4]
    warm = [0.0, 1.0, 1.0, 0.7, 0.0, 1.3]
    states = [DraftContext(key, ids, 8, key, warm[key]) for key, ids in enumerate(cuts)]
    for _ in range(2):  # nothing new was read in between
        drafts = proposer.propose(states, counts)
        for state, count, draft in zip(states, counts, drafts, strict=True):
            assert len(draft) == count
            alone = fresh(
                name,
                model,
                [*state.token_ids],
                count,
                num_prompt_tokens=8,
                seed=state.seed,
                temperature=state.temperature,
            )
            assert alone.tokens == draft.tokens
            assert draft.distributions is None


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_a_greedy_draft_ignores_seed_and_kind_of_noise(name: str, model: Llama, texts: list[list[int]]) -> None:
    ids = texts[0][:40]
    drafts = [
        fresh(name, model, ids, temperature=0.0, seed=seed, shared_noise=shared)
        for seed in (1, 2)
        for shared in (True, False)
    ]
    assert len({draft.tokens for draft in drafts}) == 1
    assert all(draft.distributions is None for draft in drafts)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", HEADS)
def test_partial_hidden_states_are_enough(name: str, model: Llama, texts: list[list[int]]) -> None:
    agree = total = 0
    for text in texts:
        for stop in range(30, 60, 6):
            ids = text[:stop]
            proposer = load(name, model)
            told(proposer, model, 0, ids, start=stop - 14)
            [draft] = proposer.propose([DraftContext(0, ids, temperature=0.0)], [4])
            whole = fresh(name, model, ids, temperature=0.0)
            assert len(draft) == 4
            agree, total = agree + (draft.tokens[0] == whole.tokens[0]), total + 1
    assert agree > 0.7 * total


@pytest.mark.parametrize("name", HEADS)
def test_missing_tokens_restart_the_state(name: str, model: Llama, texts: list[list[int]]) -> None:
    ids, proposer = texts[1][:50], load(name, model)
    state_TF = features(model, proposer.layers, ids[:-1])
    proposer.observe([TargetOutput(0, 0, ids[:10], state_TF[:10])])
    proposer.observe([TargetOutput(0, 30, ids[30:49], state_TF[30:49])])
    late = load(name, model)
    told(late, model, 0, ids, start=30)
    state = DraftContext(0, ids, temperature=0.0)
    assert len(late.propose([state], [4])[0]) == 4
    assert proposer.propose([state], [4])[0].tokens == late.propose([state], [4])[0].tokens


@pytest.mark.parametrize("name", HEADS)
def test_repeated_hidden_states_change_nothing(name: str, model: Llama, texts: list[list[int]]) -> None:
    ids, proposer = texts[2][:50], load(name, model)
    state_TF = features(model, proposer.layers, ids[:-1])
    for start, stop in ((0, 20), (5, 20), (0, 33), (33, 33), (16, 49), (48, 49)):
        proposer.observe([TargetOutput(0, start, ids[start:stop], state_TF[start:stop])])
        proposer.propose([DraftContext(0, ids[: stop + 1], temperature=0.0)], [3])
    assert (
        proposer.propose([DraftContext(0, ids, temperature=0.0)], [4])[0].tokens
        == fresh(name, model, ids, temperature=0.0).tokens
    )


@pytest.mark.parametrize("name", HEADS)
def test_without_the_last_hidden_state_there_is_no_draft(name: str, model: Llama, texts: list[list[int]]) -> None:
    ids, proposer = texts[3][:30], load(name, model)
    state = DraftContext(0, ids, temperature=0.0)
    assert proposer.propose([state], [4]) == [Draft()] or not proposer.propose([state], [4])[0].tokens
    state_TF = features(model, proposer.layers, ids)
    proposer.observe([TargetOutput(0, 0, ids[:25], state_TF[:25])])
    assert not proposer.propose([state], [4])[0].tokens
    assert not proposer.propose([state._replace(token_ids=ids[:20])], [4])[0].tokens
    proposer.observe([TargetOutput(0, 25, ids[25:29], state_TF[25:29])])
    assert len(proposer.propose([state], [4])[0]) == 4


@pytest.mark.parametrize("name", ["eagle", "dflash"])
def test_pending_hidden_states_are_bounded(name: str, model: Llama) -> None:
    proposer: Any = load(name, model)
    random = np.random.default_rng(1)
    for start in range(0, 5000, 100):
        proposer.observe([TargetOutput(0, start, [7] * 100, random.standard_normal((100, 576)).astype(np.float32))])
        known = proposer._sequences._captured[0]
        assert known.count - known.num_processed <= MAX_PENDING
        assert known.stop == start + 100
    assert len(proposer.propose([DraftContext(0, [7] * 5001)], [4])[0]) == 4


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_counts_at_the_edges(name: str, model: Llama, texts: list[list[int]]) -> None:
    ids, proposer = texts[4][:30], load(name, model)
    told(proposer, model, 0, ids)
    most = {"draft": 7, "eagle": 7, "medusa": 4, "dflash": 4}[name]
    assert proposer.propose([], []) == []
    state = DraftContext(0, ids, temperature=0.0)
    drafts = {count: proposer.propose([state], [count])[0].tokens for count in (7, 0, 1, 2, 7)}
    assert {count: len(tokens) for count, tokens in drafts.items()} == {7: most, 0: 0, 1: 1, 2: 2}
    assert drafts[7][:2] == drafts[2]
    assert drafts[7][:1] == drafts[1]
    assert not proposer.propose([DraftContext(1, [], temperature=0.0)], [4])[0].tokens


def test_the_draft_model_recomputes_rejected_tokens(model: Llama, texts: list[list[int]]) -> None:
    proposer, ids = load("draft", model), texts[0][:30]
    [draft] = proposer.propose([DraftContext(0, ids, temperature=0.0)], [4])
    for other in ([*draft.tokens[:1], 5, 6, 7, 8, 9, 10], [5, *draft.tokens[1:], 11], [*draft.tokens, 3]):
        proposer.propose([DraftContext(0, ids, temperature=0.0)], [4])
        longer = [*ids, *other]
        [after] = proposer.propose([DraftContext(0, longer, temperature=0.0)], [4])
        assert after.tokens == fresh("draft", model, longer, temperature=0.0).tokens
        proposer.forget(0)


def test_the_draft_model_ends_with_its_context(model: Llama) -> None:
    proposer = load("draft", model)
    ids = np.random.default_rng(0).integers(5, 4096, 1030).tolist()
    for length, count in ((1020, 4), (1022, 3), (1024, 1), (1025, 0), (1030, 0), (1021, 4)):
        assert len(proposer.propose([DraftContext(length, ids[:length], temperature=0.0)], [4])[0]) == count


@pytest.mark.parametrize("name", EMBEDDED_METHODS)
def test_forgotten_sequences_free_their_memory(name: str, model: Llama, texts: list[list[int]]) -> None:
    proposer: Any = load(name, model)
    for key, ids in enumerate(texts):
        told(proposer, model, key, ids)
    proposer.propose([DraftContext(key, ids) for key, ids in enumerate(texts)], [3] * len(texts))
    for key in range(len(texts)):
        proposer.accepted(key, 1)
        proposer.forget(key, [1, 2])
        proposer.forget(key)
    held = getattr(proposer, "_sequences", proposer)
    assert not getattr(held, "_captured", None)
    assert not getattr(held, "_last", None)
    assert not getattr(held, "_readers", None)
    if rooms := getattr(held, "_kv_slots", None):
        assert not rooms.tables
        assert sorted(rooms.free) == list(range(4096 if name != "draft" else proposer.runner.blocks))


@pytest.mark.parametrize(
    "make", [lambda w, m: small(m, 8), lambda w, m: head("eagle", m, 128), lambda w, m: head("dflash", m, 128)]
)
def test_idle_sequences_are_evicted(make: Callable[..., Any], model: Llama, texts: list[list[int]]) -> None:
    proposer = make(None, model)
    for key, ids in enumerate(texts[:4]):
        told(proposer, model, key, ids[:50])
        assert len(proposer.propose([DraftContext(key, ids[:50], temperature=0.0)], [4])[0]) == 4  # 4 of 8 blocks each
    lone = proposer.propose(
        [DraftContext(key, ids[:50], temperature=0.0) for key, ids in enumerate(texts[:4])], [4] * 4
    )
    assert 1 <= sum(len(draft) == 4 for draft in lone) <= 2
    long = [5] * 400
    told(proposer, model, 9, long[:200])
    assert not proposer.propose([DraftContext(9, long[:200], temperature=0.0)], [4])[0].tokens


def small(model: Llama, blocks: int) -> Any:
    from nucleate.speculative.proposers.neural.draft_model import DraftModel

    whole: Any = load("draft", model)
    return DraftModel(whole.runner.model, blocks * 16 * whole.runner.model.token_bytes)


def head(name: str, model: Llama, tokens: int) -> Any:
    from nucleate.speculative.proposers.neural.weights import weights_for

    return type(load(name, model))(*weights_for(name, model), tokens=tokens)  # type: ignore[call-arg]
