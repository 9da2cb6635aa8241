"""Random rows, stages with extreme parameters, pipelines and histories."""

from __future__ import annotations

import random

import numpy as np

from nucleate.sampling.history import History
from nucleate.sampling.stage import Combine
from nucleate.sampling.stages import STAGES
from nucleate.sampling.watermark_key import WatermarkKey

KEY = WatermarkKey(b"a key of the tests")
SIZES = (1, 2, 3, 5, 17, 31, 32, 33, 255, 256, 257, 1000)
SEEDS = (0, 1, 2**32, 2**64 - 1)
DRAWS = [name for name, kind in STAGES.items() if kind.rank >= 99]
OTHERS = [name for name, kind in STAGES.items() if name not in DRAWS and not issubclass(kind, Combine)]
KEYED = ("kgw", "synthid", "gumbel_watermark")
"""The stages that need a key."""


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


def ids(rng, size, most, pool=()):
    """Random token ids, from a pool if given."""
    return tuple(rng.choice(pool) if pool else rng.randrange(size) for _ in range(rng.randrange(most)))


def words(rng, size, pool):
    return tuple(word for word in (ids(rng, size, 4, pool) for _ in range(rng.randrange(4))) if word)


def stage(rng, name, size, pool=()):
    """A stage with random, often extreme parameters."""
    chance, e = rng.choice([5e-324, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.99, 1 - 1e-9, 1.0]), [0, 5e-324, 1e-9, 0.003, 0.3, 1.0]
    last_n = rng.choice([None, None, -1, 0, 1, 3, 64, 2**70])
    few = [*pool, *ids(rng, size, 3)]
    made = {
        "logit_bias": lambda: (dict.fromkeys(ids(rng, size, 5), rng.choice([0.0, -100.0, 100.0, 0.5, 1e30, -1e30])),),
        "encoder_repetition": lambda: (rng.choice([1.0, 0.5, 1.3, 1e30]),),
        "repetition": lambda: (rng.choice([5e-324, 1e-5, 0.5, 1.0, 1.1, 2.0, 1e5, 1e308]), last_n),
        "frequency": lambda: (rng.choice([-2.0, -0.1, 0.0, 0.3, 2.0]), last_n),
        "presence": lambda: (rng.choice([-2.0, -0.1, 0.0, 0.3, 2.0]), last_n),
        "dry": lambda: (
            rng.choice([0.0, 5e-324, 0.5, 1.0, 3.0, 1e40, 1.7e308]),
            rng.choice([1.0, 1.0 + 1e-9, 1.75, 10.0, 1e30, 1.7e308]),
            rng.choice([1, 1, 2, 3, 2**70]),
            rng.choice([None, words(rng, size, few), words(rng, size, few)]),
            rng.choice([-1, -1, 0, 1, 2, 5, 9, 64, 2**70]),
        ),
        "no_repeat_ngram": lambda: (rng.choice([0, 1, 2, 2, 3, 4, 2**70]),),
        "min_tokens": lambda: (rng.choice([0, 1, 3, 2**70]), ids(rng, size, 3)),
        "bad_words": lambda: (words(rng, size, few),),
        "suppress": lambda: (ids(rng, size, 4),),
        "allowed": lambda: (rng.choice([None, ids(rng, size, 30), tuple(range(size))]),),
        "mask": lambda: (),
        "temperature": lambda: (rng.choice([0, 5e-324, 1e-300, 1e-5, 0.7, 1.0, 1.3, 10.0, 1e30, 1.7e308]),),
        "dynamic_temperature": lambda: rng.choice(
            [(), (0, 0), (0.1, 0.1), (0.5, 1.5), (0.2, 30.0), (1.0, 1e300), (0.7, 3.0, 0.0), (0.5, 2.0, 3.0)]
        ),
        "quadratic": lambda: (rng.choice([0.0, 1e-9, 0.05, 0.3, 4.5, 1e30]), rng.choice([1.0, 1.001, 2.0, 3.0])),
        "top_n_sigma": lambda: (rng.choice([0, 5e-324, 0.01, 0.7, 1.0, 2.0, 1e30]),),
        "top_k": lambda: (rng.choice([-1, 0, 1, 2, 3, 50, size, size + 1, 2**31 - 1]), rng.random() < 0.4),
        "typical": lambda: (chance,),
        "min_p": lambda: (rng.choice([0, 5e-324, 1e-9, 0.05, 0.3, 0.999, 1.0]),),
        "top_a": lambda: (rng.choice([0, 5e-324, 1e-9, 0.05, 0.3, 1.0]),),
        "epsilon": lambda: (rng.choice(e),),
        "eta": lambda: (rng.choice(e),),
        "p_less": lambda: (rng.choice([False, True]),),
        "top_h": lambda: (rng.choice([None, 5e-324, 1e-9, 0.1, 0.3, 0.62, 0.93, 1.0]),),
        "mirostat": lambda: (
            rng.choice([0.0, 1e-9, 0.7, 2.0, 5.0, 1e6]),
            rng.choice([0.0, 0.1, 1.0, 30.0]),
            rng.choice([None, None, -3.0, 0.0, 1.9, 8.3]),
        ),
        "mirostat_v1": lambda: (
            rng.choice([0.0, 1e-9, 0.7, 2.0, 5.0, 1e6]),
            rng.choice([0.0, 0.1, 1.0, 30.0]),
            rng.choice([None, None, -3.0, 0.0, 1.9, 8.3]),
        ),
        "top_p": lambda: (chance, rng.random() < 0.4),
        "xtc": lambda: (
            rng.choice([0.0, 1e-9, 0.3, 0.5, 1.0, 1.0]),
            rng.choice([0.0, 5e-324, 1e-9, 0.003, 0.07, 0.3, 0.5]),
            ids(rng, size, 4),
        ),
        "adaptive_p": lambda: (
            rng.choice([None, 0.0, 0.05, 0.5, 1.0]),
            rng.choice([0.0, 0.3, 0.9, 0.99]),
            rng.choice([None, None, 0.0, 0.21, 0.7, 1.0]),
        ),
        "logprobs": lambda: (rng.choice([None, 0, 1, 2, 5, size, 2**70]), ids(rng, size, 4)),
        "greedy": lambda: (),
        "kgw": lambda: (
            rng.choice([0.0, 0.5, 2.0, 2.5, 1e30]),
            rng.choice([2.0**-32, 0.25, 0.5, 1 - 2.0**-32]),
            rng.choice([1, 1, 2, 4]),
            rng.random() < 0.5,
            KEY,
        ),
        "synthid": lambda: (rng.choice([0, 1, 5, 30, 32]), rng.choice([1, 1, 2, 4]), KEY),
        "gumbel_watermark": lambda: (rng.choice(SEEDS), rng.choice([1, 1, 2, 4]), KEY),
        "gumbel": lambda: (rng.choice(SEEDS),),
        "categorical": lambda: (rng.choice(SEEDS),),
    }[name]()
    least = {"min_keep": rng.choice([0, 0, 0, 1, 2, 5, size, 2**31 - 1])}
    return STAGES[name](*made, **(least if "min_keep" in STAGES[name].parameters else {}))


