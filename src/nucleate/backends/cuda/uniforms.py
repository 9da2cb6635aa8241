"""The uniform numbers of rows by a kernel: one launch instead of the operations of ``noise``. Knows no stage."""

from __future__ import annotations

import torch
import triton.language as tl
from triton import jit

from nucleate.backends.cuda.special.noise import uniform

BLOCK = 256


@jit
def uniforms(seeds, steps, index, stride, stream, count, out, block: tl.constexpr):
    """Grid: parts of ``block`` numbers; rows. seeds, steps: int64 [R]; index: int64, a row is ``stride`` on."""
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    ids = tl.load(index + row * stride + place, mask=place < count, other=0)
    u = uniform(tl.load(seeds + row), tl.load(steps + row), stream, ids)
    tl.store(out + row * count + place, u, mask=place < count)


def launched(seeds_R: torch.Tensor, steps_R1: torch.Tensor, stream: int, index: torch.Tensor) -> torch.Tensor:
    """See ``noise.uniform``: float64 [R, N]."""
    count, index = index.shape[-1], index.contiguous()
    out_RN = torch.empty((len(seeds_R), count), dtype=torch.float64, device=seeds_R.device)
    grid, stride = (-(-count // BLOCK), len(seeds_R)), count if index.dim() > 1 else 0
    uniforms[grid](seeds_R, steps_R1, index, stride, stream, count, out_RN, block=BLOCK, num_warps=4)
    return out_RN
