"""What is said has the law of the target: chi-square of whole texts and after each beginning, and exactly, by counting.

The target is a Markov model: logits by the last token, through a whole pipeline, so that the law of a text is known.
Each rule meets each pipeline; what only looks like a rule, or lies about its drafts, must fail the same test.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import numpy as np
import pytest

import nucleate as nc
from nucleate.speculative import acceptance
from nucleate.speculative.acceptance import (
    AcceptanceResult,
    acceptance_uniforms,
    block,
    rejection,
    residual_uniform,
    typical,
)
from nucleate.speculative.draft import ROOT, Draft
from nucleate.speculative.draft_distribution import exclude_token, normalize, sample_inverse_cdf

V, LENGTH = 5, 3
TRIALS = 1500
PROMPT = (0, 2, 0)


def critical(degrees):
    """The chi-square that is exceeded once in a million (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.7534 * part**0.5) ** 3


def assert_follows(counts, p):
    """Bins that expect fewer than 8 are put together; what cannot be said never is."""
    assert counts[p <= 0].sum() == 0, "it cannot be said"
    expected = p * counts.sum()
    rare = expected < 8
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1:
        assert counts[-1] < 18, "said too often"
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) > 1:
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic < critical(len(counts) - 1), f"chi-square {statistic:.0f}"


def assert_texts(counts, target, size=V):
    """Whole texts, and the tokens after each beginning."""
    counts_VVV, p_VVV = np.zeros((size,) * LENGTH), target.texts()
    for text, count in counts.items():
        counts_VVV[text] = count
    assert_follows(counts_VVV.ravel(), p_VVV.ravel())
    for length in range(LENGTH):
        for beginning in itertools.product(range(size), repeat=length):
            if p_VVV[beginning].sum() > 0:
                after = counts_VVV[beginning].reshape(size, -1).sum(axis=1)
                assert_follows(after, target.law(beginning))


class Lazy:
    """Rows that are made when they are asked for."""

    def __init__(self, before, law):
        self.before, self.law = before, law

    def __getitem__(self, row):
        return self.law(self.before[row - 1])


class Target:
    """A Markov model behind a pipeline."""

    def __init__(self, params, forbids=None, size=V, seed=5):
        self.logits = np.random.default_rng(seed).normal(0, 1.3, (size, size)).astype(np.float32)
        self.params, self.forbids, self.size = params, forbids, size
        self.law = functools.cache(self.law_after)

    def law_after(self, output):
        mask = None
        if self.forbids is not None:
            allowed = [token for token in range(self.size) if token not in self.forbids(output)]
            mask = np.array([[sum(1 << token for token in allowed)]], np.int32)
        x_V = self.logits[(*PROMPT, *output)[-1]]
        return nc.probabilities(x_V[None], self.params, prompt_ids=[PROMPT], output_ids=[list(output)], mask=mask)[0]

    def texts(self):
        p_VVV = np.zeros((self.size,) * LENGTH)
        for text in itertools.product(range(self.size), repeat=LENGTH):
            chances = []  # of what cannot be said there is no law of what follows
            while len(chances) < LENGTH and 0 not in chances:
                chances.append(self.law(text[: len(chances)])[text[len(chances)]])
            p_VVV[text] = np.prod(chances)
        return p_VVV

    def rows(self, output, draft):
        """The law at each place of a draft, each after its own history."""
        before = {ROOT: tuple(output)}
        for place, token in enumerate(draft.tokens):
            before[place] = (*before[place - 1 if draft.parents is None else draft.parents[place]], token)
        return Lazy(before, self.law)


TARGETS = {
    "plain": Target(nc.SamplingParams()),
    "top-k": Target(nc.SamplingParams(top_k=3, temperature=0.9)),
    "top-p": Target(nc.SamplingParams(top_p=0.8)),
    "min-p": Target(nc.SamplingParams(min_p=0.25, temperature=1.4)),
    "penalties": Target(
        nc.SamplingParams(frequency_penalty=0.9, presence_penalty=0.7, repetition_penalty=1.5, no_repeat_ngram_size=2)
    ),
    "mask": Target(nc.SamplingParams(temperature=1.2), lambda output: {len(output), 3} if 1 in output else {4}),
    "all": Target(nc.SamplingParams(top_p=0.9, min_p=0.05, presence_penalty=0.8), lambda output: {*output[-1:], 0}),
}

