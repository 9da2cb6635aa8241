"""Kernels as machine code: compilation, argument conversion, and reading of cache files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nucleate.jit import native_library
from nucleate.jit.native_library import KernelError, KernelLibrary

SOURCE = """
import math
import numpy as np
from nucleate.jit.compiler import jit, kernel

@jit
def square(x):
    return x * x

@kernel("float64(float32[:, ::1], float64[:], int64, uint64, float32, boolean)")
def all_kinds(rows, strided, integer, seed, part, yes):
    if seed != np.uint64(2**64 - 1) or not yes:
        return -1.0
    return square(rows.sum()) + strided.sum() + integer + part

@kernel("void(int64[::1], float64[::1])")
def order(out, x):
    for i in range(x.size):
        out[i] = 0
        for j in range(x.size):
            out[i] += x[j] < x[i]

@kernel("int32(int32)")
def next_one(x):
    return np.int32(x + 1)

@kernel("boolean(float64)", loose=True)
def wide(x):
    return math.exp(x) > 2.0

@kernel("float32(int64)")
def fails(x):
    if x > 3:
        raise ValueError("never seen")
    return np.float32(x)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    folder = tmp_path_factory.mktemp("kernels")
    source = folder / "some_kernels.py"
    source.write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("NUCLEATE_CACHE", str(folder / "cache"))
        patched.syspath_prepend(str(folder))
        made = KernelLibrary("some", ["some_kernels"], [source])
        lines: list[str] = []
        native_library.ensure_loaded([made], lines.append)
        assert [line.partition(",")[0] for line in lines] == [
            *(f"some: {name}" for name in ("all_kinds", "order", "next_one", "wide", "fails")),
            "some: machine code",
        ]
        assert made.path.is_file()
        return made


@pytest.mark.slow
def test_arguments_and_results_of_every_type(library: KernelLibrary) -> None:
    rows, strided = np.full((2, 3), 0.5, np.float32), np.arange(6.0)[::2]
    run = library.all_kinds
    assert run(rows, strided, np.int64(4), 2**64 - 1, 0.25, True) == 9 + 6 + 4 + 0.25
    assert run(rows, strided, 4, 2**64 - 1, 0.25, False) == -1.0
    assert library.next_one(41) == 42
    assert library.next_one(-2) == -1
    assert library.wide(1) is True
    assert library.wide(0.5) is False
    assert library.fails(3) == 3.0
    x = np.random.default_rng(0).normal(size=1000)
    out = np.empty(1000, np.int64)
    assert library.order(out, x) is None
    np.testing.assert_array_equal(out, np.argsort(np.argsort(x)))


class Sub(np.ndarray):
    """A subclass of ndarray, such as a memory map."""


def test_a_subclass_of_ndarray_is_accepted(library: KernelLibrary) -> None:
    rows = np.ones((1, 1), np.float32).view(Sub)
    assert library.all_kinds(rows, np.zeros(0), 0, 2**64 - 1, 0.0, True) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {0: None},
        {0: [[1.0]]},
        {0: np.ones((1, 1))},
        {0: np.ones(1, np.float32)},
        {0: np.ones((4, 4), np.float32)[:, ::2]},
        {0: np.ones((1, 1), np.dtype(np.float32).newbyteorder())},
        {0: np.frombuffer(b"12345", np.uint8)[1:5].view(np.float32).reshape(1, 1)},
        {1: np.ones((1, 1))},
        {2: 1.5},
        {2: "1"},
        {4: "x"},
        {4: None},
    ],
)
def test_wrong_argument_types(wrong: dict[int, Any], library: KernelLibrary) -> None:
    given: list[Any] = [np.ones((1, 1), np.float32), np.ones(1), 1, 2**64 - 1, 1.0, True]
    for index, value in wrong.items():
        given[index] = value
    with pytest.raises(TypeError):
        library.all_kinds(*given)


def test_the_number_of_arguments(library: KernelLibrary) -> None:
    with pytest.raises(TypeError, match="next_one takes 1 arguments"):
        library.next_one()
    with pytest.raises(TypeError, match="takes 1"):
        library.next_one(1, 2)