def mask(rng, size):
    """A packed mask, sometimes longer than needed, that allows many, half, few or one of the tokens."""
    density = rng.choice([0.98, 0.5, 0.1, 0.0])
    bits = np.random.default_rng(rng.getrandbits(32)).random((-(-size // 32) + rng.randrange(2)) * 32) < density
    bits[rng.randrange(size)] = True
    return np.packbits(bits, bitorder="little").view("<u4").view(np.int32)


def case(seed, most=4):
    """(logits, stages, history, step). The stages end with a selection and have at most one logprobs stage."""
    rng = random.Random(seed)
    size = rng.choice(SIZES)
    pool = ids(rng, size, 4)
    names = rng.sample(OTHERS, rng.randrange(most)) if rng.random() < 0.8 else rng.choices(OTHERS, k=6)
    names = [name for index, name in enumerate(names) if name != "logprobs" or name not in names[:index]]
    if rng.random() < 0.5:
        names.sort(key=lambda name: STAGES[name].rank)
    stages = (*(stage(rng, name, size, pool) for name in names), stage(rng, rng.choice(DRAWS), size))
    prompt, output = (ids(rng, size, rng.choice([2, 8, 25]), pool) for _ in range(2))
    packed = mask(rng, size) if rng.random() < 0.5 else None
    return row(rng, size), stages, History(prompt, output, packed), rng.choice(SEEDS)
