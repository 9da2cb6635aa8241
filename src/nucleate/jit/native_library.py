"""Libraries of compiled kernels: their cache on disk, loading them, and compiling them in a separate process.

A library is one file of machine code. Loading it takes 0.1 s, mostly for LLVM, and does not import Numba. Missing
libraries are compiled by a separate process, so that sampling never waits for a compiler. A cached file is valid only
for its exact sources and versions. The cache is NUCLEATE_CACHE, or nucleate in XDG_CACHE_HOME, or ~/.cache/nucleate.
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

from nucleate.jit.thread_pool import cores

logger = logging.getLogger("nucleate")

ProgressCallback = Callable[[str], object]
"""Called with a line about each library that has been loaded and each kernel that has been compiled."""

FORMAT = 2
"""Version of the file format (``packed``) and of ``OBJECTS``."""
TABLE = "nucleate.objects"
OBJECTS = {"ndarray": np.ndarray, "None": None, "TypeError": TypeError, "RuntimeError": RuntimeError}
"""The Python objects that entry points use, in the order of the table that they read them from."""

LOAD_AFTER, COMPILE_AFTER = 0.02, 5.0
"""Seconds of work without kernels after which they are loaded from the cache, and compiled if not cached."""
PROGRAM = "import sys; from nucleate.jit.compiler import main; main(*sys.argv[1:])"
PAUSE = 0.005
"""Seconds between two libraries in background loading, so that other threads can take the GIL."""


class KernelError(RuntimeError):
    """Kernels could not be compiled."""


class KernelLibrary:
    """The kernels of some modules, as attributes: ``library.draw_rows(...)``. See ``kernel_libraries``.

    sources: all source files that the kernels depend on. ``ready``: whether the kernels are in memory.
    """

    def __init__(self, name: str, modules: Sequence[str], sources: Iterable[Path]) -> None:
        self.name, self.modules, self.ready = name, tuple(modules), False
        self._sources = tuple(sources)
        self.lock = threading.RLock()  # held while loading or compiling
        self._fallback_seconds, self._threshold = 0.0, LOAD_AFTER
        self._compiled: Path | None = None  # the file that a subprocess of this process wrote
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A forked process does not have the background threads of its parent: start again."""
        self.lock, self._fallback_seconds = threading.RLock(), 0.0
        self._threshold = min(self._threshold, LOAD_AFTER)

    def __getattr__(self, name: str) -> Any:
        """A kernel, loaded or compiled first if necessary. Raises KernelError."""
        if name.startswith("_") or self.ready:
            raise AttributeError(f"there is no kernel {name!r} in {self.modules}")
        ensure_loaded([self])
        return getattr(self, name)

    def record_fallback(self, seconds: float) -> None:
        """Count time spent without kernels, and start to load or compile them in the background once it pays off."""
        self._fallback_seconds += seconds
        if self._fallback_seconds >= self._threshold and not self.ready:
            load_in_background([self], compiling=self._threshold == COMPILE_AFTER)

    def mark_started(self, *, compiling: bool) -> None:
        """Loading, or compiling, has been started, so ``record_fallback`` does not start it again."""
        self._threshold = float("inf") if compiling else max(self._threshold, COMPILE_AFTER)

    @property
    def folder(self) -> Path:
        """The cache folder of these sources."""
        versions, files = _versions()
        return cache_folder(versions, (*self._sources, *files, Path(__file__).with_name("compiler.py")))

    @property
    def path(self) -> Path:
        """The cache file for this processor."""
        return self.folder / f"{self.name}-{_processor()}.kernels"

    def load(self) -> bool:
        """Load the kernels from the cache; returns whether that worked. Waits while another thread compiles them."""
        with self.lock:
            if self.ready:
                return True
            try:
                data = (self._compiled or self.path).read_bytes()
            except OSError:
                data = b""
            functions = _functions(data)
            if functions is None:
                return False
            vars(self).update(functions)
            self.ready = True  # last: it is read without the lock
            return True

    def compiler(self, *, background: bool) -> subprocess.Popen[str]:
        """Start a process that compiles the kernels and prints a line for each. background: at a low priority."""
        target = self.path
        if not writable(target.parent):
            target = Path(_process_folder()) / target.name
        self._compiled = target
        command = [sys.executable, "-c", PROGRAM, str(target), *self.modules]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(  # noqa: S603
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if background and hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, process.pid, 15)  # with 19 it would starve next to a busy server
        return process


def ensure_loaded(
    libraries: Sequence[KernelLibrary], on_progress: ProgressCallback | None = None, *, background: bool = False
) -> None:
    """Load the kernels of some libraries, and compile those that are not cached, in parallel. Raises KernelError.

    background: one at a time, at a low priority and with pauses.
    """
    missing = []
    for library in libraries:
        begin = time.perf_counter()
        if not library.load():
            missing.append(library)
        elif on_progress is not None:
            on_progress(f"{library.name}: loaded in {time.perf_counter() - begin:.2f} s")
        if background:
            time.sleep(PAUSE)
    if missing and on_progress is None:
        names = ", ".join(library.name for library in missing)
        warn_once(f"compiling the CPU kernels ({names}), once: about 25 seconds (cached in {missing[0].folder.parent})")
    with ThreadPoolExecutor(1 if background else cores(), "nucleate-compiling") as threads:
        for job in [threads.submit(_compile, library, on_progress, background=background) for library in missing]:
            job.result()


