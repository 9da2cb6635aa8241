"""Coupled verification: with any drafts, the same tokens as without drafts, seed for seed."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_proposers import draft_of

import nucleate as nc
from nucleate.sampling.sampler import Sampler
from nucleate.speculative.acceptance import AcceptanceResult, coupled
from nucleate.speculative.draft import ROOT, Draft, DraftContext
from nucleate.speculative.ngram import NgramProposer

V, LENGTH = 37, 24
LOGITS = np.random.default_rng(1).normal(0, 2.2, (V, V, V)).astype(np.float32)
"""Of the next token, by the last two."""

PARAMS = {
    "greedy": nc.SamplingParams(temperature=0),
    "plain": nc.SamplingParams(),
    "cool": nc.SamplingParams(temperature=0.5),
    "top-p": nc.SamplingParams(top_p=0.7, top_k=9),
    "min-p": nc.SamplingParams(min_p=0.1, temperature=1.5),
    "penalties": nc.SamplingParams(frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.2),
    "dry": nc.SamplingParams(dry_multiplier=1.5, no_repeat_ngram_size=3),
    "xtc": nc.SamplingParams(xtc_probability=0.6, xtc_threshold=0.1),
    "mirostat": nc.SamplingParams(mirostat_tau=2.0),
    "adaptive-p": nc.SamplingParams(adaptive_p_target=0.4),
    "categorical": nc.SamplingParams(draw="categorical"),
    "logprobs": nc.SamplingParams(logprobs=2),
}


class SimulatedEngine:
    """A sampler with a row per sequence, and their shared model. masked: a mask excludes some tokens."""

    def __init__(self, params, seeds, masked=False):
        self.sampler = Sampler(V)
        self.prompts = [[1, 2, 1 + number] for number in range(len(params))]
        self.rows = [
            self.sampler.add(*each, seed=seed) for *each, seed in zip(params, self.prompts, seeds, strict=True)
        ]
        self.seeds, self.masked = seeds, masked
        self.calls = 0

    def ids(self, number):
        return [*self.prompts[number], *self.sampler.output_ids(self.rows[number])]

    def output(self, number):
        return list(self.sampler.output_ids(self.rows[number]))

    def draw(self, numbers, ids):
        """Sample the next tokens of some sequences. ids: all their tokens so far."""
        self.calls += 1
        logits = np.stack([LOGITS[each[-2], each[-1]] for each in ids])
        mask = None
        if self.masked:
            bits = np.ones((len(ids), 64), bool)
            for row, each in zip(bits, ids, strict=True):
                row[(len(each) + each[-1]) % 5 :: 5] = False
            mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        return self.sampler(logits, [self.rows[number] for number in numbers], mask=mask).token_ids.tolist()

    def plain(self):
        for _ in range(LENGTH):
            self.draw(range(len(self.rows)), [self.ids(number) for number in range(len(self.rows))])
        return [self.output(number) for number in range(len(self.rows))]

    def speculative(self, propose):
        """Decode with drafts as an engine does: the logits are computed from the draft tokens."""
        rounds, alive = 0, list(range(len(self.rows)))
        while alive:
            drafts = [propose(number, self.ids(number), LENGTH - len(self.output(number))) for number in alive]
            read = []
            for number, draft in zip(alive, drafts, strict=True):
                before = {ROOT: self.ids(number)}
                for index, token in enumerate(draft.tokens):
                    before[index] = [*before[index - 1 if draft.parents is None else draft.parents[index]], token]
                read.append(before)

            def draw(alive_indices, indices, alive=alive, read=read):
                ids = [read[each][index] for each, index in zip(alive_indices, indices, strict=True)]
                return self.draw([alive[each] for each in alive_indices], ids)

            before = [len(self.output(number)) for number in alive]
            verdicts = coupled(drafts, draw, lambda each, token, alive=alive: len(self.output(alive[each])) == LENGTH)
            for number, draft, verdict, length in zip(alive, drafts, verdicts, before, strict=True):
                assert verdict.error is None
                assert self.output(number)[length:] == verdict.tokens(draft)
            alive = [number for number in alive if len(self.output(number)) < LENGTH]
            rounds += 1
        return [self.output(number) for number in range(len(self.rows))], rounds


def oracles(truth, prompts, rng, share):
    """Proposers that draft the correct tokens with a given probability, else random ones."""

    def token(number, index):
        correct = truth[number][index] if index < LENGTH else 0
        return correct if rng.random() < share else int(rng.integers(V))

    def chain(number, ids, left):
        start = len(ids) - len(prompts[number])
        return Draft(tuple(token(number, start + i) for i in range(int(rng.integers(0, 7)))))

    def tree(number, ids, left):
        start, size = len(ids) - len(prompts[number]), int(rng.integers(1, 12))
        parents, depths = [], []
        for index in range(size):
            parents.append(int(rng.integers(ROOT, index)))
            depths.append(0 if parents[-1] == ROOT else depths[parents[-1]] + 1)
        return Draft(tuple(token(number, start + depth) for depth in depths), tuple(parents))

    return chain, tree


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_drafts_change_nothing(name, masked):
    params, seeds = [PARAMS[name]] * 4, [5, 6, 2**64 - 1, 5]
    truth = SimulatedEngine(params, seeds, masked=masked).plain()
    assert len({tuple(each) for each in truth}) > 1
    rng, rounds = np.random.default_rng(2), {}
    for share in (0.0, 0.7, 1.0):
        world = SimulatedEngine(params, seeds, masked=masked)
        for proposer in oracles(truth, world.prompts, rng, share):
            found, rounds[proposer.__name__, share] = SimulatedEngine(params, seeds, masked=masked).speculative(
                proposer
            )
            assert found == truth
    assert rounds["chain", 1.0] < rounds["chain", 0.7] <= LENGTH
    assert rounds["chain", 1.0] < LENGTH / 2 < rounds["chain", 0.0]
    assert rounds["tree", 1.0] < LENGTH


@pytest.mark.slow
def test_mixed_sequences_in_one_batch():
    params, seeds = list(PARAMS.values()), list(range(len(PARAMS)))
    truth = SimulatedEngine(params, seeds).plain()
    world, proposer = SimulatedEngine(params, seeds), NgramProposer(3, 1)
    found, _ = world.speculative(
        lambda number, ids, left: draft_of(proposer, DraftContext(number, ids, 3), min(4, left - 1))
    )
    assert found == truth
    assert (
        truth
        == [SimulatedEngine([each], [seed]).plain()[0] for each, seed in zip(params[:1], seeds[:1], strict=True)]
        + truth[1:]
    )


@pytest.mark.slow
def test_shared_noise_increases_acceptance():
    """A worse draft model that samples with the noise of the target, or with its own."""
    worse = LOGITS + np.random.default_rng(3).normal(0, 0.7, LOGITS.shape).astype(np.float32)
    rounds = {}
    for other in (0, 1):

        def propose(number, ids, left, other=other):
            tokens, seed = [], 100 + number + 50 * other
            while len(tokens) < 4:
                last = (ids + tokens)[-2:]
                step = len(ids) - 3 + len(tokens)
                tokens.append(int(nc.sample(worse[last[0], last[1]][None], nc.SamplingParams(seed=seed), step=step)[0]))
            return Draft(tuple(tokens))

        world = SimulatedEngine([nc.SamplingParams()] * 3, [100, 101, 102])
        found, rounds[other] = world.speculative(propose)
        assert found == SimulatedEngine([nc.SamplingParams()] * 3, [100, 101, 102]).plain()
    assert rounds[0] < 0.75 * rounds[1]


def test_only_continuing_rows_are_sampled():
    calls = []
    truth = {0: [4, 5, 6, 7], 1: [4, 9, 9, 9], 2: [8, 8, 8, 8]}

    def draw(numbers, indices):
        calls.append((list(numbers), list(indices)))
        return [
            truth[number][0 if index == ROOT else index + 1] for number, index in zip(numbers, indices, strict=True)
        ]

    verdicts = coupled([Draft((4, 5, 6)), Draft((4, 5, 6)), Draft()], draw)
    assert verdicts == [AcceptanceResult((0, 1, 2), 7), AcceptanceResult((0,), 9), AcceptanceResult((), 8)]
    assert calls == [([0, 1, 2], [ROOT] * 3), ([0, 1], [0, 0]), ([0], [1]), ([0], [2])]
    assert coupled([], draw) == []


def test_eos_within_a_draft():
    verdicts = coupled([Draft((4, 5, 6))] * 2, lambda numbers, indices: [5 + index for index in indices], None)
    assert verdicts == [AcceptanceResult((0, 1, 2), 7)] * 2
    correct = []

    def is_done(number, token):
        correct.append((number, token))
        return token == 5 and number == 1

    verdicts = coupled([Draft((4, 5, 6))] * 2, lambda numbers, indices: [5 + index for index in indices], is_done)
    assert verdicts == [AcceptanceResult((0, 1, 2), 7), AcceptanceResult((0,), 5)]
    assert correct == [(0, 4), (1, 4), (0, 5), (1, 5), (0, 6), (0, 7)]


def test_invalid_logits_in_coupled_verification():
    sampler = Sampler(4)
    rows = [sampler.add(nc.SamplingParams(temperature=0), seed=1) for _ in range(2)]
    logits = np.zeros((2, 4, 4), np.float32)
    logits[:, :, 2] = 1
    logits[0, 1] = np.nan

    def draw(numbers, indices):
        return sampler(
            np.stack([logits[number, index + 1] for number, index in zip(numbers, indices, strict=True)]),
            [rows[number] for number in numbers],
        ).token_ids.tolist()

    verdicts = coupled([Draft((2, 2, 2))] * 2, draw)
    assert verdicts == [AcceptanceResult((0,), -1, "no token can be sampled"), AcceptanceResult((0, 1, 2), 2)]
    assert verdicts[0].tokens(Draft((2, 2, 2))) == [2]
    assert sampler.output_ids(rows[0]) == (2,)


def test_the_first_of_equal_siblings_is_accepted():
    tree = Draft((3, 3, 5, 6), (ROOT, ROOT, 1, 0))
    verdicts = coupled([tree], lambda numbers, indices: [{ROOT: 3, 0: 5, 1: 5, 2: 9}[index] for index in indices])
    assert verdicts == [AcceptanceResult((0,), 5)]  # still exact: the other sibling is sampled again
