"""Shifts of all tokens, keyed draws and Transforms: the same tokens on every backend, alone and in batches."""

from __future__ import annotations

import dataclasses
import importlib.util
import random

import numpy as np
import pytest
import tiers
from pipeline_cases import mask, row

import nucleate as nc
from nucleate.sampling import reference
from nucleate.sampling.history import History
from nucleate.sampling.incremental_history import IncrementalHistory
from nucleate.sampling.noise import GROUP_SIZE
from nucleate.sampling.stage import Draw, Shift, Transform, param
from nucleate.sampling.stages import (
    Frequency,
    Gumbel,
    GumbelWatermark,
    Kgw,
    LogitBias,
    Logprobs,
    Suppress,
    SynthId,
    Temperature,
    TopK,
    TopP,
    Xtc,
)
from nucleate.sampling.watermark_key import WatermarkKey, token_words, values_below, vocabulary_words

KEY = WatermarkKey(b"a key of the tests")
BACKENDS = ["reference", "cpu", *(["torch"] if importlib.util.find_spec("torch") else [])]


class Steps(Shift):
    """A value per token that depends on the whole history, in float64."""

    touches = "all"
    calls = 0

    def values(self, history, size):
        type(self).calls += 1
        return np.sin(np.arange(size) * (1.0 + len(history.output))) / 3

    def apply(self, x, token):
        return x * (1.0 + token.value) - token.output_count + token.prompt_count / 2


class Constant(Shift):
    """Values that are computed once."""

    touches = "all"
    context = 0
    calls = 0

    def values(self, history, size):
        type(self).calls += 1
        return np.linspace(-1, 1, size, dtype=np.float32)

    def apply(self, x, token):
        return x + token.value


class EveryThird(Shift):
    """A rule without values."""

    touches = "all"

    def apply(self, x, token):
        return x - 0.7 * (token.id % 3)


class Falling(Transform):
    """Removes the tokens whose rank and step have the same parity."""

    n: int = param("Number of tokens that stay", default=2, low=1)

    def apply(self, ids, x, history):
        place = np.arange(len(ids))
        return np.where((place < self.n) | (place % 2 == len(history.output) % 2), x * 0.5, -np.inf)


class Habit(Draw):
    """Gumbel noise from the last token."""

    uniforms = "each"
    score = Gumbel.score

    def noise_key(self, history):
        context = history.context(1)
        return None if context is None or context.repeated else (context.tokens[0], 2**64 - 1)


