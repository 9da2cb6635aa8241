"""The number of operations that a sampler step dispatches to a device, each of which may be a kernel launch.

Views count too. The noise (uniform and Gumbel numbers) does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import tiers

import nucleate as nc
from nucleate.sampling import signature
from nucleate.sampling.stage import Combine, Draw, Shift, Tap, Transform
from nucleate.sampling.stages import STAGES, Gumbel, MinP, Temperature, TopK, TopNSigma, TopP

torch = pytest.importorskip("torch", reason="tensor code needs torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from nucleate.sampling.gpu import batch_sampling  # noqa: E402

SIZE = 300
FUSED, OTHERS = 60, 120
"""The maximum number of operations in a step: of the fused pipeline, and of others or with penalties."""
ZIPF_FIT = 40
"""The operations of mirostat 1 that other stages do not have."""
STAGES_OF = {
    "temperature": 0.7, "dynamic_temperature": (0.5, 1.5), "top_n_sigma": 2.0, "top_k": 20, "typical": 0.9,
    "min_p": 0.05, "top_a": 0.1, "epsilon": 0.01, "eta": 0.01, "p_less": True, "top_h": 0.5, "mirostat": 3.0,
    "mirostat_v1": 3.0, "quadratic": (0.3, 1.5),
    "top_p": 0.9, "xtc": (0.5, 0.05), "adaptive_p": 0.3,
}  # fmt: skip
"""Truncations and scales, with parameters."""


class Operations(TorchDispatchMode):
    """Counts operations; ``noise`` counts those within the noise functions."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.noise, self._within = Counter[str](), 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if self._within:
            self.noise += 1
        else:
            self.count[str(operation)] += 1
        assert "_local_scalar_dense" not in str(operation), "a step waits for the device"
        return operation(*given, **(named or {}))

    def noisy(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, marked as noise."""

        def called(*given: Any) -> Any:
            self._within += 1
            try:
                return function(*given)
            finally:
                self._within -= 1

        return called


def stage(name: str) -> Any:
    given = STAGES_OF[name]
    return STAGES[name](*given) if isinstance(given, tuple) else STAGES[name](given)


def counted(monkeypatch: pytest.MonkeyPatch, rows: list[Any], prompt: tuple[int, ...] = ()) -> Operations:
    """The operations of the second step of rows with these parameters."""
    operations = Operations()
    for module in (batch_sampling, batch_sampling):
        monkeypatch.setattr(module, "uniform", operations.noisy(module.uniform))
    rule = Gumbel.score
    monkeypatch.setattr(signature, "unsupported_reason", lambda *_: "")  # ours names more than maths
    monkeypatch.setitem(rule.__globals__, "gumbel", operations.noisy(rule.__globals__["gumbel"]))
    sampler = nc.Sampler(SIZE, "torch")
    for row in rows:
        sampler.add(row, prompt)
    x_RV = torch.from_numpy(np.random.default_rng(0).normal(size=(len(rows), SIZE)).astype(np.float32))
    sampler(x_RV)
    with operations:
        sampler(x_RV)
    monkeypatch.undo()
    print(operations.count.total(), operations.noise, rows)
    return operations


def test_fused_rows_are_one_call_for_any_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    params, every = nc.SamplingParams, (TopNSigma(2.0), TopK(40), MinP(0.01), TopP(0.9))
    rows = [
        params(temperature=0.8, top_p=0.9, seed=1),
        params(temperature=0, seed=1),
        (Temperature(0.7), *every, Gumbel(1)),
        (*every, MinP(0.02), Temperature(0.6), Gumbel(1)),
        params(top_k=5, min_p=0.1, seed=1),
    ]
    for some in ([rows[0]], [rows[1]], rows[:3], rows):
        assert counted(monkeypatch, some).count.total() <= FUSED
    assert counted(monkeypatch, [rows[1]]).noise == 0


def test_noise_is_two_calls_of_philox(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, [(Gumbel(1),)]).noise <= 165


@pytest.mark.slow
def test_every_stage_and_every_pair_stays_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Combine | Shift | Transform | Tap | Draw
    narrowing = {name for name, kind in STAGES.items() if not issubclass(kind, others)}
    assert narrowing == STAGES_OF.keys()
    single = [(stage(name),) for name in STAGES_OF]
    pairs = [tuple(map(stage, pair)) for pair in combinations(STAGES_OF, 2)][:: tiers.count(4, 1)]
    for stages in (*single, *pairs):
        for last in (Gumbel(1), *((STAGES["categorical"](1),) if len(stages) == 1 else ())):
            most = OTHERS + ZIPF_FIT * any(one.name == "mirostat_v1" for one in stages)
            assert counted(monkeypatch, [(*stages, last)]).count.total() <= most, stages


def test_all_orders_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    params = nc.SamplingParams
    for order in nc.PRESETS:
        given = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8, "seed": 1}
        given = {name: value for name, value in given.items() if name != "typical_p" or order in ("hf", "llama.cpp")}
        assert counted(monkeypatch, [params(temperature=0.7, order=order, **given)]).count.total() <= OTHERS, order


def test_penalties_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    row = nc.SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.2, frequency_penalty=0.3)
    assert counted(monkeypatch, [row], (1, 2, 3)).count.total() <= OTHERS
