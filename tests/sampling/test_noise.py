"""Noise: published vectors, exact bits, golden numbers. Changing one of these changes every seeded output."""

from __future__ import annotations

import math

import numpy as np
import pytest
from naive_stages import philox

import nucleate as nc
from nucleate.sampling import noise, reference
from nucleate.sampling.stages import Gumbel, Xtc

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_equals_the_vectors_of_random123(counter, key, expected):
    words = noise.philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("step", [0, 7, 2**32 + 5, 2**64 - 1])
@pytest.mark.parametrize("stream", [noise.TOKEN, noise.GROUP, noise.DRAFT])
def test_uniform_uses_the_first_two_words_of_its_counter(seed, step, stream):
    index = np.array([0, 1, 255, 256, 128_255, 2**32 - 1])
    got = noise.uniform(seed, step, stream, index)
    for i, u in zip(index, got, strict=True):
        w0, w1, _, _ = philox((int(i), step % 2**32, step >> 32, stream), (seed % 2**32, seed >> 32))
        assert u == (float(w0 * 2**32 + w1) + 0.5) * 2.0**-64


@pytest.mark.parametrize("word", [0, ONES])
def test_uniform_numbers_are_strictly_between_0_and_1(monkeypatch, word):
    monkeypatch.setattr(noise, "philox", lambda counter, key: (np.full_like(counter[0], word),) * 4)
    u = noise.uniform(0, 0, noise.TOKEN, np.arange(3))
    assert ((u > 0) & (u < 1)).all()
    assert np.isfinite(noise.gumbel(u)).all()
    assert u[0] == (2.0**-65 if word == 0 else 1 - 2.0**-53)


def test_uniform_takes_any_integer_index():
    expected = noise.uniform(3, 4, noise.GROUP, np.array([5, 6]))
    for kind in (np.int16, np.int32, np.uint32, np.int64, np.uint64):
        assert (noise.uniform(3, 4, noise.GROUP, np.array([5, 6], kind)) == expected).all()
    assert noise.uniform(3, 4, noise.GROUP, np.zeros(0, np.int64)).shape == (0,)


def test_golden_uniforms():
    got = noise.uniform(1234, 5, noise.TOKEN, np.array([0, 1, 2, 100_000]))
    assert got.tolist() == [0.2837768186047465, 0.05558044110268363, 0.08759263210806796, 0.8561492368098642]


def test_streams_steps_seeds_and_indices_share_no_number():
    numbers = np.concatenate(
        [
            noise.uniform(seed, step, stream, np.arange(200))
            for seed in (0, 1, 2**32, 2**63)
            for step in (0, 1, 2**32)
            for stream in range(6)
        ]
    )
    assert len(np.unique(numbers)) == len(numbers)


def test_uniform_is_uniform():
    u = noise.uniform(9, 0, noise.TOKEN, np.arange(200_000))
    counts = np.bincount((u * 100).astype(int), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 200  # chi-square, 99 degrees: 1e-6 is at 183


@pytest.mark.parametrize("u", [2.0**-65, 1e-18, 1e-9, 0.1, 0.5, 0.9, 1 - 2.0**-53])
def test_gumbel_is_the_inverse_of_its_distribution(u):
    g = float(noise.gumbel(u))
    assert -math.expm1(-math.exp(-g)) == pytest.approx(u, rel=1e-12)  # P(G > g) = u


def test_the_tails_of_gumbel():
    assert noise.gumbel(2.0**-65) == pytest.approx(65 * math.log(2), rel=1e-15)  # the maximum: 45 nats
    assert noise.gumbel(1 - 2.0**-53) == pytest.approx(-math.log(53 * math.log(2)), rel=1e-15)
    g = noise.gumbel(noise.uniform(2, 0, noise.TOKEN, np.arange(200_000)))
    assert g.mean() == pytest.approx(0.5772156649, abs=0.015)
    assert g.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.015)


def test_fresh_seeds_are_64_bit_and_differ():
    seeds = {noise.fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert max(seeds) >> 60
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_streams_have_the_documented_numbers():
    names = ("TOKEN", "GROUP", "XTC", "ACCEPT", "RESIDUAL", "DRAFT")
    assert [getattr(noise, name) for name in names] == list(range(6))


def test_the_random_decision_of_a_step_is_the_first_number_of_its_stream():
    stages = (Xtc(0.5), Gumbel(77))
    for step in (0, 1, 2**32, 2**64 - 1):
        w0, w1, _, _ = philox((0, step % 2**32, step >> 32, 2), (77, 0))
        assert reference.xtc_uniform(stages, 77, step) == (float(w0 * 2**32 + w1) + 0.5) * 2.0**-64
    assert reference.xtc_uniform((Gumbel(77),), 77, 0) == 1.0  # no random decision is made if it has no effect
    with_xtc = [nc.sample(np.zeros((1, 50)), (Xtc(1e-300), Gumbel(seed)))[0] for seed in range(20)]
    assert with_xtc == [nc.sample(np.zeros((1, 50)), (Gumbel(seed),))[0] for seed in range(20)]
