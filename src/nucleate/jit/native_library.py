"""Libraries of compiled kernels: loading them from disk, and compiling them in a separate process.

A library is one file of machine code. Loading takes 0.1 s, most of it for LLVM, and does not import Numba. A separate
process compiles missing libraries, so sampling never waits for a compiler.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from nucleate.jit import kernel_cache
from nucleate.jit.thread_pool import cores

logger = logging.getLogger("nucleate")

ProgressCallback = Callable[[str], object]
"""Called with a line about what has been compiled, or read."""

FORMAT = 1
"""Of files, see ``packed``, and of ``OBJECTS``."""
TABLE = "nucleate.objects"
OBJECTS = {"ndarray": np.ndarray, "None": None, "TypeError": TypeError, "RuntimeError": RuntimeError}
"""What entries need of Python, in the order of the table that they read it from."""

SOON, LATE = 0.02, 5.0
"""Seconds of work without kernels after which they are read from disk, if they are there, and compiled if not."""
PROGRAM = "import sys; from nucleate.jit.compiler import main; main(*sys.argv[1:])"
PAUSE = 0.005
"""Seconds between two libraries, in the background, for whoever waits for the interpreter."""


class KernelError(RuntimeError):
    """Kernels could not be compiled."""


class KernelLibrary:
    """Kernels of some modules, by name: ``library.draw_rows(...)``. See ``libraries`` for all that there are.

    sources: what the kernels are made of. ``ready``: they are in memory.
    """

    def __init__(self, name: str, modules: Sequence[str], sources: Iterable[Path]) -> None:
        self.name, self.modules, self.ready = name, tuple(modules), False
        self._sources = tuple(sources)
        self.getting = threading.RLock()  # for whoever reads or compiles them: nobody does so twice
        self._lost, self._next = 0.0, SOON
        self._made: Path | None = None  # where a process of this one wrote the file

        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A fork has none of the threads of its parent: what they were to get is begun with again."""
        self.getting, self._lost = threading.RLock(), 0.0
        self._next = min(self._next, SOON)

    def __getattr__(self, name: str) -> Any:
        """A kernel. Waits for it, if it must be read or compiled first. Raises KernelError."""
        if name.startswith("_") or self.ready:
            raise AttributeError(f"there is no kernel {name!r} in {self.modules}")
        get([self])
        return getattr(self, name)

    def missed(self, seconds: float) -> None:
        """So much time went by without kernels. As soon as it is worth their own, they are got in the background."""
        self._lost += seconds
        if self._lost >= self._next and not self.ready:
            begin([self], compiling=self._next == LATE)

    def expected(self, *, compiling: bool) -> None:
        """They are being read, or compiled if need be: nobody else is to begin with it."""
        self._next = float("inf") if compiling else max(self._next, LATE)

    @property
    def folder(self) -> Path:
        """Where the kernels of these sources are kept."""
        return _folder(self._sources)

    @property
    def path(self) -> Path:
        """Their file, for the processor that this is."""
        return self.folder / f"{self.name}-{_processor()}.kernels"

    def load(self) -> bool:
        """Read the kernels from disk; whether they are there. Waits for another thread that compiles them."""
        with self.getting:
            if self.ready:
                return True
            try:
                data = (self._made or self.path).read_bytes()
            except OSError:
                data = b""
            functions = _functions(data)
            if functions is None:
                return False
            vars(self).update(functions)
            self.ready = True  # last: nobody waits for it
            return True

    def process(self, *, behind: bool) -> subprocess.Popen[str]:
        """A process that compiles the kernels and says so, line by line. behind: others come first."""
        place = self.path
        if not kernel_cache.writable(place.parent):
            place = Path(_own_folder()) / place.name
        self._made = place
        command = [sys.executable, "-c", PROGRAM, str(place), *self.modules]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(  # noqa: S603  # ours
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if behind and hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, process.pid, 15)  # with more it would never end beside a busy server
        return process


def get(
    libraries: Sequence[KernelLibrary], on_progress: ProgressCallback | None = None, *, behind: bool = False
) -> None:
    """Read the kernels of some libraries, compiling those that are not kept, several at a time. Raises KernelError.

    behind: in the background, at a low priority and with pauses.
    """
    missing = []
    for library in libraries:
        begun = time.perf_counter()
        if not library.load():
            missing.append(library)
        elif on_progress is not None:
            on_progress(f"{library.name}: read in {time.perf_counter() - begun:.2f} s")
        if behind:
            time.sleep(PAUSE)
    if missing and on_progress is None:
        names = ", ".join(library.name for library in missing)
        kernel_cache.say(
            f"compiling the CPU kernels ({names}), once: about 25 seconds (kept in {missing[0].folder.parent})"
        )
    with ThreadPoolExecutor(1 if behind else cores(), "nucleate-compiling") as threads:
        for job in [threads.submit(_compile, library, on_progress, behind=behind) for library in missing]:
            job.result()


