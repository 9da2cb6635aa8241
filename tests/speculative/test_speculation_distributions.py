"""Target distributions along drafts, and the acceptance rules: through the sampler and through the engine."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tiers
from chi_square import assert_follows
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_proposers import NoDrafts, most_likely_tree, pick, sampled_tree, shared_siblings
from test_acceptance_coupled import PARAMS
from test_acceptance_distribution import DRAFTED_VV, PROMPT, Target, V
from toy_models import Toy
from toy_requests import drive, is_empty, runner

import nucleate as nc
from nucleate.engine.engine import Engine
from nucleate.engine.request import Request
from nucleate.engine.verification import DraftMasks
from nucleate.outputs import StepLogprobs
from nucleate.parameters.parameter import param
from nucleate.sampling import noise
from nucleate.sampling.distributions import TargetDistributions, supports_rejection_sampling
from nucleate.sampling.sampler import Sampler
from nucleate.sampling.stage import Floor
from nucleate.sampling.stages import Gumbel, Mask, Mirostat, Typical
from nucleate.sampling.token_logprobs import logprobs
from nucleate.speculative.acceptance import acceptance_uniforms, residual_uniform
from nucleate.speculative.config import Speculation
from nucleate.speculative.draft import Draft, DraftContext, sample_inverse_cdf
from nucleate.structured_output import GrammarCompiler, Guide

SIZE = 37
SUPPORTED = [name for name, params in PARAMS.items() if supports_rejection_sampling(params.build_pipeline())]


def packed(allowed_NV: np.ndarray) -> np.ndarray:
    size = allowed_NV.shape[1]
    wide = np.pad(allowed_NV, ((0, 0), (0, -size % 32)))
    return np.packbits(wide, axis=1, bitorder="little").view(np.int32)


@settings(max_examples=tiers.count(20, 80), deadline=None)
@given(
    st.sampled_from([name for name in PARAMS if name not in ("mirostat", "adaptive-p")]),
    st.integers(0, 2**32),
    st.integers(0, 4),
    st.sampled_from(["reference", "auto"]),
    st.booleans(),
)
def test_distributions_match_sampling(name: str, seed: int, count: int, backend: str, masked: bool) -> None:
    """They equal ``probabilities`` with the preceding draft tokens in the history."""
    rng = np.random.default_rng(seed)
    prompt, output, ahead = (rng.integers(0, SIZE, size).tolist() for size in (6, int(rng.integers(0, 9)), count))
    logits = rng.normal(0, 2, (count + 1, SIZE)).astype(np.float32)
    masks = packed(rng.random((count + 1, SIZE)) < 0.6) if masked else None
    sampler = Sampler(SIZE, backend)
    row = sampler.add(PARAMS[name], prompt, output_ids=output, seed=3)
    distributions = sampler.distributions(row, logits, ahead, masks)
    for index in reversed(range(count + 1)):
        expected = nc.probabilities(
            logits[index : index + 1],
            PARAMS[name],
            prompt_ids=[prompt],
            output_ids=[output + ahead[:index]],
            mask=None if masks is None else masks[index : index + 1],
            backend="reference",
        )[0]
        assert distributions[index].dtype == np.float64
        np.testing.assert_allclose(distributions[index], expected, rtol=1e-9, atol=1e-12)
    assert sampler.output_ids(row) == tuple(output)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_accepting_tokens_equals_sampling_them(name: str, masked: bool) -> None:
    """Histories, steps, states and logprobs are equal, and the distributions along the draft."""
    rng = np.random.default_rng(7)
    count, prompt = 12, [1, 2, 3]
    logits = rng.normal(0, 2, (count, SIZE)).astype(np.float32)
    masks = packed(rng.random((count, SIZE)) < 0.7) if masked else None
    sampling, accepting = Sampler(SIZE, "reference"), Sampler(SIZE, "reference")
    sampled, row = (sampler.add(PARAMS[name], prompt, seed=5) for sampler in (sampling, accepting))
    tokens: list[int] = []
    report: list[StepLogprobs | None] = []
    stages = []
    for index in range(count):
        stages.append(sampling.stages(sampled))
        mask = None if masks is None else masks[index : index + 1]
        out = sampling(logits[index : index + 1], [sampled], mask=mask)
        tokens.append(int(out.token_ids[0]))
        report.append(None if out.logprobs is None else out.logprobs[0])
    distributions = accepting.distributions(row, logits, tokens[:-1], masks)
    for index in range(count):
        mask = None if masks is None else masks[index : index + 1]
        expected = nc.probabilities(
            logits[index : index + 1], stages[index], prompt_ids=[prompt], output_ids=[tokens[:index]], mask=mask
        )
        np.testing.assert_allclose(distributions[index], expected[0], rtol=1e-9, atol=1e-12)
    for index, token in enumerate(tokens):
        found = accepting.accept(row, token, logits[index], None if masks is None else masks[index])
        assert found == report[index]
    assert accepting.output_ids(row) == sampling.output_ids(sampled)
    assert accepting.stages(row) == sampling.stages(sampled)
    more = rng.normal(0, 2, (1, SIZE)).astype(np.float32)
    assert accepting(more, [row]).token_ids == sampling(more, [sampled]).token_ids  # with the noise of the same step


def test_an_explicit_mask_stage_keeps_its_position() -> None:
    """Also with a stateful stage that updates along the draft."""
    rng = np.random.default_rng(3)
    stages = (Typical(0.6), Mask(), Mirostat(2.0), Gumbel(5))
    logits = rng.normal(0, 2, (4, SIZE)).astype(np.float32)
    masks = packed(rng.random((4, SIZE)) < 0.5)
    sampling, accepting = Sampler(SIZE, "reference"), Sampler(SIZE, "reference")
    sampled, row = sampling.add(stages), accepting.add(stages)
    expected, tokens = [], []
    for index in range(4):
        given = logits[index : index + 1], sampling.stages(sampled)
        expected.append(nc.probabilities(*given, output_ids=[tokens], mask=masks[index : index + 1])[0])
        tokens.append(int(sampling(logits[index : index + 1], mask=masks[index : index + 1]).token_ids[0]))
    distributions = accepting.distributions(row, logits, tokens[:-1], masks)
    for index in range(4):
        np.testing.assert_allclose(distributions[index], expected[index], rtol=1e-9, atol=1e-12)


def test_distributions_after_impossible_tokens() -> None:
    sampler = Sampler(SIZE)
    row = sampler.add(nc.SamplingParams(top_k=2, mirostat_tau=0.0))
    logits = np.zeros((3, SIZE), np.float32)
    logits[1, 4] = np.nan
    distributions = sampler.distributions(row, logits, [9, 3])
    assert distributions[0].tolist()[:3] == [0.5, 0.5, 0.0]
    assert np.isnan(distributions[1]).all()
    assert "NaN at token 4" in distributions.errors[1]
    assert distributions[2].sum() == 1
    with pytest.raises(ValueError, match=r"logits must have the shape \[3, 37\], got \[2, 37\]"):
        sampler.distributions(row, logits[:2], [9, 3])
    with pytest.raises(nc.ParameterError):
        sampler.distributions(row + 1, logits, [9, 3])
    invalid = TargetDistributions((Failing(a=1.0), *nc.SamplingParams().build_pipeline()), (), (), logits, ())
    assert np.isnan(invalid[0]).all()
    assert invalid.errors == {0: "ZeroDivisionError: it is torn"}


class Failing(Floor):
    """A stage that raises an error."""

    rank = 1000
    a: float = param("no matter what", neutral=0.0)

    def floor(self, row: object) -> float:
        raise ZeroDivisionError("it is torn")


def test_unsupported_pipelines() -> None:
    """A random decision (XTC) combined with a stateful stage or with logprobs."""
    xtc = {"xtc_probability": 0.5, "xtc_threshold": 0.1}
    for values, expected in [
        ({}, True),
        (xtc, True),
        ({"mirostat_tau": 3.0}, True),
        ({"mirostat_tau": 3.0, **xtc}, False),
        ({"logprobs": 1, **xtc}, False),
        ({"logprobs": 1, **xtc, "xtc_probability": 1.0}, True),
    ]:
        assert supports_rejection_sampling(nc.SamplingParams(**values).build_pipeline()) is expected


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_distributions_along_a_branch_equal_those_of_a_chain(name: str, masked: bool) -> None:
    """With any stage, also stateful ones, and in any order."""
    rng = np.random.default_rng(5)
    parents = [-1, -1, 0, 1, 1, 2, -1, 4, 4, 0]
    tokens = rng.integers(0, SIZE, len(parents)).tolist()
    draft = Draft(tuple(tokens), tuple(parents))
    logits = rng.normal(0, 2, (len(parents) + 1, SIZE)).astype(np.float32)
    masks = packed(rng.random((len(parents) + 1, SIZE)) < 0.7) if masked else None
    sampler = Sampler(SIZE, "reference")
    row = sampler.add(PARAMS[name], [1, 2, 3], output_ids=[4, 1, 4], seed=5)
    distributions = sampler.distributions(row, logits, tokens, masks, parents=parents)
    for line in rng.permutation(len(parents) + 1).tolist():
        path = draft.path(line - 1)
        lines = [0, *[index + 1 for index in path]]
        separate = sampler.distributions(
            row, logits[lines], [tokens[index] for index in path], None if masks is None else masks[lines]
        )
        np.testing.assert_array_equal(distributions[line], separate[len(path)])
    assert sampler.output_ids(row) == (4, 1, 4)


def test_masks_along_branches(llm: nc.LLM, grammars: GrammarCompiler) -> None:
    a, b = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb"))
    grammar = grammars.compile(nc.StructuredOutputs(regex="(aab|bba|abc)+"))
    draft = Draft((a, b, a, b, b, a), (-1, -1, 0, 0, 1, 4))
    masks = DraftMasks(Guide(grammar), draft)
    for line in (6, 2, 4, 0, 3, 1, 5):
        guide = Guide(grammar)
        for index in draft.path(line - 1):
            guide.accept_token(draft.tokens[index])
        np.testing.assert_array_equal(masks[line], guide.mask()[0])


# the distribution of the output


def chain(
    before: int, count: int, seed: int, step: int, distributions_VV: np.ndarray, stream: int = noise.DRAFT
) -> Draft:
    """A chain sampled from the distributions; its length depends on the sampled tokens."""
    tokens: list[int] = []
    distributions: list[np.ndarray] = []
    while len(tokens) < count and 2 not in tokens:
        distributions.append(distributions_VV[tokens[-1] if tokens else before])
        tokens.append(sample_inverse_cdf(distributions[-1], pick(seed, step, len(tokens), stream)))
    return Draft(tuple(tokens), distributions=tuple(distributions))


def honest(distributions: Any) -> Any:
    return distributions


# through an engine


class SamplingProposer(NoDrafts):
    """Drafts of ``make``, whose distributions are reported as ``report`` maps them."""

    def __init__(self, make: Callable[..., Draft] = chain, report: Any = honest, **more: Any) -> None:
        super().__init__()
        self.make, self.report, self.more = make, report, more
        self.tokens, self.width = (2, 1) if make is chain else (6, 2)

    def draft(self, state: DraftContext, count: int) -> Draft:
        assert not state.shared_noise
        before, distributions_VV = state.token_ids[-1], DRAFTED_VV
        if self.make is most_likely_tree:
            return most_likely_tree(before, count, distributions_VV)
        draft = self.make(before, count, state.seed, state.position, distributions_VV, **self.more)
        return Draft(draft.tokens, draft.parents, self.report(draft.distributions))


def text_counts(engine: Engine, params: nc.SamplingParams, trials: int, prompt: Sequence[int] = PROMPT) -> np.ndarray:
    """How often each text of four tokens occurs, with as many seeds. The first token is never drafted."""
    params = params.replace(max_tokens=4, ignore_eos=True)
    counts_4 = np.zeros((engine.vocab_size,) * 4)
    for events in drive(engine, [Request(prompt, params.replace(seed=seed)) for seed in range(trials)]):
        counts_4[tuple(event.chunk.token_ids[0] for event in events)] += 1
    assert is_empty(engine)
    assert engine.stats.speculative.accepted_tokens > trials / 3
    return counts_4


def assert_texts(target: Target, trials: int, rule: str, proposer: Any, llm: nc.LLM) -> None:
    """Compare the texts of an engine with the target distribution."""
    model = Toy(lambda seen: target.logits[seen[-1]], V, 64)
    config = Speculation(lambda: proposer, proposer.tokens, rule, adaptive=False, tree_width=proposer.width)
    engine = Engine(runner("paged", model, 400), llm.tokenizer, speculative_config=config, backend="reference")
    assert_marginals(text_counts(engine, target.params, trials), text_probabilities(target))


def text_probabilities(target: Target) -> np.ndarray:
    """The probability of each text of four tokens."""
    p = np.zeros((V,) * 4)
    for text in itertools.product(range(V), repeat=4):
        if all(target.distribution(text[:index])[text[index]] > 0 for index in range(3)):
            p[text] = np.prod([target.distribution(text[:index])[text[index]] for index in range(4)])
    return p


def assert_marginals(counts_4: np.ndarray, p_4: np.ndarray) -> None:
    """Compare the frequencies of texts of four tokens, and of parts of them."""
    assert_follows(counts_4.ravel(), p_4.ravel())
    for drop in ((0,), (3,), (0, 1), (1, 2), (2, 3)):
        assert_follows(counts_4.sum(axis=drop).ravel(), p_4.sum(axis=drop).ravel())


@functools.cache
def small(**values: Any) -> Target:
    return Target(nc.SamplingParams(**values), seed=2)


PENALTIES = {"top_p": 0.8, "presence_penalty": 0.6}
PROPOSERS = {
    "chain": SamplingProposer(),
    "chain without distributions": SamplingProposer(report=lambda distributions: None),
    "tree": SamplingProposer(sampled_tree),
    "tree of the most likely": SamplingProposer(most_likely_tree),
    "same siblings in all branches": SamplingProposer(shared_siblings),
    "tree without distributions": SamplingProposer(sampled_tree, lambda distributions: None),
}


@pytest.mark.parametrize(
    ("name", "rule"), [("chain", "block"), *((name, "rejection") for name in PROPOSERS)], ids=lambda value: value
)
@pytest.mark.parametrize("values", [{}, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.fast_cases(0)
def test_texts_of_an_engine(llm: nc.LLM, name: str, rule: str, values: dict[str, Any]) -> None:
    trials = tiers.count(500, 1000) if name.startswith("chain") else tiers.count(280, 2000)
    assert_texts(small(**values), trials, rule, PROPOSERS[name], llm)


def flattened(distributions: Any) -> Any:
    return tuple(distribution**0.3 / (distribution**0.3).sum() for distribution in distributions)


@pytest.mark.parametrize(
    "proposer",
    [
        SamplingProposer(stream=noise.ACCEPT),  # sampled with the noise of its verification
        SamplingProposer(sampled_tree, stream=noise.ACCEPT),
        SamplingProposer(sampled_tree, flattened),
    ],
    ids=["noise", "noise of a tree", "distributions"],
)
@pytest.mark.fast_cases(0)
def test_texts_with_wrong_draft_distributions(llm: nc.LLM, proposer: SamplingProposer) -> None:
    with pytest.raises(AssertionError, match="chi-square"):
        assert_texts(small(), 800, "rejection", proposer, llm)


@pytest.mark.exhaustive
def test_grammars_may_forbid_sampled_draft_tokens(llm: nc.LLM) -> None:
    """A sampled token that the grammar rejects must be verified: without it, others would occur too often."""
    a, b, c = (llm.tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("xa", "xb", "xc"))
    outputs_by_prompt = {a: 0, b: 1, c: 2}
    small_logits = np.log([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.3, 0.3, 0.4]])
    wide = np.array([[0.1, 0.3, 0.6], [0.3, 0.1, 0.6], [0.4, 0.4, 0.2]])

    def logits(seen: tuple[int, ...]) -> np.ndarray:
        x_V = np.full(llm.tokenizer.vocab_size, -50, np.float32)
        x_V[[a, b, c]] = small_logits[outputs_by_prompt.get(seen[-1], 0)]
        return x_V

    class Wide(NoDrafts):
        def draft(self, state: DraftContext, count: int) -> Draft:
            draft = chain(outputs_by_prompt.get(state.token_ids[-1], 0), count, state.seed, state.position, wide)
            distributions = []
            for distribution in draft.distributions or ():
                distribution_V = np.zeros(llm.tokenizer.vocab_size)
                distribution_V[[a, b, c]] = distribution
                distributions.append(distribution_V)
            return Draft(tuple((a, b, c)[token] for token in draft.tokens), distributions=tuple(distributions))

    model, trials = Toy(logits, llm.tokenizer.vocab_size, 64), 1000
    config = Speculation(Wide, 3, "rejection", adaptive=False)
    engine = Engine(runner("paged", model, 400), llm.tokenizer, speculative_config=config, backend="reference")
    params = nc.SamplingParams(structured_outputs=nc.StructuredOutputs(regex="[ab]{4}"), max_tokens=6)
    requests = [Request([a], params.replace(seed=seed)) for seed in range(trials)]
    found = Counter("".join(event.chunk.text for event in events) for events in drive(engine, requests))
    p_AA = np.exp(small_logits[:2, :2]) / np.exp(small_logits[:2, :2]).sum(axis=1, keepdims=True)
    target, counts = np.zeros((2,) * 4), np.zeros((2,) * 4)
    for text in itertools.product(range(2), repeat=4):
        target[text] = np.prod([p_AA[x, y] for x, y in itertools.pairwise((0, *text))])
        counts[text] = found["".join("ab"[token] for token in text)]
    assert counts.sum() == trials
    assert_follows(counts.ravel(), target.ravel())
    for axis in range(4):
        others = tuple(set(range(4)) - {axis})
        assert_follows(counts.sum(axis=others), target.sum(axis=others))
    assert engine.stats.speculative.accepted_tokens > trials / 3


def test_draft_distributions_of_another_vocabulary(llm: nc.LLM, caplog: pytest.LogCaptureFixture) -> None:
    target = small()
    proposer = SamplingProposer(
        report=lambda distributions: tuple(np.append(distribution, 0.0) for distribution in distributions)
    )
    model = Toy(lambda seen: target.logits[seen[-1]], 3, 64)
    config = Speculation(lambda: proposer, 2, "rejection", adaptive=False)
    engine = Engine(runner("paged", model, 40), llm.tokenizer, speculative_config=config, backend="reference")
    params = nc.SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    [events] = drive(engine, [Request(PROMPT, params)])
    assert len(events) == 8
    assert caplog.text.count("the proposer failed") == 1
    assert "4 probabilities" in caplog.text


def test_verification_noise_is_independent() -> None:
    """The noise streams of drafts, verification, residuals and normal sampling share no numbers."""
    streams = (noise.TOKEN, noise.GROUP, noise.XTC, noise.ACCEPT, noise.RESIDUAL, noise.DRAFT)
    found = np.stack([noise.uniform(3, 4, stream, np.arange(50)) for stream in streams])
    assert len(np.unique(found)) == found.size
    assert found.min() > 0
    assert found.max() < 1
    assert acceptance_uniforms(3, 4, 50).tolist() == found[3].tolist()
    assert acceptance_uniforms(3, 4, 9).tolist() == found[3, :9].tolist()  # whatever the length of the draft
    assert residual_uniform(3, 4) == found[4, 0]
    for seed, step in ((3, 5), (4, 4)):
        assert not np.isin([*acceptance_uniforms(seed, step, 50), residual_uniform(seed, step)], found).any()


def test_logprobs_are_those_of_the_target(llm: nc.LLM) -> None:
    """Logprobs come from the target's logits at each position, not from the draft."""
    target = small()
    model = Toy(lambda seen: target.logits[seen[-1]], 3, 64)
    config = Speculation(SamplingProposer, 3, "rejection", adaptive=False)
    engine = Engine(runner("paged", model, 40), llm.tokenizer, speculative_config=config, backend="reference")
    params = nc.SamplingParams(max_tokens=20, ignore_eos=True, seed=1, logprobs=3, logprobs_mode="raw")
    [events] = drive(engine, [Request(PROMPT, params)])
    before = PROMPT[-1]
    for event in events:
        [token], [report] = event.chunk.token_ids, event.chunk.logprobs
        expected = logprobs(np.arange(3), target.logits[before], token, 3, ())
        assert [one.token_id for one in report.top] == [one.token_id for one in expected.top]
        assert report.chosen.logprob == pytest.approx(expected.chosen.logprob)
        before = token
    assert engine.stats.speculative.accepted_tokens > 3
