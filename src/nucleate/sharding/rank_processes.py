"""The processes of a tensor-parallel model: starts them, or joins those that torchrun has started.

``python -m nucleate.sharding.rank_processes OPTIONS`` is a rank that rank 0 has started. Not for other callers. It ends
when rank 0 closes the group or ends in any way: its standard input is a pipe that rank 0 keeps open.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nucleate.jit.kernel_libraries import MODELS, SAMPLER
from nucleate.jit.native_library import load_in_background
from nucleate.jit.thread_pool import cores
from nucleate.models.protocol import ModelError
from nucleate.parameters.parameter import ParameterError
from nucleate.sharding.rank_group import Rank, RankGroup, SetupError, follow

TIMEOUT = 300.0
"""Seconds until a rank that does not answer is an error. The first step may load or compile kernels."""

SETTLE_SECONDS = 0.2
"""How long a rank waits before it ends: the threads of gloo release tensors, for which they need the interpreter."""

END_SECONDS = 10.0
"""How long rank 0 waits for the other processes to end before it kills them."""


def start(size: int, load: Sequence[Any]) -> RankGroup:
    """Start the other ranks on this machine, and load the model on all. load: the arguments of ``Rank.load``.

    Raises ModelError.
    """
    check_free()
    processes = RankProcesses(size, load)
    try:
        with loopback_only():
            rank = processes.join()
            rank.load(load[0], device_of(load[1], 0), load[2])
        return RankGroup(rank, processes)
    except BaseException as error:
        why = processes.ended()
        processes.stop(wait=False)
        if isinstance(error, ModelError) or not isinstance(error, Exception):
            raise
        raise ModelError(f"the ranks could not start: {why or error}") from error


def join_torchrun(size: int, load: Sequence[Any]) -> RankGroup:
    """Join the processes of torchrun. Returns on rank 0; the others serve it, and their processes end with it.

    Raises ModelError on all ranks, ParameterError.
    """
    world, index = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if world != size:
        raise ParameterError("tensor_parallel", f"tensor_parallel must be WORLD_SIZE of torchrun ({world}), got {size}")
    check_free()
    folder, device, dtype = load
    local = int(os.environ.get("LOCAL_RANK", index))
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group(backend_of(device), timeout=timedelta(seconds=TIMEOUT))
    rank, own = Rank(index, size, TIMEOUT), (folder, device_of(device, local), dtype)
    rank.load(*own)
    if index:
        follow(rank)
        TorchrunProcesses().stop(wait=True)
        sys.exit(0)
    return RankGroup(rank, TorchrunProcesses())


def is_torchrun() -> bool:
    """Whether torchrun, or a launcher with its environment variables, has started several processes."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def check_free() -> None:
    """Raise ModelError if this process has a process group: torch has one per process."""
    if dist.is_initialized():
        raise ModelError(
            "this process has a process group of torch.distributed, such as that of another tensor-parallel model; "
            "close that model first (LLM.close)"
        )


def backend_of(device: str) -> str:
    """The backend of torch.distributed for a device."""
    return "nccl" if device.startswith("cuda") else "gloo"


def device_of(device: str, index: int) -> str:
    """The device of a rank: the GPU of its number, or the CPU."""
    return f"cuda:{index}" if device.startswith("cuda") else device


