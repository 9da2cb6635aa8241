"""The processes of a tensor-parallel model: how they end, and what happens when one is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_models
import shard_ranks
import torch
from server_process import Server, children, gone, wait_until

import nucleate as nc
from nucleate.models.protocol import RunnerLostError

LIMIT = 120.0
PROMPT = [7, 8, 9]
PROGRAM = """
import sys, time, nucleate as nc
llm = nc.LLM(sys.argv[1], tensor_parallel=2, device="cpu")
print(llm.generate([[7, 8, 9]], temperature=0, max_tokens=8)[0].outputs[0].token_ids, flush=True)
if sys.argv[2] == "wait":
    print(*[process.pid for process in llm.model._group.processes.processes], flush=True)
    for _ in llm.stream([7, 8, 9], temperature=1.0, max_tokens=100, ignore_eos=True):
        time.sleep(3.0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_models.save(tmp_path_factory.mktemp("llama"), "llama")


def processes(llm: nc.LLM) -> list[Any]:
    return llm.model._group.processes.processes  # type: ignore[attr-defined]


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, *command)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT, **options)


@pytest.mark.slow
def test_a_killed_process_is_an_error_and_a_new_model_works(folder: Path) -> None:
    threads = torch.get_num_threads()
    llm = nc.LLM(folder, tensor_parallel=2, device="cpu")
    expected = llm.generate([PROMPT], temperature=0, max_tokens=8)[0].outputs[0].token_ids
    with pytest.raises(nc.ModelError, match=r"close that model first \(LLM.close\)"):
        nc.LLM(folder, tensor_parallel=2, device="cpu")
    stream = llm.stream(PROMPT, temperature=0, max_tokens=100, ignore_eos=True)
    next(stream)
    [process] = processes(llm)
    process.kill()
    lost = r"the ranks of the model \(tensor_parallel=2\) have stopped: rank 1 was killed by signal 9"
    with pytest.raises(RunnerLostError, match=lost):
        list(stream)
    for _ in range(2):
        with pytest.raises(RunnerLostError, match=lost):
            llm.generate([PROMPT], max_tokens=8)
    again = nc.LLM(folder, tensor_parallel=2, device="cpu")
    assert again.generate([PROMPT], temperature=0, max_tokens=8)[0].outputs[0].token_ids == expected
    [process] = processes(again)
    again.close()
    assert process.returncode == 0
    assert torch.get_num_threads() == threads
    with pytest.raises(RunnerLostError, match="the model was closed"):
        again.generate([PROMPT], max_tokens=8)
    again.close()


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_the_other_processes_end_with_a_killed_one(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), "wait"], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 1
        assert not gone(pids[0])
        driver.send_signal(signal.SIGKILL)
        wait_until(lambda: all(map(gone, pids)), LIMIT)


@pytest.mark.exhaustive
def test_a_program_that_does_not_close_ends(folder: Path) -> None:
    done = run("-c", PROGRAM, str(folder), "")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_torchrun(folder: Path, tmp_path: Path) -> None:
    """Rank 0 runs the program, and the other one serves it: it prints nothing."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, "utf-8")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), str(folder), ""]
    done, one = run(*launch), nc.LLM(folder, device="cpu", runtime="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{one.generate([PROMPT], temperature=0, max_tokens=8)[0].outputs[0].token_ids}\n"


@pytest.mark.exhaustive
def test_ranks_with_different_models_are_an_error(tmp_path: Path) -> None:
    folders = [random_models.save(tmp_path / str(rank), "llama", rms_norm_eps=1e-5 * (1 + rank)) for rank in range(2)]
    found = shard_ranks.run_processes(2, shard_ranks.load_models, [str(folder) for folder in folders])
    assert found[0] == found[1]
    assert found[0].startswith("SetupError: the models differ between ranks: rank 0 (")
    folders[1] = tmp_path / "none"
    found = shard_ranks.run_processes(2, shard_ranks.load_models, [str(folder) for folder in folders])
    assert found[0].startswith("SetupError: rank 1: cannot read the config")
    assert found[1].startswith("SetupError: cannot read the config")


@pytest.mark.slow
def test_a_process_that_cannot_start_is_an_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONSTARTUP": "", "PYTHONHOME": ""}
    program = PROGRAM.replace("llm = ", "sys.executable = '/bin/false'\nllm = ", 1)
    done = run("-c", program, str(folder), "", env=environment)
    assert done.returncode == 1
    assert "ModelError: the ranks could not start: rank 1 ended with exit status 1" in done.stderr


@pytest.mark.slow
def test_a_server(llm: nc.LLM) -> None:
    """A tensor-parallel server answers, and reports a lost process."""
    body = {"prompt": "Once upon a time", "max_tokens": 20, "seed": 1}
    with Server("--tensor-parallel", "2", "--device", "cpu", "--dtype", "float32") as server:
        answer = server.request("POST", "/v1/completions", body)
        assert answer.json["choices"][0]["text"] == llm.generate(body["prompt"], max_tokens=20, seed=1)[0].text
        [pid] = children(server.process.pid)
        os.kill(pid, signal.SIGKILL)
        answer = server.request("POST", "/v1/completions", body)
        assert answer.status >= 500
        assert server.request("GET", "/health").status >= 500
