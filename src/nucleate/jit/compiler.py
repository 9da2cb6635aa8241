"""Compiles the kernels of a library to one file of machine code (see ``native_library``), in a process of its own.

Numba would optimise and compile each function separately, and once more inlined in every caller. Here functions are
only typed and lowered; LLVM optimises all of them together, once. Python calls a kernel without Numba, through an entry
point (see ``entry_points``).
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
"""LLVM fast-math flags: sums may be reordered, and so vectorised. NaN and inf are preserved."""

_declared: list[_Kernel] = []


class _Kernel(NamedTuple):
    """A kernel declaration."""

    function: Any
    signature: Any
    loose: bool

    @property
    def name(self) -> str:
        return str(self.function.__name__)


def kernel(signature: str, *, loose: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Declare a kernel: a function that Python calls. signature: its types in Numba's notation.

    Callers use the attribute of the ``KernelLibrary`` that lists its module. The function that the decorator returns is
    for other kernels and for tests. loose: compile with the fast-math flags ``LOOSE``.
    """

    def declare(function: Callable[..., Any]) -> Any:
        _declared.append(_Kernel(function, signature, loose))
        return _jit(function, loose)

    return declare


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that kernels call. In it, float(x) of a float32 stays float32; use np.float64(x)."""
    return _jit(function, loose=False)


def loose(function: Callable[..., Any]) -> Any:
    """The same, with the fast-math flags ``LOOSE``."""
    return _jit(function, loose=True)


def inline(function: Callable[..., Any]) -> Any:
    """The same, inlined in its callers by Numba."""
    return numba.njit(inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that emits LLVM IR."""
    return numba.extending.intrinsic(function)


def _jit(function: Callable[..., Any], loose: bool) -> Any:
    """Without Numba's C wrappers, which are never called and would take a fifth of the compile time."""
    return numba.njit(nogil=True, error_model="numpy", fastmath=LOOSE if loose else False, no_cfunc_wrapper=True)(
        function
    )


class _UnlinkedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The lowered IR of a function. It is not optimised here: ``EntryPoints`` links all of them together, once."""

    def finalize(self) -> None:
        self._finalized = True

    def _optimize_functions(self, ll_module: Any) -> None:
        pass

    def get_pointer_to_function(self, name: str) -> int:
        return 0


class _Codegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = _UnlinkedLibrary

    def set_env(self, env_name: str, env: Any) -> None:
        pass


def machine_code(modules: list[str], on_progress: Callable[[str, float], None]) -> bytes:
    """The kernels of some modules as the content of a file, see ``native_library.packed``.

    on_progress: called with the name of each kernel and the seconds that it took. Patches Numba in this process.
    """
    typing, context = cpu_target.typing_context, cpu_target.target_context
    typing.refresh()
    context.refresh()
    context._internal_codegen, context.cached_internal_func = _Codegen("nucleate"), {}  # noqa: SLF001
    context.get_executable = lambda *_: [].append  # any unique callable: Numba uses it as a key
    NRTContext.incref = NRTContext.decref = lambda *_: None  # kernels do not allocate arrays
    dispatcher: Any = Dispatcher
    template = dispatcher.get_call_template
    dispatcher.get_call_template = lambda self, args, kws: template(self, _argument_types(self, args), kws)
    context.create_cpython_wrapper = lambda *_, **__: None
    for name in modules:
        importlib.import_module(name)
    with global_compiler_lock:
        entries = EntryPoints(context)
        for each in (declared for declared in _declared if declared.function.__module__ in modules):
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
        on_progress("machine code", time.perf_counter() - begin)
    return code


def _argument_types(function: Any, args: Sequence[Any]) -> list[Any]:
    """Argument types without literals, so that a function is not compiled again for each constant argument."""
    is_numba = function.py_func.__module__.startswith("numba.")
    return [arg if is_numba else types.unliteral(arg) for arg in args]


def main(path: str, *modules: str) -> None:
    """Compile the kernels of some modules to a file, and print a line for each."""
    gc.disable()  # saves a tenth of the time
    binding.ffi.lib._lock._cblist.clear()  # noqa: SLF001 - unused callbacks: another tenth
    code = machine_code(list(modules), lambda name, seconds: print(f"{name}, {seconds:.1f} s", flush=True))
    target = Path(path)
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(code)
    temporary.replace(target)
