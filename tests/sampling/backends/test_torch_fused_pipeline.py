"""The fused pipeline on tensors, one call for rows with any parameters: survivors and tokens equal the reference's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import edge_rows as edges
import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import reference, signature
from nucleate.sampling.history import History
from nucleate.sampling.pipeline import FusedParams, simplify
from nucleate.sampling.stages import (
    AdaptiveP,
    Categorical,
    DynamicTemperature,
    Gumbel,
    Logprobs,
    Mask,
    Mirostat,
    Temperature,
    TopH,
    TopP,
    Typical,
    Xtc,
)

torch = pytest.importorskip("torch", reason="tensor code needs torch")
from nucleate.sampling.gpu import batch_sampling, batch_view  # noqa: E402

STAGES = (
    (Typical(0.5), Xtc(0.5, 0.05), Temperature(0.7), Gumbel(0)),
    (DynamicTemperature(0.5, 1.5), TopH(0.5), TopP(0.5, of_full_mass=True), Categorical(0)),
    (Mirostat(2.0), AdaptiveP(0.3), Gumbel(0)),
)
SIZES = (1, 2, 31, 255, 256, 257, 700, 1000)


def words(rng: np.random.Generator, rows: int) -> torch.Tensor:
    return torch.from_numpy(edges.words(rng, rows))


def unsigned(words_R: torch.Tensor) -> list[int]:
    return [word % 2**64 for word in words_R.tolist()]


def sample(
    x_RV: Any,
    row_params: list[FusedParams],
    seeds: torch.Tensor,
    steps: torch.Tensor,
    mask: torch.Tensor | None = None,
    floats: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The tokens of rows with these parameters."""
    batch = batch_sampling.make_batch(signature.fused_signatures(row_params), seeds, x_RV.shape[1], floats)
    return batch_sampling.run(
        batch, batch_sampling.StepInput(batch_sampling.to_scores(x_RV, torch.zeros(1, dtype=floats)), steps, mask)
    ).tokens_R


def inside(x_RV: np.ndarray, row_params: list[FusedParams]) -> np.ndarray:
    """The surviving tokens as bool [R, V], as a Tap before the draw gets them."""
    tap, zeros = signature.pipeline_signature((Logprobs(1), Gumbel(0))), torch.zeros(len(row_params), dtype=torch.int64)
    fused_signatures = signature.fused_signatures(row_params)
    steps = (
        *fused_signatures[0].signatures[: -1 if len(fused_signatures[0].signatures) > 1 else 0],
        tap.signatures[0],
        tap.signatures[1],
    )
    if fused_signatures[0].signatures[-1].greedy:
        steps = (*fused_signatures[0].signatures, *tap.signatures)
    batch = batch_sampling.make_batch(
        [one._replace(signatures=steps) for one in fused_signatures], zeros, x_RV.shape[1], torch.float64
    )
    return np.asarray(
        batch_sampling.run(batch, batch_sampling.StepInput(torch.from_numpy(x_RV).double(), zeros)).tapped_RV
        > -torch.inf
    )


def survey(rows: int, sizes: tuple[int, ...], seed: int) -> Counter[str]:
    """Compare random rows with the reference; differences at float edges are counted, others fail."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    for size in sizes:
        x_RV, row_params, tight = edges.fused_rows(rng, rows, size)
        seeds, steps = words(rng, rows), words(rng, rows)
        tokens = sample(torch.from_numpy(x_RV), row_params, seeds, steps)
        found += edges.compared(x_RV, row_params, tight, seeds, steps, inside(x_RV, row_params), tokens)
    return found


@pytest.mark.slow
def test_survivors_and_tokens_equal_the_reference() -> None:
    count = tiers.count(50, 150)
    found = survey(count, SIZES, 0)
    assert found["rows"] == count * len(SIZES)
    assert sum(n for name, n in found.items() if name.startswith(("set", "draw"))) == 0, found
    assert sum(n for name, n in found.items() if name.startswith("tight")) < 12, found


@pytest.mark.slow
def test_tokens_of_a_full_vocabulary_equal_the_reference() -> None:
    found = survey(8, (128_256, 32_000), 1)
    assert set(found) == {"rows"}, found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("rows", [1, 6, 7, 8])
@pytest.mark.parametrize("params", [{"top_k": 40, "top_p": 0.9}, {"mirostat_tau": 3.0}, {"typical_p": 0.9}])
def test_many_rows_are_sampled_in_parts(rows: int, params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens with bounded memory: score arrays of a large batch would fill a device."""
    rng, size = np.random.default_rng(4), 300
    x_RV = torch.from_numpy(rng.normal(size=(rows, size)).astype(np.float32) * 4)
    x_RV[0, 5] = torch.nan
    mask = torch.from_numpy(rng.integers(-(2**31), 2**31, (rows, 10)).astype(np.int32))
    looked, sort = [], batch_sampling.rank_tokens
    monkeypatch.setattr(
        batch_sampling, "rank_tokens", lambda fixed, x_RV: (looked.append(len(x_RV)), sort(fixed, x_RV))[1]
    )

    def sample_all() -> list[Any]:
        sampler = nc.Sampler(size, "torch")
        for seed in range(rows):
            sampler.add(nc.SamplingParams(seed=seed, repetition_penalty=1.5, logprobs=2, **params), [1, 2, 3])
        steps = [sampler(x_RV, mask=given) for given in (None, mask, None)]
        return [(step.token_ids.tolist(), [*step.logprobs], {**step.errors}) for step in steps]

    in_one_call = sample_all()
    assert [step[0][0] for step in in_one_call] == [-1] * 3
    looked.clear()
    monkeypatch.setattr(batch_view, "MAX_GROUP_SCORES", 4 * size - 1)
    assert sample_all() == in_one_call
    assert sum(looked) == 3 * rows
    assert max(looked) <= 3


