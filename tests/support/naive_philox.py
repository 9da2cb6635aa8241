"""Philox-4x32-10 in plain Python."""

from __future__ import annotations


def philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def uniform(seed, step, stream, index):
    word0, word1, _, _ = philox((index, step % 2**32, step >> 32, stream), (seed % 2**32, seed >> 32))
    return (word0 * 2**32 + word1 + 0.5) / 2**64


def token_word(seed, step, token, stream=6):
    """The 32 bits of a token for watermarks."""
    group = token // 256
    block = group // 4 * 256 + token % 256
    return philox((block, step % 2**32, step >> 32, stream), (seed % 2**32, seed >> 32))[group % 4]