def _compile(library: KernelLibrary, on_progress: ProgressCallback | None, *, background: bool) -> None:
    """Compile and load a library, unless another thread has done so meanwhile."""
    with library.lock:
        if not library.load():
            _run(library, on_progress, background=background)


def _run(library: KernelLibrary, on_progress: ProgressCallback | None, *, background: bool) -> None:
    """Compile a library in a subprocess, and load it."""
    lines = []
    with library.compiler(background=background) as process:
        atexit.register(process.kill)
        try:
            for line in process.stdout or ():
                lines.append(line)
                if on_progress is not None:
                    on_progress(f"{library.name}: {line.rstrip()}")
        finally:
            atexit.unregister(process.kill)
    if process.returncode or not library.load():
        raise KernelError(f"the kernels {library.name!r} cannot be compiled: {''.join(lines)[-2000:]}")


def load_in_background(
    libraries: Sequence[KernelLibrary],
    *,
    compiling: bool = True,
    on_progress: ProgressCallback | None = None,
    also: Callable[[], object] | None = None,
) -> threading.Thread:
    """Load libraries in a thread, which is returned. compiling: compile those not cached. also: called at the end."""
    for library in libraries:
        library.mark_started(compiling=compiling)

    def work() -> None:
        try:
            ensure_loaded(libraries, on_progress, background=True) if compiling else [each.load() for each in libraries]
            if also is not None:
                also()
        except Exception:
            logger.exception("the kernels cannot be loaded; continuing without them")

    thread = threading.Thread(target=work, name="nucleate-kernels", daemon=True)
    thread.start()
    return thread


def packed(code: bytes, functions: Mapping[str, str], external: Sequence[str]) -> bytes:
    """The content of a kernel file: a line of JSON, then machine code.

    functions: symbols by name. external: the symbols that the code calls.
    """
    digest = hashlib.sha256(code).hexdigest()
    header = {"functions": dict(functions), "external": list(external), "digest": digest}
    return json.dumps(header).encode() + b"\n" + code


class _PyMethodDef(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)
    ]  # fmt: skip


METH_FASTCALL = 0x80
_keep_alive: list[object] = []  # objects that kernels need until the process ends


def _functions(data: bytes) -> dict[str, Callable[..., Any]] | None:
    """The kernels in a file; None if it is damaged, or calls a symbol that does not exist."""
    line, _, code = data.partition(b"\n")
    try:
        header = json.loads(line)
        if header["digest"] != hashlib.sha256(code).hexdigest():
            return None
    except (ValueError, KeyError, TypeError):
        return None
    llvm = _llvm()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    if not all(llvm.address_of_symbol(name) for name in header["external"]):
        return None
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    table = (ctypes.c_void_p * len(OBJECTS)).from_address(engine.get_global_value_address(TABLE))
    table[:] = [id(each) for each in OBJECTS.values()]
    new_function = ctypes.pythonapi.PyCFunction_NewEx
    new_function.restype, new_function.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    functions = {}
    for name, symbol in header["functions"].items():
        method = _PyMethodDef(name.encode(), engine.get_function_address(symbol), METH_FASTCALL, None)
        _keep_alive.append(method)
        functions[name] = new_function(ctypes.addressof(method), None, None)
    _keep_alive.append(engine)
    return functions


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
    """A short hash of the processor model and its features."""
    llvm = _llvm()
    features = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return hashlib.sha256(features.encode()).hexdigest()[:8]


@cache
def _versions() -> tuple[str, tuple[Path, ...]]:
    """What machine code depends on besides its sources: versions, and the version files of the compiler packages."""
    files = []
    for package in ("numba", "llvmlite"):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise KernelError(f"the CPU kernels need the package {package}")
        files.append(Path(spec.origin).with_name("_version.py"))
    return f"{FORMAT} {sys.implementation.cache_tag} {sys.platform} {np.__version__}", tuple(files)


@cache
def _process_folder() -> str:
    """A temporary folder of this process, used if the cache is not writable."""
    folder = tempfile.TemporaryDirectory(prefix="nucleate-")
    _keep_alive.append(folder)
    return folder.name


def cache_folder(versions: str, sources: Iterable[Path]) -> Path:
    """The cache folder of kernels with these sources, compiled by these versions."""
    base = os.environ.get("NUCLEATE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "nucleate"
    digest = hashlib.sha256(versions.encode() + b"".join(path.read_bytes() for path in sources))
    return Path(base).expanduser() / digest.hexdigest()[:16]


def writable(path: Path) -> bool:
    """Whether files can be written to a folder, which is created if necessary."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK)


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per process."""
    logger.warning("%s", message)