def test_masks_equal_the_reference() -> None:
    rng = np.random.default_rng(5)
    for size in (40, 257, 600):
        x_RV = np.stack([edges.row(rng, size, kind) for kind in ("smooth", "grid", "holes", "peaked") * 6])
        masks = rng.integers(-(2**31), 2**31, size=(24, -(-size // 32))).astype(np.int32)
        row_params, seeds, steps = (
            [FusedParams(t=0.7, p=0.9)] * 24,
            words(rng, 24),
            words(rng, 24),
        )
        tokens = sample(torch.from_numpy(x_RV), row_params, seeds, steps, torch.from_numpy(masks)).tolist()
        stages = Mask(), *simplify(edges.pipeline(FusedParams(t=0.7, p=0.9)))
        for row, mask in enumerate(masks):
            given = stages, unsigned(seeds)[row], unsigned(steps)[row], History((), (), mask)
            try:
                expected = reference.draw(x_RV[row], *given)
            except reference.RowError:
                expected = -1
            assert tokens[row] == expected


def test_a_mask_may_be_longer_than_the_row() -> None:
    mask, zeros = torch.tensor([[7, -1], [2, 5]], dtype=torch.int32), torch.zeros(2).long()
    x_RV = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    assert sample(x_RV, [FusedParams(t=0.0)] * 2, zeros, zeros, mask).tolist() == [2, 1]


def compiled(backend: str) -> None:
    """One graph, and the same tokens as without compilation."""
    rng = np.random.default_rng(6)
    x_RV, row_params, _ = edges.fused_rows(rng, 12, 700)
    seeds, steps = words(rng, 12), words(rng, 12)
    mask = torch.full((12, 22), -1, dtype=torch.int32)
    mask[:, 0] = -2
    every = [
        (signature.fused_signatures(row_params), None),
        *((signature.pipeline_signature(stages), stages) for stages in STAGES),
    ]
    for staged, stages in every:
        rows = batch_sampling.make_batch(staged if stages is None else [staged] * 12, seeds, 700, torch.float64)
        own = torch.tensor([staged.params] * 12, dtype=torch.float64) if rows.stateful else None
        torch._dynamo.reset()
        draw = torch.compile(
            lambda *given, rows=rows: batch_sampling.run(rows, batch_sampling.StepInput(*given)).tokens_R,
            fullgraph=True,
            backend=backend,
        )
        for allowed in (None, mask):
            given = torch.from_numpy(x_RV).double(), steps, allowed, None, own
            assert draw(*given).tolist() == batch_sampling.run(rows, batch_sampling.StepInput(*given)).tokens_R.tolist()


@pytest.mark.slow
def test_it_compiles_without_a_graph_break() -> None:
    compiled("eager")


@pytest.mark.exhaustive  # a compiler for minutes; the graph without breaks is a fast test
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_compiled_code_gives_the_same_tokens() -> None:
    compiled("inductor")


@pytest.mark.slow
def test_sampling_follows_the_distribution() -> None:
    """By level: three groups, with the threshold within the last."""
    x = np.log(np.r_[np.full(256, 1.0), np.full(256, 3.0), np.full(88, 2.0)] / 1200).astype(np.float32)
    count = 10_000
    row_params = [FusedParams(p=0.9)] * count
    seeds, steps = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    tokens = sample(torch.from_numpy(x).expand(count, -1), row_params, seeds, steps).numpy()
    p = reference.probabilities(x, (TopP(0.9), Gumbel(0)))
    histogram = np.bincount(tokens, minlength=600)
    assert (histogram[p == 0] == 0).all()
    survivors = p > 0
    chi_square = ((histogram[survivors] - count * p[survivors]) ** 2 / (count * p[survivors])).sum()
    freedom = survivors.sum() - 1
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)
