"""Compiling the kernels of a library to one file of machine code, see ``native``; a program of its own.

Numba compiles each function that a kernel calls as if it were called by others too: optimised alone, made machine code
alone, and once more inside every caller. Here functions are only typed and lowered; LLVM optimises all of them
together, once. What Python calls is an entry that we write ourselves (see ``entries``), as it is called without Numba.
"""

from __future__ import annotations

import gc
import importlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numba.extending
from llvmlite import binding
from numba import types
from numba.core import cpu_options, sigutils
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime.context import NRTContext

from nucleate.jit.entry_points import EntryPoints

LOOSE = {"reassoc", "contract", "nsz"}
"""Sums may be added in any order, and so in vectors. NaN and inf stay what they are."""

_declared: list[_Kernel] = []


class _Kernel(NamedTuple):
    """A function that Python calls."""

    function: Any
    signature: Any
    loose: bool

    @property
    def name(self) -> str:
        return str(self.function.__name__)


def kernel(signature: str, *, loose: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel: a function that Python calls, with arguments of these types, as Numba writes them.

    Callers get it from the ``Library`` that names its module. The function itself is for other kernels and for tests.
    """

    def declare(function: Callable[..., Any]) -> Any:
        _declared.append(_Kernel(function, signature, loose))
        return _jit(function, loose)

    return declare


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call. There, float(x) of a float32 stays one: np.float64(x) is meant."""
    return _jit(function, loose=False)


def loose(function: Callable[..., Any]) -> Any:
    """The same, with ``LOOSE`` sums."""
    return _jit(function, loose=True)


def inline(function: Callable[..., Any]) -> Any:
    """The same, written into its callers."""
    return numba.njit(inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that says its own instructions."""
    return numba.extending.intrinsic(function)


def _jit(function: Callable[..., Any], loose: bool) -> Any:
    """No entries of Numba's: they would be a fifth of the time to compile, and nobody calls them."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=LOOSE if loose else False, no_cfunc_wrapper=True)(
        function
    )


class _Unfinished(JITCodeLibrary):  # type: ignore[misc]
    """What a function is lowered to.

    Nothing is optimised or run here: ``EntryPoints`` links all of them together, once.
    """

    def finalize(self) -> None:
        self._finalized = True

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _Unfinished

    def set_env(self, env_name: str, env: Any) -> None:
        pass


def machine_code(modules: list[str], on_progress: Callable[[str, float], None]) -> bytes:
    """The kernels of some modules as a file, see ``native_library.packed``. on_progress: of each, and how many seconds
    it took.

    Changes what Numba does in this process for good.
    """
    typing, context = cpu_target.typing_context, cpu_target.target_context
    typing.refresh()
    context.refresh()
    context._internal_codegen, context.cached_internal_func = _Codegen("nucleate"), {}  # noqa: SLF001
    context.get_executable = lambda *_: [].append  # any builtin, of which no two are equal: Numba finds functions by it
    NRTContext.incref = NRTContext.decref = lambda *_: None  # kernels make no arrays of their own
    called: Any = Dispatcher
    template = called.get_call_template
    called.get_call_template = lambda self, given, named: template(self, _types(self, given), named)
    context.create_cpython_wrapper = lambda *_, **__: None
    for name in modules:
        importlib.import_module(name)
    with global_compiler_lock:
        entries = EntryPoints(context)
        for each in (one for one in _declared if one.function.__module__ in modules):
            begin = time.perf_counter()
            arguments, result = sigutils.normalize_signature(each.signature)
            flags = Flags()
            flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.nrt = True
            flags.error_model = "numpy"
            flags.fastmath = cpu_options.FastMathOptions(LOOSE if each.loose else False)
            compiled = compile_extra(typing, context, each.function, arguments, result, flags, locals={})
            entries.add(each.name, compiled)
            on_progress(each.name, time.perf_counter() - begin)
        begin = time.perf_counter()
        code = entries.machine_code()
        on_progress("machine code of all", time.perf_counter() - begin)
    return code


def _types(called: Any, given: Sequence[Any]) -> list[Any]:
    """The types of arguments: functions of ours are not compiled once more for each constant that they are given."""
    ours = not called.py_func.__module__.startswith("numba.")
    return [types.unliteral(one) if ours else one for one in given]


def main(path: str, *modules: str) -> None:
    """Compile the kernels of some modules to a file; a line for each on stdout."""
    gc.disable()  # nothing that is made is garbage before the end, and it would be a tenth of the time
    binding.ffi.lib._lock._cblist.clear()  # noqa: SLF001  # events that nobody listens to: another tenth
    code = machine_code(list(modules), lambda name, seconds: print(f"{name}, {seconds:.1f} s", flush=True))
    target = Path(path)
    new = target.with_suffix(f".{os.getpid()}")
    new.write_bytes(code)
    new.replace(target)
