"""The checks of ``nucleate stages --check``: they hold for the built-in stages, and detect stages that are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nucleate.cli.main import main
from nucleate.plugins import stage_check
from nucleate.plugins.stage_check import CHECKS, check_stage
from nucleate.sampling.stage import RowStats, Scale, Shift, TokenInfo, param
from nucleate.sampling.stages import STAGES, EncoderRepetition, Repetition

NEUTRAL, DISTRIBUTION, TRUNCATION, ORDER, CONSTANT, BATCH, *BACKENDS = CHECKS


USUAL = ("greedy", "repetition", "temperature", "min_p", "top_p", "xtc", "adaptive_p")
OTHERS = [pytest.param(kind, marks=pytest.mark.exhaustive) for name, kind in STAGES.items() if name not in USUAL]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("kind", [*(STAGES[name] for name in USUAL), *OTHERS])
def test_the_built_in_stages_pass(kind: Any) -> None:
    found = {one.name: one.holds for one in check_stage(kind)}
    assert False not in found.values()
    assert (found[CONSTANT] is None) == (kind in (Repetition, EncoderRepetition))  # they depend on a score's sign


class NotNeutral(Scale):
    """Acts at its neutral value."""

    neutral = False

    a: float = param("Amount", neutral=0.0, low=0.0, high=1.0)

    def apply(self, x: Any, row: RowStats) -> Any:
        return x * (0.5 + self.a)


class Flipped(Scale):
    """Reverses the order."""

    a: float = param("Amount", neutral=0.0, low=0.0, high=1.0)

    def apply(self, x: Any, row: RowStats) -> Any:
        return (1 - 2 * self.a) * (x - row.top)


class Unlisted(Shift):
    """Raises an exception."""

    touches = "listed"
    a: float = param("Amount", neutral=0.0)

    def apply(self, x: Any, token: TokenInfo) -> Any:
        return x + token.nothing  # type: ignore[attr-defined]

    def listing(self, history: Any) -> Any:
        return {0: 1.0}


@pytest.mark.parametrize(
    ("kind", "name", "detail"),
    [
        (NotNeutral, NEUTRAL, "NotNeutral() changes probabilities"),
        (Flipped, ORDER, "changes the order of tokens; set monotone = False"),
        (Unlisted, DISTRIBUTION, "nothing"),
    ],
)
def test_wrong_stages_are_detected(kind: Any, name: str, detail: str) -> None:
    [found] = check_stage(kind, [name])
    assert (found.name, found.holds) == (name, False)
    assert detail in found.detail


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_check, "USES_ZERO", ())
    assert main(["stages", "--check", "greedy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert {line[:14].strip() for line in lines} == {"holds", "does not apply"}
    monkeypatch.setattr(stage_check, "CHECKS", {name: CHECKS[name] for name in (ORDER, CONSTANT)})
    assert main(["stages", "--check", "repetition", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found if one["holds"] is False] == [CONSTANT]
    assert main(["stages", "--check", "top_x"]) == 2
    assert "unknown stage 'top_x'; did you mean top_" in capsys.readouterr().err
