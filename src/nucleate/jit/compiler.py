"""Compiles the kernels of a library to one file of machine code (see ``native_library``), in a process of its own.

Numba would optimise and compile each function separately, and once more inlined in every caller. Here functions are
only typed and lowered; LLVM optimises all of them together, once. Python calls a kernel without Numba, through an entry
point: a C function in LLVM IR that converts and checks the arguments.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, cpu_options, sigutils
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.compiler import Flags, compile_extra
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime.context import NRTContext

from nucleate.jit.native_library import OBJECTS, TABLE, packed

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


_BYTE, _INT, _SIZE = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_POINTER = _BYTE.as_pointer()
_HEAD = ir.ArrayType(_BYTE, object.__basicsize__)
_DTYPE = ir.LiteralStructType([_HEAD, _POINTER, _BYTE, _BYTE, _BYTE, _BYTE, _INT])
"""The first fields of NumPy's PyArray_Descr: type object, kind, type character, byte order, flags, type number."""
_ARRAY = ir.LiteralStructType(
    [_HEAD, _POINTER, _INT, _SIZE.as_pointer(), _SIZE.as_pointer(), _POINTER, _DTYPE.as_pointer(), _INT]
)
"""The first fields of NumPy's PyArrayObject: data, dimensions, shape, strides, base, dtype, flags."""
C_CONTIGUOUS, ALIGNED = 0x1, 0x100


