"""The noise of ``core.noise`` as tensor code: the same bits, on any device. Knows no stage.

All of it is integers of 64 bits whose products never overflow, so that no device and no compiler can differ.
"""

from __future__ import annotations

import torch

from nucleate.core.noise import GROUP, GROUP_SIZE, TOKEN

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
LARGEST = 1.0 - 2.0**-53


def product(c: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a product of numbers below 2**32, in two parts of 48 bits."""
    upper, lower = c * (multiplier >> 16), c * (multiplier & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def words(
    seed: torch.Tensor, step: torch.Tensor, stream: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two words of ``core.noise.philox``, int64 in 0..2**32 - 1. Arguments as of ``uniform``."""
    seed, step, index = torch.broadcast_tensors(seed, step, index)
    c0, c1, c2, c3 = index, step & LOW, (step >> 32) & LOW, torch.full_like(index, stream)
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = product(c0, MULTIPLIERS[0]), product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1


def uniform(
    seed: torch.Tensor, step: torch.Tensor, stream: int, index: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Uniform numbers in (0, 1), equal to those of ``core.noise.uniform`` to the last bit where dtype is float64.

    seed, step: int64, the bits of integers in 0..2**64 - 1; stream: a constant of ``core.noise``; index: int64, ids of
    tokens or groups. They are broadcast. In float32, for devices that have no float64, numbers are off by a unit or two
    of the last place: fine-grained where they are small, and only small ones win a race.
    """
    w0, w1 = words(seed, step, stream, index)
    if dtype == torch.float64:
        u = (w0.to(dtype) * 2.0**32 + w1.to(dtype) + 0.5) * 2.0**-64
        return u.clamp(max=LARGEST)
    u = w0.to(dtype) * 2.0**-32 + (w1.to(dtype) + 0.5) * 2.0**-64
    return u.clamp(max=1.0 - 2.0**-24)


def times(seed: torch.Tensor, step: torch.Tensor, stream: int, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Standard exponential numbers. The least ``times / weight`` wins the race that the highest Gumbel key wins."""
    return -torch.log1p(-uniform(seed, step, stream, index, dtype))


__all__ = ["GROUP", "GROUP_SIZE", "TOKEN", "times", "uniform", "words"]