DRAFTED = {size: np.random.default_rng(6).dirichlet(np.full(size, 0.8), size) for size in (3, V)}
"""What the proposers draw from, by the last token: nothing like the target."""


def last(output):
    return (*PROMPT, *output)[-1]


def sampled(output, pick, laws_VV):
    """A chain drawn from its laws; its length depends on what was drawn."""
    tokens, laws = [], []
    while len(tokens) < 3 and (not tokens or tokens[-1] != 2):
        laws.append(laws_VV[last((*output, *tokens))])
        tokens.append(pick(laws[-1]))
    return Draft(tuple(tokens), distributions=tuple(laws))


def guessed(output, pick, laws_VV):
    """A chain that depends on what is there only."""
    tokens = []
    for _ in range(2 + (len(output) == 1)):
        tokens.append(int(np.argmax(laws_VV[last((*output, *tokens))])))
    return Draft(tuple(tokens))


def silent(output, pick, laws_VV):
    """Drawn, but told as guessed: less of it is kept."""
    return Draft(sampled(output, pick, laws_VV).tokens)


def mixed(output, pick, laws_VV):
    """The first token drawn, the second not."""
    law = laws_VV[last(output)]
    return Draft((token := pick(law), (token + 1) % len(law)), distributions=(law, None))


def guessed_tree(output, pick, laws_VV):
    """The three likeliest, and after each of the first two another two."""
    tokens = [int(token) for token in np.argsort(-laws_VV[last(output)])[:3]]
    for parent in tokens[:2]:
        tokens += [int(token) for token in np.argsort(-laws_VV[parent])[:2]]
    return Draft(tuple(tokens), (ROOT, ROOT, ROOT, 0, 0, 1, 1))


@functools.cache
def left_of(size, before, tokens):
    """A law without some tokens."""
    law = DRAFTED[size][before]
    for token in tokens:
        law = exclude_token(law, token)
    return law


def drawn(before, size, count, pick):
    """Siblings without replacement."""
    tokens, laws = [], []
    while len(tokens) < count:
        laws.append(left_of(size, before, tuple(tokens)))
        tokens.append(pick(laws[-1]))
    return tokens, laws


def sampled_tree(output, pick, laws_VV):
    """Siblings drawn without replacement: three, and after each of the first two another two."""
    tokens, laws = drawn(last(output), len(laws_VV), 3, pick)
    for parent in tokens[:2]:
        more, their_laws = drawn(parent, len(laws_VV), 2, pick)
        tokens, laws = tokens + more, laws + their_laws
    return Draft(tuple(tokens), (ROOT, ROOT, ROOT, 0, 0, 1, 1), tuple(laws))


def replaced_tree(output, pick, laws_VV):
    """Siblings drawn with replacement, one of them guessed."""
    law = laws_VV[last(output)]
    return Draft((pick(law), 1, pick(law), 0), (ROOT, ROOT, ROOT, 1), (law, None, law, None))


RULES = {
    "rejection": (rejection, sampled),
    "rejection of guesses": (rejection, guessed),
    "rejection of draws without a law": (rejection, silent),
    "rejection of some of both": (rejection, mixed),
    "block": (block, sampled),
    "block of guesses": (block, guessed),
    "block of some of both": (block, mixed),
    "tree of guesses": (rejection, guessed_tree),
    "tree of draws": (rejection, sampled_tree),
    "tree with replacement": (rejection, replaced_tree),
}