class RankProcesses:
    """``OtherProcesses`` that this one has started, and what they share."""

    def __init__(self, size: int, load: Sequence[Any]) -> None:
        folder, self._device, dtype = load
        self.size = size
        self._folder = tempfile.mkdtemp(prefix="nucleate-ranks-")  # readable for this user only
        self._threads = torch.get_num_threads()
        self.processes: list[subprocess.Popen[bytes]] = []
        options = {"store": f"{self._folder}/store", "size": size, "load": [str(folder), self._device, dtype]}
        path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
        threads = str(max(1, cores() // size))
        environment = {"OMP_NUM_THREADS": threads, "NUCLEATE_THREADS": threads, **os.environ, "PYTHONPATH": path}
        with loopback_only(environment):
            for rank in range(1, size):
                text = json.dumps({**options, "rank": rank})
                command = [sys.executable, "-P", "-m", "nucleate.sharding.rank_processes", text]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
                self.processes.append(subprocess.Popen(command, env=environment, **pipes))  # noqa: S603

    def join(self) -> Rank:
        """Wait until all processes have started, and join them as rank 0. Raises RuntimeError, also if one ends."""
        store = dist.FileStore(f"{self._folder}/store", self.size)
        end = time.monotonic() + TIMEOUT
        while not store.check([f"started {rank}" for rank in range(1, self.size)]):
            if why := self.ended():
                raise RuntimeError(why)
            if time.monotonic() > end:
                raise RuntimeError(f"a process did not start within {TIMEOUT:g} s")
            time.sleep(0.02)
        return join(store, 0, self.size, self._device)

    def ended(self) -> str:
        codes = {rank: code for rank, one in enumerate(self.processes, 1) if (code := one.poll()) is not None}
        return ", ".join(
            f"rank {rank} " + (f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}")
            for rank, code in codes.items()
        )

    def stop(self, *, wait: bool) -> None:
        end = time.monotonic() + (END_SECONDS if wait else 0.0)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        with suppress(Exception):  # of a group that has failed
            dist.destroy_process_group()
        torch.set_num_threads(self._threads)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def loopback_only(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Let gloo listen on the loopback interface only, where its name is known."""
    name = "GLOO_SOCKET_IFNAME"
    if name in environment or not sys.platform.startswith("linux"):
        yield
        return
    environment[name] = "lo"
    try:
        yield
    finally:
        del environment[name]


class TorchrunProcesses:
    """``OtherProcesses`` of torchrun, which starts and ends them, and reports those that have ended."""

    def ended(self) -> str:
        return ""

    def stop(self, *, wait: bool) -> None:
        if wait:
            time.sleep(SETTLE_SECONDS)
            dist.destroy_process_group()


def join(store: Any, rank: int, size: int, device: str) -> Rank:
    """Join the ranks on this machine, and divide its cores among them."""
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores() // size)))
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=size, timeout=timeout)
    return Rank(rank, size, TIMEOUT)


def load_arguments(folder: Path, device: str, dtype: str, size: int) -> tuple[Path, str, str]:
    """The arguments of ``Rank.load``, after a check of the device. Raises ParameterError."""
    if device not in ("auto", "cpu", "cuda"):
        raise ParameterError("device", f"with tensor_parallel, device must be auto, cpu or cuda, got {device!r:.40}")
    count = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda" and count < size and not is_torchrun():
        raise ParameterError("tensor_parallel", f"tensor_parallel is at most the number of GPUs ({count}), got {size}")
    return folder, device, dtype


def main(text: str) -> None:
    """Follow rank 0. text: the options as JSON."""
    options = json.loads(text)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: rank 0 decides
    threading.Thread(target=_end_with_rank_0, args=[Path(options["store"]).parent], daemon=True).start()
    rank, size, (folder, device, dtype) = options["rank"], options["size"], options["load"]
    store = dist.FileStore(options["store"], size)
    store.set(f"started {rank}", "")
    try:
        own = join(store, rank, size, device)
        load_in_background((*SAMPLER, MODELS), compiling=False)
        own.load(Path(folder), device_of(device, rank), dtype)
        follow(own)
        code = 0
    except SetupError:  # rank 0 raises it, too
        code = 1
    except Exception:  # noqa: BLE001  # rank 0 notices that this process ends
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # without waiting for exchanges that no other rank takes part in


def _end_with_rank_0(folder: Path) -> None:
    """End this process when rank 0 has ended, without the folder that rank 0 made."""
    sys.stdin.buffer.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
