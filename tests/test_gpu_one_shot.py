"""The script for the first minutes on a GPU: a rehearsal of all parts, crashes, hangs, kills, and missing packages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from server_process import children, gone, wait_until

pytest.importorskip("torch", reason="the script runs torch")
pytest.importorskip("triton", reason="the script runs Triton's kernels: pip install triton (Linux only)")

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks"
sys.path.append(str(SCRIPTS))
import gpu_one_shot as one_shot  # noqa: E402

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
ABSENT = "threadpoolctl", "shtab", "llguidance", "jsonschema", "starlette", "prometheus_client"
"""What a machine with torch, Triton, numba and Transformers need not have."""
OF_THE_ENGINE = "numba", "llvmlite", "tokenizers", "transformers", "safetensors", "regex", "tqdm"


def without(packages: tuple[str, ...], tmp_path: Path) -> dict[str, str]:
    """An environment in which these packages cannot be found, as their modules are None."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({packages}))")
    return {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "part.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def checks(tmp_path: Path, text: str) -> list[str]:
    """A script with cases of the part ``checks``."""
    header = f"""
import os, sys, time
sys.path.append({str(SCRIPTS)!r})
import gpu_parts
from pathlib import Path

part = gpu_parts.Part(Path({str(tmp_path / "checks.jsonl")!r}), rehearse=True)
"""
    return script(tmp_path, header + text)


def rehearsed(tmp_path: Path, absent: tuple[str, ...], *flags: str) -> dict[str, list[dict[str, Any]]]:
    """The lines of each part of a rehearsal without these packages, in which none has failed."""
    command = [sys.executable, str(SCRIPTS / "gpu_one_shot.py"), "--rehearse", "--out", str(tmp_path), *flags]
    environment = without(absent, tmp_path)
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert (tmp_path / "summary.md").read_text() in ran.stdout
    lines = {name: one_shot.read(tmp_path / f"{name}.jsonl") for name in one_shot.LIMITS}
    assert [line for part in lines.values() for line in part if "failed" in line] == []
    return lines


@pytest.mark.exhaustive
def test_the_rehearsal_learns_something_in_every_part(tmp_path: Path) -> None:
    lines = rehearsed(tmp_path, ABSENT)
    assert [line for part in lines.values() for line in part if "left_out" in line] == []
    checks = [line for line in (*lines["checks"], *lines["long_checks"]) if "check" in line]
    assert len(checks) > 20
    assert all(line["wrong"] == 0 < line["of"] for line in checks), checks
    assert {line["kernel"] for line in lines["kernels"]} == {"stats", "tally"}
    timed = {line["contender"] for line in lines["timings"] if "cold" in line}
    assert timed >= {"nucleate", "nucleate, torch", "torch"}
    equal = [line for line in lines["engine"] if "equal" in line]
    assert len(equal) == 6
    assert all(line["equal"] for line in equal), equal
    assert {line["backend"] for line in lines["engine"] if "tokens_per_s" in line} == {"cpu", "triton", "torch"}
    assert [line["result"] for line in lines["tools"] if "tool" in line] == ["right"]
    text = (tmp_path / "summary.md").read_text()
    assert "**all five**" in text
    assert "equal tokens" in text


@pytest.mark.exhaustive
def test_torch_triton_and_numpy_suffice_for_all_but_the_engine(tmp_path: Path) -> None:
    lines = rehearsed(tmp_path, (*ABSENT, *OF_THE_ENGINE), "--parts", "timings", "engine", "tools", "long_checks")
    [missing] = [line["missing"] for line in lines["engine"] if "missing" in line]
    assert "numba, tokenizers, transformers, safetensors" in missing
    assert sum(line.get("equal", False) for line in lines["engine"]) == 2  # Sampler.loop
    assert any("cold" in line for line in lines["timings"])
    assert any(line.get("result") == "right" for line in lines["tools"])
    assert all(line["wrong"] == 0 for line in lines["long_checks"] if "check" in line)


def test_a_part_that_crashes_goes_on_with_its_next_case(tmp_path: Path) -> None:
    """It dies in its second case, in the middle of a line."""
    text = """
def crash():
    sys.stdout.write('{"half": ')
    sys.stdout.flush()
    os.abort()

def fail():
    raise ValueError("odd logits")

part.case("one", lambda: {"check": "one", "wrong": 0, "of": 3, "path": "all five"})
part.case("two", crash)
part.case("three", fail)
part.case("four", lambda: [{"check": "four", "wrong": 1, "of": 3, "path": "all five"}])
"""
    part = one_shot.Part("checks", checks(tmp_path, text), 60)
    one_shot.run([part], tmp_path, 60)
    found = one_shot.read(tmp_path / "checks.jsonl")
    assert [line["check"] for line in found if "check" in line] == ["one", "four"]
    failed = [(line["failed"], line.get("case")) for line in found if "failed" in line]
    assert failed == [("crash", None), ("the process ended in this case", "two"), ("raised", "three")]
    summary = (tmp_path / "summary.md").read_text()
    assert "odd logits" in summary
    assert "| **all five** | 2 checks | 1 | 2 | **wrong** |" in summary


def test_a_part_that_only_crashes_is_not_started_forever(tmp_path: Path) -> None:
    one_shot.run([one_shot.Part("checks", script(tmp_path, "raise SystemExit('no torch here')"), 60)], tmp_path, 60)
    [line] = one_shot.read(tmp_path / "checks.jsonl")
    assert (line["failed"], line["code"], line["detail"]) == ("crash", 1, "no torch here")


@pytest.mark.slow
def test_a_part_that_hangs_ends_with_its_children_and_the_next_one_runs(tmp_path: Path) -> None:
    text = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print('{"check": "before", "wrong": 0, "of": 1, "path": "all five", "child": %d}' % child.pid, flush=True)
time.sleep(600)
"""
    hangs = one_shot.Part("checks", script(tmp_path, text), 3)
    good = one_shot.Part("tools", [sys.executable, "-c", 'print(\'{"tool": "ncu", "result": "right"}\')'], 20)
    begin = time.monotonic()
    one_shot.run([hangs, good], tmp_path, 60)
    assert time.monotonic() - begin < 20
    before, failed = one_shot.read(tmp_path / "checks.jsonl")
    assert failed["failed"] == "time limit"
    wait_until(lambda: gone(before["child"]), 10)
    summary = (tmp_path / "summary.md").read_text()
    assert "ncu: right" in summary
    assert "time limit" in summary


@pytest.mark.slow
def test_a_case_that_hangs_ends_and_the_next_one_runs(tmp_path: Path) -> None:
    text = """
part.case("hangs", lambda: time.sleep(600))
part.case("good", lambda: {"check": "good", "wrong": 0, "of": 1, "path": "all five"})
"""
    one_shot.run([one_shot.Part("checks", checks(tmp_path, text), 10)], tmp_path, 10)
    found = one_shot.read(tmp_path / "checks.jsonl")
    assert [line["failed"] for line in found if "failed" in line] == ["hung", "crash"]
    assert [line["check"] for line in found if "check" in line] == ["good"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.fast_cases(0)
def test_what_was_learnt_before_a_kill_is_in_the_folder(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_one_shot.py"), "--rehearse", "--out", str(tmp_path)]
    command += ["--parts", "environment", "checks"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = tmp_path / "checks.jsonl"
    wait_until(lambda: any("check" in line for line in one_shot.read(lines)), 60)
    parts = children(process.pid)
    assert parts
    process.send_signal(how)
    process.wait(30)
    wait_until(lambda: all(map(gone, parts)), 10)
    assert any("check" in line for line in one_shot.read(lines))
    assert "torch" in (tmp_path / "summary.md").read_text()


def test_a_wrong_token_is_a_result_with_the_row_and_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_chains
    import gpu_check

    right = gpu_chains.ours

    def wrong(case: gpu_chains.Case, backend: str) -> gpu_chains.Call:
        run = right(case, backend).run

        def call() -> object:
            tokens_R = run()
            tokens_R[1] = int(case.logits_RV[1].argmin())
            return tokens_R

        return gpu_chains.Call(call)

    monkeypatch.setattr(gpu_chains, "ours", wrong)
    [line] = gpu_check.tokens("all", 300, 3, "float32", "cpu", "torch")
    assert (line["wrong"], line["of"]) == (2, 6)
    first = line["first"][0]
    assert (first["row"], first["step"], first["p"]) == (1, 0, 0.0)
    assert first["gap"] > 0 < first["p_expected"]
    json.dumps(line, allow_nan=False)


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPTS / "gpu_one_shot.py"), "--out", str(tmp_path), "--seconds", "200"]
    ran = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 2
    assert "no GPU" in ran.stdout
    assert not (tmp_path / "checks.jsonl").exists()


def test_the_plot_shows_every_contender_that_was_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    keys = {"vocabulary": 300, "chain": "all", "dtype": "float32", "warm": 1.0, "floor": 2.0, "how": "graph"}
    lines = [
        {**keys, "rows": rows, "contender": name, "cold": 4.0 * rows}
        for name in ("nucleate", "torch")
        for rows in (1, 8)
    ]
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    command = [sys.executable, str(SCRIPTS / "gpu_one_shot.py"), "--out", str(tmp_path), "--plot"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert "| 8 | all | torch | 32.0 | 16.0 | 1.0 |" in (tmp_path / "summary.md").read_text()
    picture = (tmp_path / "gpu.svg").read_text()
    assert "<!-- nucleate -->" in picture
    assert "<!-- torch -->" in picture
    assert "<!-- vLLM Triton -->" not in picture