def test_integer_overflow(library: KernelLibrary) -> None:
    with pytest.raises(OverflowError):
        library.next_one(2**70)


def test_a_failing_kernel(library: KernelLibrary) -> None:
    with pytest.raises(RuntimeError, match="fails failed"):
        library.fails(4)


def test_no_reference_leaks(library: KernelLibrary) -> None:
    x, out, rows = np.arange(9.0)[:8], np.empty(8, np.int64), np.ones((1, 1), np.float32)
    before = [sys.getrefcount(each) for each in (None, x, out, rows)]
    for _ in range(1000):
        library.order(out, x)
        with pytest.raises(TypeError):
            library.all_kinds(rows, None, 1, 2, 1.0, True)
    after = [sys.getrefcount(each) for each in (None, x, out, rows)]
    assert all(abs(one - other) < 50 for one, other in zip(before, after, strict=True))


def again(library: KernelLibrary) -> KernelLibrary:
    """The same library as in another process."""
    return KernelLibrary(library.name, library.modules, library._sources)


@pytest.fixture
def cache(library: KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = library._sources[0].parent
    monkeypatch.setenv("NUCLEATE_CACHE", str(folder / "cache"))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_another_process_loads_them_without_numba(library: KernelLibrary, cache: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from nucleate.jit.native_library import KernelLibrary
library = KernelLibrary("some", ["some_kernels"], [Path({str(library._sources[0])!r})])
assert library.load()
print(library.next_one(1), "numba" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.split() == ["2", "False"]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"{}\n1", lambda data: b"x" * 99]
)
def test_a_damaged_file_is_ignored(damage: Any, library: KernelLibrary, cache: Path) -> None:
    data = library.path.read_bytes()
    library.path.write_bytes(damage(data))
    try:
        assert not again(library).load()
    finally:
        library.path.write_bytes(data)
    assert again(library).load()


def test_a_file_with_unknown_functions_is_ignored(library: KernelLibrary, cache: Path) -> None:
    head, _, code = library.path.read_bytes().partition(b"\n")
    assert native_library._functions(head + b"\n" + code) is not None
    assert native_library._functions(native_library.packed(code, {}, ["no_such_function_anywhere"])) is None


@pytest.mark.slow
def test_kernels_are_compiled_in_memory_if_the_cache_is_not_writable(
    library: KernelLibrary, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUCLEATE_CACHE", str(cache / "elsewhere"))
    monkeypatch.setattr(native_library, "writable", lambda path: False)
    one = again(library)
    assert one.next_one(1) == 2
    assert not one.path.exists()


def test_kernels_of_another_user_are_loaded(
    library: KernelLibrary, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a cache that ``nucleate warm`` filled when a container image was built."""
    monkeypatch.setattr(native_library, "writable", lambda path: False)
    monkeypatch.setattr(native_library, "_compile", None)
    assert again(library).next_one(1) == 2


@pytest.mark.slow
def test_a_compilation_error_has_a_reason(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    with pytest.raises(KernelError, match="No module named 'no_such_module'"):
        native_library.ensure_loaded([KernelLibrary("none", ["no_such_module"], [])])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_loads_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the parent that load kernels do not exist in a forked child."""
    library = KernelLibrary("unmade", [], [])
    library.mark_started(compiling=True)
    child = os.fork()
    if not child:
        started: list[object] = []
        monkeypatch.setattr(
            native_library, "load_in_background", lambda some, *, compiling: started.append((some, compiling))
        )
        library.record_fallback(native_library.LOAD_AFTER)
        os._exit(0 if started == [([library], False)] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_kernels_of_other_sources_or_versions_have_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUCLEATE_CACHE", str(tmp_path))
    source = tmp_path / "a.py"
    source.write_text("x = 1")
    first = native_library.cache_folder("1.0", [source])
    assert first.parent == tmp_path
    assert first == native_library.cache_folder("1.0", [source]) != native_library.cache_folder("1.1", [source])
    source.write_text("x = 2")
    assert first != native_library.cache_folder("1.0", [source])


def test_a_folder_that_is_a_file_is_not_writable(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    assert not native_library.writable(path)
    assert native_library.writable(tmp_path / "folder")
