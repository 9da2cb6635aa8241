"""Philox-4x32-10 as torch operations: the same bits as ``sampling.noise``, on any device.

32-bit words are stored in int64, because products need 64 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LOW = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
LARGEST = 1.0 - 2.0**-53


class PhiloxKeys(NamedTuple):
    """The round keys of the seeds of rows, computed once."""

    rounds: tuple[torch.Tensor, ...]  #: [2, R, 1] each
    multipliers: tuple[torch.Tensor, torch.Tensor]  #: of even and of odd rounds, [2, 1, 1]
    seeds_R: torch.Tensor
    use_triton: bool  #: whether a Triton kernel computes the random numbers


def make_keys(seeds_R: torch.Tensor, *, use_triton: bool = False) -> PhiloxKeys:
    """seeds_R: uint64 as int64."""
    low, high = seeds_R[:, None] & LOW, (seeds_R[:, None] >> 32) & LOW
    rounds = []
    for i in range(ROUNDS):
        both = [(low + i * WEYL[0]) & LOW, (high + i * WEYL[1]) & LOW]
        rounds.append(torch.stack(both[:: 1 if i % 2 else -1]))
    even = torch.tensor(MULTIPLIERS, device=seeds_R.device)[:, None, None]
    return PhiloxKeys(tuple(rounds), (even, even.flip(0)), seeds_R.contiguous(), use_triton)


def words(
    keys: PhiloxKeys, steps_R1: torch.Tensor, stream: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two words of ``noise.philox``, int64 in 0..2**32 - 1. Arguments as in ``uniform``.

    Words 0 and 2 are one tensor, words 3 and 1 another. Each round swaps them, so odd rounds store them reversed.
    """
    index, steps = torch.broadcast_tensors(index, steps_R1)
    even, odd = torch.stack((index, (steps >> 32) & LOW)), torch.stack((torch.full_like(index, stream), steps))
    for i, key in enumerate(keys.rounds):
        product = even * keys.multipliers[i % 2]
        even, odd = ((product >> 32) ^ odd ^ key) & LOW, product.flip(0)
    return even[0], odd[1] & LOW


def uniform(
    keys: PhiloxKeys, steps_R1: torch.Tensor, stream: int, index: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Uniform random numbers in (0, 1), [R, N]. In float64 they are equal to ``noise.uniform``.

    steps_R1: uint64 as int64. stream: a constant of ``noise``. index: int64 [N] or [R, N], token or group ids. In
    float32, for devices without float64, they differ by one or two units in the last place. Small numbers, which decide
    a Gumbel draw, keep their resolution.
    """
    if keys.use_triton:
        from nucleate.sampling.backends.triton.triton_philox import launch_uniform  # imports Triton

        return launch_uniform(keys.seeds_R, steps_R1, stream, index)
    w0, w1 = words(keys, steps_R1, stream, index)
    if dtype == torch.float64:
        return ((w0.to(dtype) * 2.0**32 + w1 + 0.5) * 2.0**-64).clamp(max=LARGEST)
    return (w0.to(dtype) * 2.0**-32 + (w1.to(dtype) + 0.5) * 2.0**-64).clamp(max=1.0 - 2.0**-24)
