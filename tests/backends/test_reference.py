"""The reference against a second meaning in plain Python (naive.py), over random rows and parameters at their edges."""

from __future__ import annotations

import random

import naive
import numpy as np
import pytest

from nucleate.backends import reference
from nucleate.core.stage import History
from nucleate.pipeline import simplify
from nucleate.stages import STAGES, Categorical, Greedy, Gumbel, LogitBias, MinP, Suppress, Temperature, TopK, TopP

SIZES = (1, 2, 3, 5, 17, 255, 256, 257, 1000)


def row(rng, size):
    """Logits of one of several kinds: smooth, heavy ties, holes at -inf, huge, tiny, all equal."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    x = numbers.normal(size=size) * rng.choice([0.1, 1.0, 3.0, 30.0])
    kind = rng.choice(["smooth", "ties", "holes", "huge", "tiny", "equal", "wide"])
    if kind == "ties":
        x = np.round(x)
    if kind == "huge":
        x = x * 1e30
    if kind == "tiny":
        x = x * 1e-30
    if kind == "equal":
        x = np.full(size, x[0])
    if kind == "wide":
        x = np.linspace(-3e38, 3e38, size)
        numbers.shuffle(x)
    if kind == "holes" or rng.random() < 0.2:
        x[numbers.random(size) < rng.choice([0.1, 0.9])] = -np.inf
        x[rng.randrange(size)] = 1.0
    return x.astype(np.float32)


def ids(rng, size, most):
    return tuple(rng.randrange(size) for _ in range(rng.randrange(most)))


def stage(rng, name, size):
    """A stage with parameters at their edges or inside."""
    kind = STAGES[name]
    made = {
        "logit_bias": lambda: (dict.fromkeys(ids(rng, size, 5), rng.choice([0.0, -100.0, 100.0, 0.5, 1e30, -1e30])),),
        "repetition": lambda: (rng.choice([5e-324, 1e-5, 0.5, 1.0, 1.1, 2.0, 1e5, 1e308]),),
        "frequency": lambda: (rng.choice([-2.0, -0.1, 0.0, 0.3, 2.0]),),
        "presence": lambda: (rng.choice([-2.0, -0.1, 0.0, 0.3, 2.0]),),
        "min_tokens": lambda: (rng.choice([0, 1, 3, 2**70]), ids(rng, size, 3)),
        "suppress": lambda: (ids(rng, size, 4),),
        "allowed": lambda: (rng.choice([None, ids(rng, size, 30), tuple(range(size))]),),
        "temperature": lambda: (rng.choice([0, 5e-324, 1e-300, 1e-5, 0.7, 1.0, 1.3, 10.0, 1e30, 1.7e308]),),
        "top_k": lambda: (rng.choice([-1, 0, 1, 2, 3, 50, size, size + 1, 2**31 - 1]),),
        "min_p": lambda: (rng.choice([0, 5e-324, 1e-9, 0.05, 0.3, 0.999, 1.0]),),
        "top_p": lambda: (rng.choice([5e-324, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.99, 1 - 1e-9, 1.0]),),
        "top_n_sigma": lambda: (rng.choice([0, 5e-324, 0.01, 0.7, 1.0, 2.0, 1e30]),),
        "top_a": lambda: (rng.choice([0, 5e-324, 1e-9, 0.05, 0.3, 1.0]),),
        "epsilon": lambda: (rng.choice([0, 5e-324, 1e-9, 0.003, 0.3, 1.0]),),
        "eta": lambda: (rng.choice([0, 5e-324, 1e-9, 0.003, 0.3, 1.0]),),
        "p_less": lambda: (rng.choice([False, True]),),
        "greedy": lambda: (),
        "gumbel": lambda: (rng.choice([0, 1, 2**32, 2**64 - 1]),),
        "categorical": lambda: (rng.choice([0, 1, 2**32, 2**64 - 1]),),
    }[name]()
    return kind(*made)


DRAWS = [name for name, kind in STAGES.items() if kind.rank >= 99]
OTHERS = [name for name in STAGES if name not in DRAWS]


def case(seed):
    rng = random.Random(seed)
    size = rng.choice(SIZES)
    names = rng.sample(OTHERS, rng.randrange(4)) if rng.random() < 0.8 else rng.choices(OTHERS, k=6)
    if rng.random() < 0.5:
        names.sort(key=lambda name: STAGES[name].rank)
    stages = (*(stage(rng, name, size) for name in names), stage(rng, rng.choice(DRAWS), size))
    return row(rng, size), stages, History(ids(rng, size, 8), ids(rng, size, 8)), rng.choice([0, 1, 2**32, 2**64 - 1])


def drawn(logits, stages, history, step):
    try:
        return reference.draw(logits, stages, getattr(stages[-1], "seed", 0), step, history)
    except reference.RowError:
        return None


def test_survivors_probabilities_and_draws_equal_the_naive_ones():
    errors = 0
    for seed in range(4000):
        logits, stages, history, step = case(seed)
        try:
            order, x = naive.run(logits, stages, *history)
        except naive.BadRowError:
            errors += 1
            for call in (reference.survivors, reference.probabilities):
                with pytest.raises(reference.RowError):
                    call(logits, stages, history)
            continue
        kept = reference.survivors(logits, stages, history)
        assert kept.ids_N.tolist() == order, (seed, stages)
        assert kept.x_N.tolist() == pytest.approx(list(x.values()), rel=1e-14), (seed, stages)
        p = reference.probabilities(logits, stages, history)
        assert p.tolist() == pytest.approx(naive.probabilities(logits, stages, *history), rel=1e-9, abs=1e-300)
        assert p.sum() == pytest.approx(1.0)
        token = drawn(logits, stages, history, step)
        assert token == naive.draw(logits, stages, step, *history), (seed, stages)
        assert p[token] > 0
    assert 40 < errors < 1000


def test_simplify_changes_no_draw_and_no_probability():
    for seed in range(4000, 7000):
        logits, stages, history, step = case(seed)
        short = simplify(stages)
        assert simplify(short) == short
        token = drawn(logits, stages, history, step)
        assert token == drawn(logits, short, history, step), (seed, stages)
        if token is not None:
            p = reference.probabilities(logits, stages, history)
            assert (p == reference.probabilities(logits, short, history)).all(), (seed, stages)


GOLDEN = {
    "gumbel": [568, 568, 1389, 1088, 173, 448, 1655, 718, 1334, 568, 99, 544],
    "categorical": [1680, 1285, 1284, 1384, 1187, 1408, 1680, 1680, 1853, 915, 1385, 942],
}


@pytest.mark.parametrize("kind", [Gumbel, Categorical])
def test_golden_draws(kind):
    """Fixed for ever: whoever changes one of these changes every seeded answer of every user."""
    logits = (np.arange(2000) * 7919 % 2000 / 200).astype(np.float32)
    stages = (Temperature(0.8), TopP(0.98), kind(0))
    pairs = [(seed, step) for seed in (0, 42, 2**64 - 1) for step in (0, 1, 2**33, 2**64 - 1)]
    got = [reference.draw(logits, stages, seed, step) for seed, step in pairs]
    assert got == GOLDEN[kind.name]


@pytest.mark.parametrize("draw", [Greedy(), Gumbel(0), Categorical(0)])
def test_one_token_is_always_drawn(draw):
    for size in (1, 300):
        logits = np.full(size, -np.inf, np.float32)
        logits[size - 1] = -3e38
        assert reference.draw(logits, (draw,), 5, 7) == size - 1


def test_ties_go_to_the_lowest_id():
    logits = np.array([1, 2, 2, 2, 0], np.float32)
    assert reference.survivors(logits, (TopK(2),)).ids_N.tolist() == [1, 2]
    assert reference.draw(logits, (Greedy(),), 0, 0) == 1
    assert reference.survivors(logits, (LogitBias({0: 1.0}), TopK(2))).ids_N.tolist() == [0, 1]


def test_a_scale_leaves_the_order_even_where_rounding_makes_ties():
    logits = np.array([0, 1e-30], np.float32)
    for after in (TopK(1), Greedy()):
        stages = (Temperature(1e300), after, Gumbel(0)) if after != Greedy() else (Temperature(1e300), after)
        assert reference.draw(logits, stages, 0, 0) == reference.draw(logits, simplify(stages), 0, 0) == 1


def test_a_ban_after_greedy_still_holds():
    stages = (TopK(1), Suppress((0,)), Gumbel(0))
    logits = np.array([2, 1], np.float32)
    for each in (stages, simplify(stages)):
        with pytest.raises(reference.RowError, match="every token is at -inf after suppress"):
            reference.draw(logits, each, 0, 0)


def test_overflow_drops_tokens_and_warns_nobody():
    logits = np.array([3e38, -3e38, 0], np.float32)
    stages = (Temperature(1e-300), TopP(0.9), MinP(0.1), Gumbel(0))
    assert reference.survivors(logits, stages).ids_N.tolist() == [0]
    bias = (LogitBias({0: 1.7e308, 1: -1.7e308}), TopP(0.9), Gumbel(1))
    assert reference.probabilities(logits, bias).tolist() == [1, 0, 0]


def test_the_statistics_of_a_row():
    got = reference.statistics(np.array([1.0, 2.0, 4.0]))
    p = np.exp([-3, -2, 0]) / np.exp([-3, -2, 0]).sum()
    assert (got.n, got.top) == (3, 4.0)
    assert got.mass == pytest.approx(1 + np.exp(-2) + np.exp(-3))
    assert got.square == pytest.approx(1 + np.exp(-4) + np.exp(-6))
    assert got.entropy == pytest.approx(-(p * np.log(p)).sum())
    assert (got.mean, got.var) == pytest.approx((7 / 3, np.var([1, 2, 4])))
    single = reference.statistics(np.array([-1e30]))
    assert tuple(single) == (1, -1e30, 1.0, 1.0, 0.0, -1e30, 0.0)
    assert reference.statistics(np.full(10, 3e38)).var == 0
    with np.errstate(over="ignore"):
        far = reference.statistics(np.array([1.7e308, -1.7e308]))
    assert (far.mass, far.entropy) == (1.0, 0.0)


def test_the_logits_given_are_not_written_to():
    logits = np.array([1, 2, 3], np.float32)
    logits.flags.writeable = False
    reference.draw(logits, (LogitBias({1: 5.0}), Temperature(0.5), Gumbel(1)), 1, 0)
    assert logits.tolist() == [1, 2, 3]
