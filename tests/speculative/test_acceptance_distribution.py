"""The output has exactly the target distribution: all ways to produce each text are enumerated.

The target is a Markov model: its logits depend on the last token, and a pipeline is applied to them, so that the
probability of each text is known. Wrong rules must have another distribution. ``test_speculation_distributions`` counts
texts of an engine.
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
    block,
    rejection,
    typical,
)
from nucleate.speculative.draft import ROOT, Draft, exclude_token, normalize

V, LENGTH = 3, 3
PROMPT = (0, 2, 0)


class LazyRows:
    """Distributions that are computed on access."""

    def __init__(self, before, distribution):
        self.before, self.distribution = before, distribution

    def __getitem__(self, row):
        return self.distribution(self.before[row - 1])


class Target:
    """A Markov model behind a pipeline."""

    def __init__(self, params, forbids=None, seed=5):
        self.logits = np.random.default_rng(seed).normal(0, 1.3, (V, V)).astype(np.float32)
        self.params, self.forbids = params, forbids
        self.distribution = functools.cache(self.distribution_after)

    def distribution_after(self, output):
        mask = None
        if self.forbids is not None:
            allowed = [token for token in range(V) if token not in self.forbids(output)]
            mask = np.array([[sum(1 << token for token in allowed)]], np.int32)
        x_V = self.logits[(*PROMPT, *output)[-1]]
        return nc.probabilities(x_V[None], self.params, prompt_ids=[PROMPT], output_ids=[list(output)], mask=mask)[0]

    def texts(self):
        p_VVV = np.zeros((V,) * LENGTH)
        for text in itertools.product(range(V), repeat=LENGTH):
            chances = []  # after an impossible text there is no distribution
            while len(chances) < LENGTH and 0 not in chances:
                chances.append(self.distribution(text[: len(chances)])[text[len(chances)]])
            p_VVV[text] = np.prod(chances)
        return p_VVV

    def rows(self, output, draft):
        """The distribution at each position of a draft, given its own history."""
        before = {ROOT: tuple(output)}
        for index, token in enumerate(draft.tokens):
            before[index] = (*before[index - 1 if draft.parents is None else draft.parents[index]], token)
        return LazyRows(before, self.distribution)


DRAFTED_VV = np.random.default_rng(6).dirichlet(np.full(V, 0.8), V)
"""What the proposers draw from, by the last token: nothing like the target."""


def last(output):
    return (*PROMPT, *output)[-1]


def sampled(output, pick):
    """A chain sampled from its distributions; its length depends on the sampled tokens."""
    tokens, distributions = [], []
    while len(tokens) < 3 and (not tokens or tokens[-1] != 2):
        distributions.append(DRAFTED_VV[last((*output, *tokens))])
        tokens.append(pick(distributions[-1]))
    return Draft(tuple(tokens), distributions=tuple(distributions))


def most_likely(output, pick):
    """A chain of the most likely tokens, without distributions."""
    tokens = []
    for _ in range(2 + (len(output) == 1)):
        tokens.append(int(np.argmax(DRAFTED_VV[last((*output, *tokens))])))
    return Draft(tuple(tokens))


def undisclosed(output, pick):
    """A sampled chain without its distributions: fewer tokens are accepted."""
    return Draft(sampled(output, pick).tokens)


def mixed(output, pick):
    """The first token is sampled, the second is not."""
    distribution = DRAFTED_VV[last(output)]
    return Draft((token := pick(distribution), (token + 1) % V), distributions=(distribution, None))


def most_likely_tree(output, pick):
    """The three most likely tokens, and two after each of the first two."""
    tokens = [int(token) for token in np.argsort(-DRAFTED_VV[last(output)])[:3]]
    for parent in tokens[:2]:
        tokens += [int(token) for token in np.argsort(-DRAFTED_VV[parent])[:2]]
    return Draft(tuple(tokens), (ROOT, ROOT, ROOT, 0, 0, 1, 1))


@functools.cache
def left_of(before, tokens):
    """A distribution without some tokens."""
    distribution = DRAFTED_VV[before]
    for token in tokens:
        distribution = exclude_token(distribution, token)
    return distribution


def distinct_samples(before, count, pick):
    """Siblings sampled without replacement."""
    tokens, distributions = [], []
    while len(tokens) < count:
        distributions.append(left_of(before, tuple(tokens)))
        tokens.append(pick(distributions[-1]))
    return tokens, distributions


def sampled_tree(output, pick):
    """Siblings sampled without replacement: three, and two after each of the first two."""
    tokens, distributions = distinct_samples(last(output), 3, pick)
    for parent in tokens[:2]:
        more, theirs = distinct_samples(parent, 2, pick)
        tokens, distributions = tokens + more, distributions + theirs
    return Draft(tuple(tokens), (ROOT, ROOT, ROOT, 0, 0, 1, 1), tuple(distributions))


def replaced_tree(output, pick):
    """Siblings sampled with replacement, one of them without a distribution."""
    distribution = DRAFTED_VV[last(output)]
    return Draft(
        (pick(distribution), 1, pick(distribution), 0), (ROOT, ROOT, ROOT, 1), (distribution, None, distribution, None)
    )


RULES = {
    "rejection": (rejection, sampled),
    "rejection of most likely tokens": (rejection, most_likely),
    "rejection of samples without distributions": (rejection, undisclosed),
    "rejection of some of both": (rejection, mixed),
    "block": (block, sampled),
    "block of most likely tokens": (block, most_likely),
    "block of some of both": (block, mixed),
    "tree of most likely tokens": (rejection, most_likely_tree),
    "tree of draws": (rejection, sampled_tree),
    "tree with replacement": (rejection, replaced_tree),
}


# wrong rules


def misreported(output, pick):
    """Sampled from one distribution, but another one is reported."""
    draft = sampled(output, pick)
    return Draft(
        draft.tokens, distributions=tuple(normalize(distribution**0.5) for distribution in draft.distributions)
    )


def filtered(output, pick):
    """Sampled, but dropped if the token is unlikely."""
    draft = sampled(output, pick)
    return draft if draft.distributions[0][draft.tokens[0]] > 0.3 else Draft()


def misreported_tree(output, pick):
    """Sampled without replacement, but reported as if with replacement."""
    draft = sampled_tree(output, pick)
    distributions = [DRAFTED_VV[last(output) if parent == ROOT else draft.tokens[parent]] for parent in draft.parents]
    return Draft(draft.tokens, draft.parents, tuple(distributions))


WRONG = {
    "wrong distribution": (rejection, misreported),
    "wrong distribution in a block": (block, misreported),
    "filtered draft": (rejection, filtered),
    "wrong siblings": (rejection, misreported_tree),
    "typical": (typical, most_likely),
    "typical with samples": (typical, sampled),
}


# exact enumeration


def enumerate_outcomes(run):
    """All results of run(decide), with their probabilities. decide(chances) returns one of the indices."""
    scripts = [[]]
    while scripts:
        script, met = scripts.pop(), []

        def decide(chances, script=script, met=met):
            first = next(index for index, each in enumerate(chances) if each > 0)
            index = script[len(met)] if len(met) < len(script) else first
            met.append((index, chances))
            return index

        yield run(decide), float(np.prod([chances[index] for index, chances in met]))
        for turn in range(len(script), len(met)):
            index, chances = met[turn]
            others = [other for other in range(index + 1, len(chances)) if chances[other] > 0]
            scripts += [[*(each for each, _ in met[:turn]), other] for other in others]


class Uniform:
    """A uniform variate whose comparison is a decision: times q, it is below p with probability p / q."""

    def __init__(self, decide, scale=1.0):
        self.decide, self.scale = decide, scale

    def __mul__(self, scale):
        return Uniform(self.decide, float(scale))

    def __lt__(self, limit):
        chance = min(1.0, float(limit) / self.scale)
        return self.decide((chance, 1.0 - chance)) == 0


def steps(target, rule, proposer, output):
    """All results of a step after an output: (draft, accepted tokens, distribution of the next token, probability)."""

    def run(decide):
        draft = proposer(output, decide)
        verdict = rule(target.rows(output, draft), draft, [Uniform(decide)] * len(draft), None)
        return draft, [draft.tokens[index] for index in verdict.path], verdict.token

    for (draft, accepted, left), chance in enumerate_outcomes(run):
        yield draft, accepted, left, chance


def exact_distribution(target, rule, proposer, monkeypatch):
    """The distribution of texts, summed over all ways to produce them."""
    monkeypatch.setattr(acceptance, "sample_inverse_cdf", lambda left, u: left)
    p, reached = np.zeros((V,) * LENGTH), Counter({(): 1.0})
    for length in range(LENGTH):
        for output, before in [(output, chance) for output, chance in reached.items() if len(output) == length]:
            for _, accepted, left, chance in steps(target, rule, proposer, output):
                for token in np.flatnonzero(left):
                    text = (*output, *accepted, int(token))
                    if len(text) < LENGTH:
                        reached[text] += before * chance * left[token]
                    else:  # tokens beyond the end do not matter
                        p[text[:LENGTH]] += before * chance * left[token]
    return p


SMALL = {
    "plain": Target(nc.SamplingParams()),
    "mask": Target(nc.SamplingParams(frequency_penalty=0.8), lambda output: {len(output)} if 1 in output else {3}),
    "top-p": Target(nc.SamplingParams(top_p=0.7), seed=8),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.fast_cases(5)
def test_the_exact_output_distribution_is_the_target(name, rule, monkeypatch):
    p_VVV = SMALL[name].texts()
    assert abs(p_VVV.sum() - 1) < 1e-12
    assert np.abs(exact_distribution(SMALL[name], *RULES[rule], monkeypatch) - p_VVV).max() < 1e-12


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_have_another_exact_distribution(name, monkeypatch):
    p_VVV = exact_distribution(SMALL["plain"], *WRONG[name], monkeypatch)
    assert abs(p_VVV.sum() - 1) < 1e-12
    assert np.abs(p_VVV - SMALL["plain"].texts()).max() > 1e-3


def test_block_verification_accepts_more(monkeypatch):
    monkeypatch.setattr(acceptance, "sample_inverse_cdf", lambda left, u: left)
    more = 0
    for target in SMALL.values():
        for output in ((), (0,), (1,), (2,), (1, 1)):
            accepted = dict.fromkeys((rejection, block), 0.0)
            for rule in accepted:
                for _, tokens, _, chance in steps(target, rule, sampled, output):
                    accepted[rule] += chance * len(tokens)
            assert accepted[block] >= accepted[rejection] - 1e-12
            more += accepted[block] > accepted[rejection] + 0.01
    assert more > 3
