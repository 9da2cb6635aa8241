"""Logits of any type and memory layout give the tokens of the reference for the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nucleate as nc
from nucleate.sampling.stages import (
    Categorical,
    Greedy,
    Gumbel,
    LogitBias,
    Logprobs,
    MinP,
    Mirostat,
    Repetition,
    Temperature,
    TopK,
    TopP,
    Typical,
)

SIZES = (1, 31, 256, 257, 777)
ROWS, STEPS = 7, 3

Make = Callable[[np.ndarray], np.ndarray]


def pipelines() -> list[tuple[object, ...]]:
    """Pipelines of the fused kernel, of the fused kernel with edits or logprobs, and of the composed path."""
    return [
        (Temperature(0.7), TopP(0.9), Gumbel(1)),
        (Gumbel(2**64 - 1),),
        (Repetition(1.3), LogitBias({0: 2.0}), TopK(5), MinP(0.05), Gumbel(3)),
        (Logprobs(3, (0,)), Temperature(1.5), Gumbel(4)),
        (Typical(0.9), Gumbel(5)),
        (Mirostat(2.0), Categorical(6)),
        (Greedy(),),
    ]


def grid(size: int) -> np.ndarray:
    """Values that float16 and bfloat16 both represent: [steps, rows, V], some rows with -inf."""
    rng = np.random.default_rng(size)
    x = np.round(rng.normal(size=(STEPS, ROWS, size)) * 12) / 4
    x[:, 1::3][rng.random((STEPS, len(range(1, ROWS, 3)), size)) < 0.3] = -np.inf
    x[..., size // 2] = 1.5
    return x.astype(np.float32)


def tokens(make: Callable[[np.ndarray], Any], backend: str, x: np.ndarray, masked: bool = False) -> list[object]:
    """All results of a Sampler over some steps, for logits made from float32 [rows, V]."""
    size = x.shape[-1]
    sampler = nc.Sampler(size, backend=backend)
    for stages in pipelines():
        sampler.add(stages, [0, size - 1], seed=getattr(stages[-1], "seed", 0))
    results: list[object] = []
    for step in range(len(x)):
        given = make(x[step])
        before = given.tobytes() if isinstance(given, np.ndarray) else given.clone()
        mask = None
        if masked:
            allowed = np.random.default_rng(step).random((ROWS, -(-size // 32) * 32)) < 0.7
            allowed[:, size // 2] = True
            mask = np.packbits(allowed, axis=1, bitorder="little").view("<i4")
        sampled = sampler(given, mask=mask)
        assert not sampled.errors
        same = given.tobytes() == before if isinstance(given, np.ndarray) else bool((given == before).all())
        assert same, "logits were written to"
        assert sampled.logprobs is not None
        report = sampled.logprobs[3]
        assert report is not None
        ranked = [one[::2] for one in (report.chosen, *report.top, *report.requested)]
        results.append((sampled.token_ids.tolist(), ranked))
    return results


def frozen(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x: np.ndarray) -> np.ndarray:
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    buffer[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return buffer[1:].view(x.dtype).reshape(x.shape)


def of_a_tensor(x: np.ndarray, position: int) -> np.ndarray:
    """One position of [B, T, V], with other values around it."""
    wide = np.full((len(x), 3, x.shape[1]), 9.0, x.dtype)
    wide[:, position] = x
    return wide[:, position, :]


def every_second_row(x: np.ndarray) -> np.ndarray:
    wide = np.full((2 * len(x), x.shape[1]), 9.0, x.dtype)
    wide[::2] = x
    return wide[::2]


def every_third_column(x: np.ndarray) -> np.ndarray:
    wide = np.full((len(x), 3 * x.shape[1]), 9.0, x.dtype)
    wide[:, 1::3] = x
    return wide[:, 1::3]


LAYOUTS: dict[str, Make] = {
    "as it is": np.ascontiguousarray,
    "read-only": frozen,
    "the last of a tensor": lambda x: of_a_tensor(x, -1),
    "the first of a tensor": lambda x: of_a_tensor(x, 0),
    "every second row": every_second_row,
    "every third column": every_third_column,
    "rows reversed": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "columns reversed": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "both reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "Fortran order": np.asfortranarray,
    "unaligned": unaligned,
    "rows of a longer one": lambda x: np.pad(x, ((0, 0), (5, 3)), constant_values=9)[:, 5:-3],
}
KINDS = ("<f4", "<f2", "<f8", ">f4", ">f2", ">f8", np.longdouble)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, bool], list[object]]:
    return {
        (size, masked): tokens(np.array, "reference", grid(size), masked) for size in SIZES for masked in (False, True)
    }


@pytest.mark.fast_cases(16)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_batch_of_any_layout_gives_the_same_tokens(
    expected: dict[tuple[int, bool], list[object]], kind: Any, layout: str
) -> None:
    def make(x: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            made = LAYOUTS[layout](x.astype(kind))
        assert np.array_equal(made.astype(np.float32), x)
        return made

    for size in SIZES:
        masked = size == 257 or layout == "as it is"
        assert tokens(make, "cpu", grid(size), masked) == expected[size, masked]


def test_a_broadcast_row_is_read_in_place(expected: dict[tuple[int, bool], list[object]]) -> None:
    """A batch whose rows are one and the same memory."""
    for size in SIZES:
        x = np.repeat(grid(size)[:, :1], ROWS, axis=1)
        got = tokens(lambda rows: np.broadcast_to(rows[0], rows.shape), "cpu", x)
        assert got == tokens(np.array, "reference", x)


TENSORS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: x,
    "the last of a tensor": lambda x: x[:, None].repeat(1, 4, 1)[:, -1, :],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "with a gradient": lambda x: x.clone().requires_grad_(),
    "not from the start": lambda x: x.repeat(2, 1)[len(x) :],
}


@pytest.mark.parametrize("layout", TENSORS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float64"])
def test_a_tensor_of_any_layout_gives_the_same_tokens(
    expected: dict[tuple[int, bool], list[object]], kind: str, layout: str
) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra 'torch'")

    def make(x: np.ndarray) -> Any:
        made = TENSORS[layout](torch.from_numpy(x).to(getattr(torch, kind)))
        assert np.array_equal(made.detach().float().numpy(), x)
        return made

    for size in SIZES:
        assert tokens(make, "cpu", grid(size), size == 257) == expected[size, size == 257]


@pytest.mark.parametrize("kind", ["<f8", ">f8", np.longdouble], ids=str)
def test_a_value_beyond_float32_is_an_infinity_of_its_row_only(kind: Any) -> None:
    x = grid(257)[0].astype(kind)
    x[2, 200], x[4, 256], x[5, 0] = 1e39, -1e39, np.nan
    sampled = []
    for backend in ("cpu", "reference"):
        sampler = nc.Sampler(257, backend=backend)
        for stages in pipelines():
            sampler.add(stages, seed=3)
        sampled.append(sampler(x))
    assert sampled[0].token_ids.tolist() == sampled[1].token_ids.tolist()
    assert sampled[0].errors == sampled[1].errors == {2: "+inf at token 200", 5: "NaN at token 0"}


@pytest.mark.parametrize("kind", ["<f4", "<f2", "<f8"])
def test_a_batch_is_not_read_past_its_end(kind: str) -> None:
    """The row and the mask end at the end of readable memory: reading past it would be detected at once."""
    for size in (1, 31, 33, 255, 257, 700):
        x = grid(size)[0].astype(kind)
        buffer = np.full(x.size + 600, 1e4, kind)
        buffer[300 : 300 + x.size] = x.ravel()
        inside = buffer[300 : 300 + x.size].reshape(x.shape)
        for stages in ((TopP(0.5), Gumbel(1)), (Temperature(2.0), Gumbel(1)), (TopK(3), Gumbel(1))):
            got = nc.sample(inside, stages, backend="cpu").tolist()
            assert got == nc.sample(x.copy(), stages, backend="reference").tolist()