def texts(target, rule, proposer):
    """What is said, in rounds of a draft and a verdict each."""
    rng, counts = np.random.default_rng(9), Counter()
    stream = iter(rng.random(TRIALS * 64).tolist())
    for _ in range(TRIALS):
        output = ()
        while len(output) < LENGTH:
            draft = proposer(output, lambda law: sample_inverse_cdf(law, next(stream)), DRAFTED[V])
            verdict = rule(target.rows(output, draft), draft, [next(stream) for _ in draft.tokens], next(stream))
            assert verdict.error is None
            output = (*output, *verdict.tokens(draft))
        counts[output[:LENGTH]] += 1
    return counts


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", TARGETS)
def test_texts_have_the_target_distribution(name, rule):
    assert_texts(texts(TARGETS[name], *RULES[rule]), TARGETS[name])


# what must not pass


def lying(output, pick, laws_VV):
    """Drawn from one law, and another one told."""
    draft = sampled(output, pick, laws_VV)
    return Draft(draft.tokens, distributions=tuple(normalize(law**0.5) for law in draft.distributions))


def picky(output, pick, laws_VV):
    """A token is drawn, and left out if it is not likely."""
    draft = sampled(output, pick, laws_VV)
    return draft if draft.distributions[0][draft.tokens[0]] > 0.3 else Draft()


def careless_tree(output, pick, laws_VV):
    """Without replacement, but told as if with it."""
    draft = sampled_tree(output, pick, laws_VV)
    laws = [laws_VV[last(output) if parent == ROOT else draft.tokens[parent]] for parent in draft.parents]
    return Draft(draft.tokens, draft.parents, tuple(laws))


def keeps_all(p, draft, coins_N, coin):
    return AcceptanceResult(tuple(range(len(draft))), sample_inverse_cdf(normalize(p[len(draft)]), coin))


def without_residual(p, draft, coins_N, coin):
    path, token, _ = rejection(p, draft, coins_N, coin)
    return AcceptanceResult(
        path, token if len(path) == len(draft) else sample_inverse_cdf(normalize(p[len(path)]), coin)
    )


def greedy(p, draft, coins_N, coin):
    """Whatever is asked for, the likeliest token."""
    place = next((i for i, token in enumerate(draft.tokens) if token != np.argmax(p[i])), len(draft))
    return AcceptanceResult(tuple(range(place)), int(np.argmax(p[place])))


def coin_again(p, draft, coins_N, coin):
    """The token after a refusal is chosen by the coin that refused."""
    kept = len(rejection(p, draft, coins_N, coin).path)
    return rejection(p, draft, coins_N, coins_N[kept] if kept < len(draft) else coin)


def aligned(p, draft, coins_N, coin):
    """The last row as if the draft had not been there: with the history of the first."""
    rows = [p[row] for row in range(len(draft))]
    return rejection([*rows, p[0]], draft, coins_N, coin)


