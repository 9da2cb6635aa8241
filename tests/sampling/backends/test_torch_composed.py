"""Any pipeline as tensor code on a device: tokens, survivors, scores and states are the reference's."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pipeline_cases as cases
import pytest
import tensor_pipelines as staged
import tiers
from custom_stages import DRAWS, OWN, Foreign, Softer, Turned
from edge_rows import KINDS, row

import nucleate as nc
from nucleate.sampling import reference, signature
from nucleate.sampling.maths import log
from nucleate.sampling.pipeline import simplify
from nucleate.sampling.stage import Draw, Floor, Scale, param
from nucleate.sampling.stages import (
    AdaptiveP,
    Categorical,
    DynamicTemperature,
    Epsilon,
    Eta,
    Greedy,
    Gumbel,
    Mask,
    MinP,
    Mirostat,
    PLess,
    Suppress,
    Temperature,
    TopA,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    Xtc,
)

torch = pytest.importorskip("torch", reason="rows on a device are tensors")


@pytest.mark.slow
def test_random_pipelines_equal_the_reference() -> None:
    assert staged.survey(list(range(tiers.count(100, 400)))) == []


@pytest.mark.exhaustive
def test_very_many_pipelines_equal_the_reference() -> None:
    found = staged.survey(list(range(10_000, 20_000)))
    # Two tokens equally far from adaptive-p's target, one on either side, differ in the last bit or not at all.
    assert len(found) <= 2, found
    assert all("AdaptiveP" in one for one in found), found


@pytest.mark.slow
def test_every_stage_at_the_edges_of_its_parameters() -> None:
    assert staged.every_stage(list(range(tiers.count(2, 6))), (1, 2, 255, 256, 257, 1000)) == []


PIPELINES = (
    (Typical(0.5), Temperature(0.7)),
    (TopNSigma(1.0), TopK(3, with_ties=True), TopP(0.5, of_full_mass=True)),
    (Temperature(0.2), Temperature(3.0), MinP(0.3), TopP(0.5, of_full_mass=True)),
    (DynamicTemperature(0.5, 1.5), TopH(0.5)),
    (Epsilon(0.01), Eta(0.01), TopA(0.1), PLess(True)),
    (Xtc(1.0, 0.05, exempt=(0,)), AdaptiveP(0.2), TopP(0.7)),
    (Mirostat(2.0), AdaptiveP(0.3), Temperature(1e-3)),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(2)
def test_every_kind_of_row(kind: str) -> None:
    rng = np.random.default_rng(0)
    for size in (1, 256, 257, 700):
        for stages in PIPELINES:
            x, draw = row(rng, size, kind), [Gumbel(3), Categorical(3), Greedy()][int(rng.integers(3))]
            assert staged.difference(x, (*stages, draw), 3, int(rng.integers(2**62))) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.fast_cases(1)
def test_rows_with_the_same_signature_are_sampled_together(dtype: torch.dtype) -> None:
    rng, size = np.random.default_rng(1), 300
    for stages in PIPELINES:
        rows = [(*stages, Gumbel(0))] * 9
        given = staged.drawing(rows, list(range(9)), [2**63 + 5] * 9, size)
        wide_RV = torch.full((9, 2 * size), torch.nan, dtype=dtype)
        logits = wide_RV[:, ::2].copy_(torch.from_numpy(rng.normal(size=(9, size)) * 3))
        logits[2, 5], logits[4], logits[5, 9] = torch.nan, -torch.inf, torch.inf
        got = staged.outcome(given, logits)
        for index, x in enumerate(logits.to(torch.float32).numpy()):
            try:
                expected = reference.run(x, rows[index], index, 2**63 + 5).token
            except reference.RowError:
                expected = -1
            assert got.tokens_R[index] == expected


FLOATS = torch.float64, torch.float32


@pytest.mark.slow
def test_float32_gives_the_same_tokens_except_at_float_edges() -> None:
    """For devices without float64."""
    rng = np.random.default_rng(6)
    for stages in PIPELINES:
        rows, logits = (
            [(*stages, Gumbel(0))] * 20,
            torch.from_numpy(rng.normal(size=(20, 300)).astype(np.float32) * 3),
        )
        batches = [staged.drawing(rows, list(range(20)), [0] * 20, 300, floats) for floats in FLOATS]
        exact, short = (staged.outcome(given, logits).tokens_R for given in batches)
        assert (exact != short).sum() <= 1


# Custom stages.


class Branching(Scale):
    def apply(self, x: Any, row: Any) -> Any:
        return x if row.n > 3 else 2.0 * x


class Looping(Scale):
    def apply(self, x: Any, row: Any) -> Any:
        for _ in range(3):
            x = 0.9 * x
        return x


class Counting(Floor):
    """A state update that is not an expression runs on the host."""

    cuts: tuple[int, ...] = param("", default=(3,), public=False)
    n: float = param("", default=1.0, public=False)

    def floor(self, row: Any) -> Any:
        return row.top - self.n

    def update(self, token: Any) -> Any:
        return replace(self, n=float(len(self.cuts)))


@pytest.mark.parametrize("draw", [Gumbel(1), *DRAWS], ids=repr)
@pytest.mark.fast_cases(0)
def test_custom_stages(draw: Draw) -> None:
    rng = np.random.default_rng(4)
    for one in OWN:
        for stages in ((one,), (Temperature(0.9), one, TopP(0.9)), (one, one)):
            for size in (5, 600):
                x = (rng.normal(size=size) * 3).astype(np.float32)
                why = staged.difference(x, (*stages, draw), 5, int(rng.integers(9)))
                assert why == "" or "reference raised" not in why, why
                assert why == "", why


@pytest.mark.parametrize(
    ("stage", "why"),
    [
        (Foreign(), "Foreign.apply names np, which is not in nucleate.sampling.maths"),
        (Branching(), "Branching.apply is not one expression of numbers"),
        (Looping(), "Looping.apply names range, which is not in nucleate.sampling.maths"),
        (Counting(), "Counting.update names float, which is not in nucleate.sampling.maths"),
        (Suppress((1,)), r"Suppress((1,)) comes after a stage that uses the whole row"),
        (Mask(), "Mask() comes after a stage that uses the whole row"),
    ],
)
def test_unsupported_stages_run_on_the_host_and_are_reported(
    stage: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    stages = (Temperature(0.5), stage, Gumbel(1))
    with pytest.raises(signature.UnsupportedError, match=f"^{re.escape(why)}$"):
        signature.pipeline_signature(simplify(stages))
    sampler, other = nc.Sampler(50, "torch"), nc.Sampler(50, "reference")
    with caplog.at_level(logging.WARNING, "nucleate"):
        sampler.add(stages)
    other.add(stages)
    assert f"a row runs on the CPU, because {why}" in caplog.text
    assert nc.explain(stages, device="cuda").why == f"on the CPU, because {why}"
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    assert sampler(logits).token_ids.tolist() == other(logits).token_ids.tolist()


def test_explain_reports_the_path() -> None:
    plan = nc.explain((Typical(0.9), Gumbel(1)), device="mps")
    assert (plan.backend, plan.path) == ("torch", "composed stages")
    assert plan.why.startswith("Typical(0.9) is not supported by the fused kernel")
    plan = nc.explain(nc.SamplingParams(temperature=0.7, xtc_probability=0.5, order="llama.cpp"), device="xpu")
    assert plan.backend == "torch"
    for stage in (Typical(0.9), Turned(), Softer(on=True)):
        assert nc.explain((stage, Gumbel(1)), device="cuda").path == "composed stages"


def test_rows_share_a_signature_for_any_parameter_values() -> None:
    one, other = (signature.pipeline_signature((Temperature(t), Typical(0.9), Gumbel(int(t)))) for t in (0.5, 2.0))
    assert one.signatures == other.signatures
    assert one.params != other.params
    one, other = (
        signature.pipeline_signature((TopP(0.5, of_full_mass=full_mass), Gumbel(1))) for full_mass in (False, True)
    )
    assert one.signatures != other.signatures


def test_a_rule_may_use_every_name_of_maths() -> None:
    assert signature.unsupported_reason(MinP.floor) == ""
    assert signature.unsupported_reason(Gumbel.score) == ""
    assert "names len" in signature.unsupported_reason(lambda x: len(x) + 1)
    assert "names cases" in signature.unsupported_reason(lambda x: cases.row(x, 1))
    assert signature.unsupported_reason(lambda x: abs(x) + log(x)) == ""
