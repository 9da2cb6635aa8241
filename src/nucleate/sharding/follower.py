"""A rank that rank 0 has started: ``python -m nucleate.sharding.follower OPTIONS``. Not for other callers.

It ends when rank 0 closes the group or ends in any way: its standard input is a pipe that rank 0 keeps open.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

import torch.distributed as dist

from nucleate.jit.kernel_libraries import MODELS, SAMPLER
from nucleate.jit.native_library import load_in_background
from nucleate.sharding.rank_group import SetupError, follow
from nucleate.sharding.rank_processes import device_of, join


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
