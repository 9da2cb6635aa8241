"""The random numbers of ``sampling.noise`` as tensor code: the same bits, on any device.

Words of 32 bits are held in int64. A product keeps its low 64 bits, as integers on every device do.
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
    """What the seeds of rows give each round: made once, not in each step."""

    rounds: tuple[torch.Tensor, ...]  #: [2, R, 1] each
    multipliers: tuple[torch.Tensor, torch.Tensor]  #: of even and of odd rounds, [2, 1, 1]
    seeds_R: torch.Tensor
    kernel: bool  #: whether Triton makes the numbers


def keys_of(seeds_R: torch.Tensor, *, kernel: bool = False) -> PhiloxKeys:
    """seeds_R: int64, the bits of integers in 0..2**64 - 1."""
    low, high = seeds_R[:, None] & LOW, (seeds_R[:, None] >> 32) & LOW
    rounds = []
    for i in range(ROUNDS):
        both = [(low + i * WEYL[0]) & LOW, (high + i * WEYL[1]) & LOW]
        rounds.append(torch.stack(both[:: 1 if i % 2 else -1]))
    even = torch.tensor(MULTIPLIERS, device=seeds_R.device)[:, None, None]
    return PhiloxKeys(tuple(rounds), (even, even.flip(0)), seeds_R.contiguous(), kernel)


def words(
    keys: PhiloxKeys, steps_R1: torch.Tensor, stream: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two words of ``noise.philox``, int64 in 0..2**32 - 1. Arguments as of ``uniform``.

    The two halves of a round are one tensor: words 0 and 2, and words 3 and 1. Each round swaps the halves, so that
    every other round has them in the other order.
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
    """Uniform numbers in (0, 1), equal to those of ``noise.uniform`` to the last bit where dtype is float64.

    steps_R1: int64, the bits of integers in 0..2**64 - 1; stream: a constant of ``noise``; index: int64, ids of
    tokens or groups, [N] or [R, N]. In float32, for devices that have no float64, numbers are off by a unit or two of
    the last place: fine-grained where they are small, and only small ones win a race.
    """
    if keys.kernel:
        from nucleate.sampling.backends.triton.triton_philox import launched  # it loads Triton

        return launched(keys.seeds_R, steps_R1, stream, index)
    w0, w1 = words(keys, steps_R1, stream, index)
    if dtype == torch.float64:
        return ((w0.to(dtype) * 2.0**32 + w1 + 0.5) * 2.0**-64).clamp(max=LARGEST)
    return (w0.to(dtype) * 2.0**-32 + (w1.to(dtype) + 0.5) * 2.0**-64).clamp(max=1.0 - 2.0**-24)