WRONG = {
    "wrong law": (rejection, lying),
    "wrong law in a block": (block, lying),
    "left out": (rejection, picky),
    "wrong siblings": (rejection, careless_tree),
    "all is kept": (keeps_all, sampled),
    "no residual": (without_residual, sampled),
    "greedy": (greedy, guessed),
    "a coin for two": (coin_again, sampled),
    "history of another row": (aligned, sampled),
    "typical": (typical, guessed),
    "typical of draws": (typical, sampled),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_fail_the_test(name):
    with pytest.raises(AssertionError, match=r"chi-square|cannot be said|too often"):
        assert_texts(texts(TARGETS["plain"], *WRONG[name]), TARGETS["plain"])


def draft_of(numbers):
    stream = iter(numbers.tolist())
    return sampled((), lambda law: sample_inverse_cdf(law, next(stream)), DRAFTED[V])


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.fast_cases(1)
def test_reused_verification_noise_fails_the_test(rule):
    target, counts = TARGETS["plain"], {False: np.zeros(V), True: np.zeros(V)}
    for step, shared in itertools.product(range(700), (False, True)):
        draft = draft_of(acceptance_uniforms(11 if shared else 12, step, 3))
        verdict = rule(target.rows((), draft), draft, acceptance_uniforms(11, step, 3), residual_uniform(11, step))
        counts[shared][verdict.tokens(draft)[0]] += 1
    assert_follows(counts[False], target.law(()))
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(counts[True], target.law(()))


# exactly


def ways(run):
    """All that run(decide) may come to, with the chance of each; decide(chances) is one of their places."""
    scripts = [[]]
    while scripts:
        script, met = scripts.pop(), []

        def decide(chances, script=script, met=met):
            first = next(place for place, each in enumerate(chances) if each > 0)
            place = script[len(met)] if len(met) < len(script) else first
            met.append((place, chances))
            return place

        yield run(decide), float(np.prod([chances[place] for place, chances in met]))
        for turn in range(len(script), len(met)):
            place, chances = met[turn]
            others = [other for other in range(place + 1, len(chances)) if chances[other] > 0]
            scripts += [[*(each for each, _ in met[:turn]), other] for other in others]


class Coin:
    """A fair coin: times q it is below p in p / q of all cases."""

    def __init__(self, decide, scale=1.0):
        self.decide, self.scale = decide, scale

    def __mul__(self, scale):
        return Coin(self.decide, float(scale))

    def __lt__(self, limit):
        chance = min(1.0, float(limit) / self.scale)
        return self.decide((chance, 1.0 - chance)) == 0


def rounds(target, rule, proposer, output):
    """What a round may say after an output: (draft, tokens of it that stay, the law of the next, chance)."""

    def run(decide):
        draft = proposer(output, decide, DRAFTED[target.size])
        verdict = rule(target.rows(output, draft), draft, [Coin(decide)] * len(draft), None)
        return draft, [draft.tokens[place] for place in verdict.path], verdict.token

    for (draft, kept, left), chance in ways(run):
        yield draft, kept, left, chance


def exactly(target, rule, proposer, monkeypatch):
    """The law of texts, by all ways to them."""
    monkeypatch.setattr(acceptance, "sample_inverse_cdf", lambda left, coin: left)
    p, reached = np.zeros((target.size,) * LENGTH), Counter({(): 1.0})
    for length in range(LENGTH):
        for output, before in [(output, chance) for output, chance in reached.items() if len(output) == length]:
            for _, kept, left, chance in rounds(target, rule, proposer, output):
                for token in np.flatnonzero(left):
                    text = (*output, *kept, int(token))
                    if len(text) < LENGTH:
                        reached[text] += before * chance * left[token]
                    else:  # of a token beyond the end it does not matter which
                        p[text[:LENGTH]] += before * chance * left[token]
    return p


SMALL = {
    "plain": Target(nc.SamplingParams(), size=3),
    "mask": Target(
        nc.SamplingParams(frequency_penalty=0.8), lambda output: {len(output)} if 1 in output else {3}, size=3
    ),
    "top-p": Target(nc.SamplingParams(top_p=0.7), size=3, seed=8),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.fast_cases(15)
def test_the_exact_output_distribution_is_the_target(name, rule, monkeypatch):
    p_VVV = SMALL[name].texts()
    assert abs(p_VVV.sum() - 1) < 1e-12
    assert np.abs(exactly(SMALL[name], *RULES[rule], monkeypatch) - p_VVV).max() < 1e-12


EXACTLY_WRONG = [name for name, (rule, _) in WRONG.items() if rule in (rejection, block, typical)]


@pytest.mark.parametrize("name", EXACTLY_WRONG)
def test_wrong_rules_have_another_exact_distribution(name, monkeypatch):
    p_VVV = exactly(SMALL["plain"], *WRONG[name], monkeypatch)
    assert abs(p_VVV.sum() - 1) < 1e-12
    assert np.abs(p_VVV - SMALL["plain"].texts()).max() > 1e-3


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(acceptance, "sample_inverse_cdf", lambda left, coin: left)
    more = 0
    for target in SMALL.values():
        for output in ((), (0,), (1,), (2,), (1, 1)):
            kept = dict.fromkeys((rejection, block), 0.0)
            for rule in kept:
                for _, tokens, _, chance in rounds(target, rule, sampled, output):
                    kept[rule] += chance * len(tokens)
            assert kept[block] >= kept[rejection] - 1e-12
            more += kept[block] > kept[rejection] + 0.01
    assert more > 3