class EntryPoints:
    """The entry points of a library: functions with the METH_FASTCALL convention, which convert and check arguments.

    They release the GIL while the kernel runs. The Python objects that they use are in a table (``OBJECTS``).
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._library = context.codegen().create_library("nucleate.entry_points")
        self._module = self._library.create_ir_module("entries")
        self._table = ir.GlobalVariable(self._module, ir.ArrayType(_POINTER, len(OBJECTS)), TABLE)
        self._table.initializer = ir.Constant(self._table.value_type, None)
        self._names: list[str] = []

    def add(self, name: str, compiled: Any) -> None:
        """Add the entry point of a kernel."""
        context, signature = self._context, compiled.fndesc
        self._library.add_linking_library(compiled.library)
        self._names.append(name)
        native = context.call_conv.get_function_type(signature.restype, signature.argtypes)
        native = ir.Function(self._module, native, signature.llvm_func_name)
        kind = ir.FunctionType(_POINTER, [_POINTER, _POINTER.as_pointer(), _SIZE])
        entry = ir.Function(self._module, kind, f"nucleate.{name}")
        b = ir.IRBuilder(entry.append_basic_block())
        _, arguments, count = entry.args
        expected = ir.Constant(_SIZE, len(signature.argtypes))
        message = f"{name} takes {len(signature.argtypes)} arguments"
        self._raise_if(b, b.icmp_signed("!=", count, expected), message)
        values = [
            self._value(b, b.load(b.gep(arguments, [ir.Constant(_SIZE, i)])), type_, f"{name}: argument {i + 1}")
            for i, type_ in enumerate(signature.argtypes)
        ]
        with cgutils.if_unlikely(b, cgutils.is_not_null(b, self._call(b, "PyErr_Occurred", _POINTER))):
            b.ret(_POINTER(None))
        thread = self._call(b, "PyEval_SaveThread", _POINTER)
        status, result = context.call_conv.call_function(b, native, signature.restype, signature.argtypes, values)
        self._call(b, "PyEval_RestoreThread", ir.VoidType(), thread)
        self._raise_if(b, status.is_error, f"{name} failed", "RuntimeError")
        b.ret(self._object(b, result, signature.restype))

    def _value(self, b: Any, argument: Any, type_: Any, what: str) -> Any:
        """A Python argument, converted to the type that the kernel takes."""
        if isinstance(type_, types.Array):
            return self._array(b, argument, type_, f"{what} must be an array: {type_}")
        if isinstance(type_, types.Float):
            number = self._call(b, "PyFloat_AsDouble", ir.DoubleType(), argument)
            return number if type_.bitwidth == 64 else b.fptrunc(number, ir.FloatType())
        if isinstance(type_, types.Boolean):
            return b.icmp_signed(">", self._call(b, "PyObject_IsTrue", _INT, argument), ir.Constant(_INT, 0))
        convert = "PyLong_AsLongLong" if type_.signed else "PyLong_AsUnsignedLongLongMask"
        number = self._call(b, convert, _SIZE, argument)
        return number if type_.bitwidth == 64 else b.trunc(number, ir.IntType(type_.bitwidth))

    def _array(self, b: Any, argument: Any, type_: Any, message: str) -> Any:
        """The same, for an array."""
        class_ = b.load(
            b.bitcast(b.gep(argument, [ir.Constant(_SIZE, object.__basicsize__ - 8)]), _POINTER.as_pointer())
        )
        is_array = self._call(b, "PyType_IsSubtype", _INT, class_, self._python_object(b, "ndarray"))
        self._raise_if(b, b.icmp_signed("==", is_array, ir.Constant(_INT, 0)), message)
        array = b.bitcast(argument, _ARRAY.as_pointer())
        data, dimensions, shape, strides, _, dtype, flags = (
            b.load(cgutils.gep(b, array, 0, place)) for place in range(1, 8)
        )
        number, order = b.load(cgutils.gep(b, dtype, 0, 6)), b.load(cgutils.gep(b, dtype, 0, 4))
        needed = ALIGNED | (C_CONTIGUOUS if type_.layout == "C" else 0)
        swapped = ord("<" if sys.byteorder == "big" else ">")
        wrong = (
            b.icmp_signed("!=", dimensions, ir.Constant(_INT, type_.ndim)),
            b.icmp_signed("!=", number, ir.Constant(_INT, np.dtype(str(type_.dtype)).num)),
            b.icmp_signed("==", order, ir.Constant(_BYTE, swapped)),
            b.icmp_signed("!=", b.and_(flags, ir.Constant(_INT, needed)), ir.Constant(_INT, needed)),
        )
        self._raise_if(b, reduce(b.or_, wrong), message)
        out = self._context.make_array(type_)(self._context, b)
        lengths, steps = (
            [b.load(b.gep(start, [ir.Constant(_SIZE, i)])) for i in range(type_.ndim)] for start in (shape, strides)
        )
        items = ir.Constant(_SIZE, 1)
        for length in lengths:
            items = b.mul(items, length)
        out.data = b.bitcast(data, out.data.type)
        out.shape, out.strides = cgutils.pack_array(b, lengths), cgutils.pack_array(b, steps)
        out.nitems, out.itemsize = items, ir.Constant(_SIZE, np.dtype(str(type_.dtype)).itemsize)
        out.meminfo, out.parent = cgutils.get_null_value(out.meminfo.type), cgutils.get_null_value(out.parent.type)
        return out._getvalue()  # noqa: SLF001

    def _object(self, b: Any, result: Any, type_: Any) -> Any:
        """The result of a kernel, as a Python object."""
        if isinstance(type_, types.Float):
            number = result if type_.bitwidth == 64 else b.fpext(result, ir.DoubleType())
            return self._call(b, "PyFloat_FromDouble", _POINTER, number)
        if isinstance(type_, types.Integer):
            number = result if type_.bitwidth == 64 else b.sext(result, _SIZE)
            return self._call(b, "PyLong_FromLongLong", _POINTER, number)
        if isinstance(type_, types.Boolean):
            return self._call(b, "PyBool_FromLong", _POINTER, b.zext(result, _SIZE))
        nothing = self._python_object(b, "None")
        self._call(b, "Py_IncRef", ir.VoidType(), nothing)
        return nothing

    def _python_object(self, b: Any, name: str) -> Any:
        return b.load(cgutils.gep(b, self._table, 0, [*OBJECTS].index(name)))

    def _raise_if(self, b: Any, wrong: Any, message: str, error: str = "TypeError") -> None:
        with cgutils.if_unlikely(b, wrong):
            text = self._context.insert_const_string(self._module, message)
            self._call(b, "PyErr_SetString", ir.VoidType(), self._python_object(b, error), text)
            b.ret(_POINTER(None))

    def _call(self, b: Any, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return b.call(cgutils.get_or_insert_function(self._module, kind, name), arguments)

    def machine_code(self) -> bytes:
        """The content of the file, see ``packed``. Raises ValueError if a kernel needs Numba at run time."""
        self._library.add_ir_module(self._module)
        codegen, entries = self._context.codegen(), {name: f"nucleate.{name}" for name in self._names}
        machine, final = codegen._tm, _linked(self._library)  # noqa: SLF001
        for function in final.functions:
            if not function.is_declaration and function.name not in entries.values():
                function.linkage = "internal"
        with binding.create_new_module_pass_manager() as cleanup:
            cleanup.add_strip_dead_prototype_pass()  # then all remaining declarations are needed
            builder = codegen._pass_builder()  # noqa: SLF001
            builder.getModulePassManager().run(final, builder)
            cleanup.run(final, builder)
        declared = [function.name for function in final.functions if function.is_declaration]
        external = [name for name in declared if not name.startswith("llvm.")]
        if missing := [name for name in external if name.startswith(("NRT_", "numba_"))]:
            raise ValueError(f"the kernels {self._names} need functions of Numba at run time: {missing}")
        return packed(machine.emit_object(final), entries, external)


def _linked(library: Any) -> Any:
    """The IR of a library, linked with all libraries that it depends on."""
    pending, linked = [library], {library}
    for each in pending:
        for other in each._linking_libraries:  # noqa: SLF001
            if other not in linked:
                linked.add(other)
                pending.append(other)
                library._final_module.link_in(other._final_module)  # noqa: SLF001
    return library._final_module  # noqa: SLF001