class InverseHabit(Draw):
    """The inverse CDF with keyed noise."""

    uniforms = "one"

    def weight(self, x, row):
        return np.exp(x - row.top)

    def target(self, row, u):
        return u * row.mass

    def noise_key(self, history):
        return (2**63 + len(history.prompt), len(history.output) // 2)


PIPELINES = [
    (Steps(), Temperature(0.7), Gumbel(3)),
    (Constant(), TopP(0.8), Gumbel(3)),
    (LogitBias({0: 1.5}), Frequency(0.5), Constant(), TopK(5), Gumbel(3)),
    (LogitBias({0: 0.1}), EveryThird(), Steps(), Gumbel(3)),
    (Temperature(0.7), TopK(9), Steps(), TopP(0.9), Gumbel(3)),
    (TopK(9), Constant(), Gumbel(3)),
    (Logprobs(2, (0,)), Constant(), Suppress((0,)), TopP(0.9), Gumbel(3)),
    (Falling(), Gumbel(3)),
    (TopP(0.9), Falling(3), Temperature(1.7), Logprobs(2), Gumbel(3)),
    (Constant(), Falling(3), TopK(2), Constant(), Habit()),
    (Temperature(0.7), TopP(0.9), Habit()),
    (Xtc(0.5, 0.1), Habit()),
    (InverseHabit(),),
    (Kgw(key=KEY), TopP(0.9), GumbelWatermark(1, 2, KEY)),
    (Frequency(0.3), Kgw(5.0, 0.5, 2, True, KEY), SynthId(context=1, key=KEY), GumbelWatermark(context=1, key=KEY)),
    (Suppress((0, 2)), TopK(20), SynthId(context=2, key=KEY), Gumbel(1)),
]


def rows_of(rng, size, count):
    return np.stack([row(rng, size) for _ in range(count)])


@pytest.mark.parametrize("stages", PIPELINES, ids=str)
def test_the_backends_agree_step_by_step(stages):
    """Several rows with other histories, with and without masks."""
    rng = random.Random(str(stages))
    for _ in range(tiers.count(1, 10)):
        size = rng.choice([3, 40, 300, 1300])
        samplers = [nc.Sampler(size, backend=backend) for backend in BACKENDS]
        for seed in range(3):
            for sampler in samplers:
                sampler.add((TopK(3), Gumbel(seed)) if seed == 1 else stages, [seed, 1, 1], output_ids=[2], seed=seed)
        for step in range(5):
            logits = rows_of(rng, size, 3)
            words = np.stack([mask(random.Random(step), size)] * 3) if rng.random() < 0.4 else None
            outputs = [sampler(logits, mask=words) for sampler in samplers]
            for output in outputs[1:]:
                assert output.token_ids.tolist() == outputs[0].token_ids.tolist()
                assert dict(output.errors) == dict(outputs[0].errors)


@pytest.mark.parametrize("stages", PIPELINES, ids=str)
def test_stateless_functions_agree_with_the_sampler(stages):
    logits = np.random.default_rng(5).normal(size=(2, 300)).astype(np.float32) * 3
    output = [[1, 2, 1], [4, 4]]
    for backend in ("reference", "cpu"):
        sampler = nc.Sampler(300, backend=backend)
        for ids in output:
            sampler.add(stages, [1], output_ids=ids, seed=3)
        expected = sampler(logits).token_ids.tolist()
        if "seed" in stages[-1].parameters:
            seeded = (*stages[:-1], dataclasses.replace(stages[-1], seed=3))
            step = [len(ids) for ids in output]
            found = nc.sample(logits, seeded, step=step, prompt_ids=[[1]] * 2, output_ids=output, backend=backend)
            assert found.tolist() == expected
        p = nc.probabilities(logits, stages, prompt_ids=[[1]] * 2, output_ids=output, backend=backend)
        assert p.sum(1) == pytest.approx([1, 1])
        trace = nc.trace(logits[0], stages, prompt_ids=[1], output_ids=output[0], backend=backend)
        assert isinstance(stages[0], Xtc) or np.array_equal(trace.steps[-2].probabilities > 0, p[0] > 0)


def test_values_are_computed_when_their_context_changes():
    sampler = nc.Sampler(40, backend="cpu")
    Constant.calls = Steps.calls = 0
    for stages in ((Constant(), Gumbel(1)), (Steps(), Gumbel(1))):
        sampler.add(stages)
    for _ in range(6):
        sampler(np.zeros((2, 40), np.float32))
    assert Constant.calls == 1
    assert Steps.calls == 6


@pytest.mark.parametrize("n", [1, 2, 4])
def test_contexts_equal_those_computed_from_scratch(n):
    rng = random.Random(n)
    for start in (0, 1, 7):
        output = [rng.randrange(3) for _ in range(start)]
        history = IncrementalHistory((Kgw(key=KEY),), [1, 2], output)
        for _ in range(60):
            expected = History([1, 2], output).context(n)
            found = history.context(n)
            assert found == expected
            if len(output) >= n:
                ends = [output[end - n : end] for end in range(n, len(output))]
                assert found == (tuple(output[len(output) - n :]), output[len(output) - n :] in ends)
            output.append(rng.randrange(3))
            history.append(output[-1])


def test_words_are_the_same_compiled_and_not(monkeypatch):
    nc.warm()
    for size in (1, 255, 257, 1024, 1025, 5000):
        for seed, step in ((0, 0), (2**64 - 1, 2**63 + 5), (123, 2**32)):
            compiled = vocabulary_words(seed, step, size)
            values = values_below(seed, step, size, 2**31, 1.5)
            with monkeypatch.context() as patch:
                patch.setattr("nucleate.sampling.watermark_key.COMPOSED", type("None", (), {"ready": False}))
                assert np.array_equal(vocabulary_words(seed, step, size), compiled)
                assert np.array_equal(values_below(seed, step, size, 2**31, 1.5), values)
                ids = np.random.default_rng(1).integers(0, size, 20)
                assert np.array_equal(token_words(seed, step, ids), compiled[ids])
            assert np.array_equal(token_words(seed, step, ids), compiled[ids])
            assert np.array_equal(values, np.where(compiled < 2**31, 1.5, 0))
    assert len({*vocabulary_words(1, 2, 20 * GROUP_SIZE).tolist()}) > 20 * GROUP_SIZE - 10


class Failing(Shift):
    """Raises, or returns values of a wrong length."""

    touches = "all"
    how: str = param("What goes wrong", default="length", choices=("length", "error", "nan", "infinity"))

    def values(self, history, size):
        if self.how == "error":
            raise RuntimeError("no values")
        return np.full(size + (self.how == "length"), {"nan": np.nan, "infinity": np.inf}.get(self.how, 0.0))

    def apply(self, x, token):
        return x + token.value


class FailingNoise(Draw):
    """Raises for the noise."""

    uniforms = "each"
    score = Gumbel.score

    def noise_key(self, history):
        raise RuntimeError("no noise")


class ShortTransform(Transform):
    """Returns too few scores."""

    def apply(self, ids, x, history):
        return x[:1]


def test_an_error_of_a_stage_ends_its_row_only():
    faults = {
        "values must return 40 values or one number": (Failing(), Gumbel(1)),
        "RuntimeError: no values": (Failing("error"), Gumbel(1)),
        "NaN at token 0 after failing": (Failing("nan"), Gumbel(1)),
        "+inf at token 0 after failing": (Failing("infinity"), Gumbel(1)),
        "RuntimeError: no noise": (FailingNoise(),),
        "short_transform.apply must return 40 scores": (ShortTransform(), Gumbel(1)),
    }
    for backend in BACKENDS:
        sampler = nc.Sampler(40, backend=backend)
        for stages in faults.values():
            sampler.add(stages)
            sampler.add((Gumbel(5),))
        output = sampler(np.zeros((12, 40), np.float32))
        assert [message in output.errors[2 * i] for i, message in enumerate(faults)] == [True] * 6, output.errors
        assert sorted(output.errors) == [0, 2, 4, 6, 8, 10]
        assert output.token_ids[1] >= 0


def test_the_fused_kernel_runs_leading_values_and_keyed_draws():
    nc.warm()
    for stages in ((Kgw(key=KEY), Frequency(0.5), Temperature(0.7), TopP(0.9), Gumbel(1)), (TopK(5), Habit())):
        assert nc.explain(stages, backend="cpu").path == "fused kernel"
    assert "depends on the history" in nc.explain((Habit(),), "cuda").why
    assert "on the CPU" in nc.explain((Kgw(key=KEY), Gumbel(1)), "cuda").why
    assert nc.explain((Temperature(0.5), Kgw(key=KEY), Gumbel(1)), backend="cpu").path == "composed stages"


def test_a_transform_may_ban_and_reorder_tokens():
    kept = reference.survivors(np.array([3, 2, 1, 0], np.float32), (Falling(1), Gumbel(1)), History())
    assert kept.ids_N.tolist() == [0, 2]
    assert kept.x_N.tolist() == [0.0, -1.0]