def _compile(library: KernelLibrary, on_progress: ProgressCallback | None, *, behind: bool) -> None:
    """Unless another thread has done so meanwhile."""
    with library.getting:
        if not library.load():
            _run(library, on_progress, behind=behind)


def _run(library: KernelLibrary, on_progress: ProgressCallback | None, *, behind: bool) -> None:
    """Have a process compile the kernels, and read them."""
    said = []
    with library.process(behind=behind) as process:
        atexit.register(process.kill)
        try:
            for line in process.stdout or ():
                said.append(line)
                if on_progress is not None:
                    on_progress(f"{library.name}: {line.rstrip()}")
        finally:
            atexit.unregister(process.kill)
    if process.returncode or not library.load():
        raise KernelError(f"the kernels {library.name!r} could not be compiled: {''.join(said)[-2000:]}")


def begin(
    libraries: Sequence[KernelLibrary],
    *,
    compiling: bool = True,
    on_progress: ProgressCallback | None = None,
    also: Callable[[], object] | None = None,
) -> threading.Thread:
    """The same in a thread, which is returned. compiling: also what is not kept. also: what is called then."""
    for library in libraries:
        library.expected(compiling=compiling)

    def work() -> None:
        try:
            get(libraries, on_progress, behind=True) if compiling else [library.load() for library in libraries]
            if also is not None:
                also()
        except Exception:
            logger.exception("the kernels could not be had: work goes on without them")

    thread = threading.Thread(target=work, name="nucleate-kernels", daemon=True)
    thread.start()
    return thread


def packed(code: bytes, functions: Mapping[str, str], outside: Sequence[str]) -> bytes:
    """Machine code as a file: a line of JSON, then the code. functions: symbols by names. outside: what it calls."""
    digest = hashlib.sha256(code).hexdigest()
    head = {"functions": dict(functions), "outside": list(outside), "digest": digest}
    return json.dumps(head).encode() + b"\n" + code


class _Method(ctypes.Structure):
    """A PyMethodDef."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    ]


FAST_CALLS = 0x80
_forever: list[object] = []  # what functions need as long as the process lives


def _functions(data: bytes) -> dict[str, Callable[..., Any]] | None:
    """What is in a file; None if it is not as it was written, or calls what is not there."""
    line, _, code = data.partition(b"\n")
    try:
        head = json.loads(line)
        whole = head["digest"] == hashlib.sha256(code).hexdigest()
    except (ValueError, KeyError, TypeError):
        return None
    llvm = _llvm()
    if not whole:
        return None
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    if not all(llvm.address_of_symbol(name) for name in head["outside"]):
        return None
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    table = (ctypes.c_void_p * len(OBJECTS)).from_address(engine.get_global_value_address(TABLE))
    for place, known in enumerate(OBJECTS.values()):
        table[place] = id(known)
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    found = {}
    for name, symbol in head["functions"].items():
        method = _Method(name.encode(), engine.get_function_address(symbol), FAST_CALLS, None)
        _forever.append(method)
        found[name] = make(ctypes.addressof(method), None, None)
    _forever.append(engine)
    return found


@cache
def _llvm() -> Any:
    """LLVM, for this processor."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.load_library_permanently("")
    return llvm


@cache
def _processor() -> str:
    """What this processor can do, in few letters."""
    llvm = _llvm()
    said = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return hashlib.sha256(said.encode()).hexdigest()[:8]


@cache
def _versions() -> tuple[str, tuple[Path, ...]]:
    """What makes machine code another one, beside its sources."""
    found = []
    for package in ("numba", "llvmlite"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise KernelError(f"kernels need {package}")
        found.append(Path(spec.origin).with_name("_version.py"))
    return f"{FORMAT} {sys.implementation.cache_tag} {sys.platform} {np.__version__}", tuple(found)


def _folder(sources: tuple[Path, ...]) -> Path:
    versions, files = _versions()
    own = (Path(__file__).with_name(name) for name in ("compiler.py", "entry_points.py"))
    return kernel_cache.folder(versions, (*sources, *files, *own))


@cache
def _own_folder() -> str:
    """A folder of this process, for kernels that cannot be kept."""
    folder = tempfile.TemporaryDirectory(prefix="nucleate-")
    _forever.append(folder)
    return folder.name
