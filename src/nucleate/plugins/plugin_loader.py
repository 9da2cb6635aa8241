"""Registers user-defined stages, and loads plug-ins that define them.

The parameters of a registered stage are fields of SamplingParams, flags and JSON fields. Plug-ins are modules, and
packages with entry points in the group ``nucleate.stages``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import MISSING
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from nucleate.jit.native_library import warn_once
from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.sampling import presets
from nucleate.sampling.stage import SHAPES, Combine, Draw, Stage, Tap, shape_of
from nucleate.sampling.stages import STAGES
from nucleate.sampling_params import FIELDS, update_fields

Kind = TypeVar("Kind", bound=type[Stage])

_BUILT_IN = frozenset(STAGES)


def register_stage(kind: Kind) -> Kind:
    """Register a stage. Its public parameters become fields of SamplingParams, flags and fields of HTTP bodies.

    Use it as a decorator, or call it. Returns the class. A class that was registered before is replaced by one of the
    same name and module, so that a notebook cell can run again. Raises TypeError, which says what to change: for a
    class that is not a complete stage, for a name, rank or field that exists, and for a parameter without a default.
    """
    _check_class(kind)
    others = {name: other for name, other in STAGES.items() if not _is_same(kind, other)}
    _check_names(kind, others)
    set_stages({**others, kind.name: kind})
    return kind


def set_stages(stages: dict[str, type[Stage]]) -> None:
    """Replace all stages, and derive what follows from them."""
    ordered = sorted(stages.items(), key=lambda item: (item[1].rank, item[0]))
    STAGES.clear()
    STAGES.update(ordered)
    presets.update_presets()
    presets.build.cache_clear()
    update_fields()


def _is_same(kind: type[Stage], other: type[Stage]) -> bool:
    """Whether a class is a new version of a registered one."""
    same = (kind.__module__, kind.__qualname__) == (other.__module__, other.__qualname__)
    return kind is other or (same and kind.name == other.name and kind.name not in _BUILT_IN)


def _check_class(kind: type[Stage]) -> None:
    if not isinstance(kind, type) or not issubclass(kind, Stage):
        raise TypeError(f"register_stage takes a subclass of Stage, got {kind!r:.80}")
    shape_of(kind)
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise TypeError(f"{kind.__name__} must define {', '.join(missing)}")
    text = kind.__doc__ or ""
    if not text.strip() or text.startswith(f"{kind.__name__}("):  # what dataclass() writes
        raise TypeError(f"{kind.__name__} needs a docstring: its first line is the help text")
    public = [parameter for parameter in kind.parameters.values() if parameter.public]
    for parameter in public:
        if parameter.default is MISSING:
            raise TypeError(f"{kind.__name__}: the parameter {parameter.name} needs a default")
    if public and not issubclass(kind, Draw | Tap) and not kind().neutral:
        why = f"{kind.__name__} would act on every request"
        raise TypeError(f"{why}: one of its parameters needs neutral=..., its value without effect")


def _check_names(kind: type[Stage], others: dict[str, type[Stage]]) -> None:
    if kind.name in others:
        raise TypeError(f"a stage named {kind.name} exists: {others[kind.name].__qualname__}; choose another name")
    if not issubclass(kind, Combine | Draw):
        for other in others.values():
            if other.rank == kind.rank and not issubclass(other, Combine | Draw):
                taken = f"{kind.__name__}.rank is {kind.rank}, which {other.name} has"
                raise TypeError(f"{taken}: choose another, also between two, such as {kind.rank}.5")
    fields = {parameter.name: other for other in others.values() for parameter in other.parameters.values()}
    own = {parameter.name for parameter in STAGES[kind.name].parameters.values()} if kind.name in STAGES else set()
    for parameter in kind.parameters.values():
        if parameter.public and parameter.name in FIELDS and parameter.name not in own and parameter.name != "seed":
            owner = f"of the stage {fields[parameter.name].name}" if parameter.name in fields else "of SamplingParams"
            raise TypeError(f"{kind.__name__}: {parameter.name} is a field {owner}; use param(..., name=...)")


GROUP = "nucleate.stages"
VARIABLE = "NUCLEATE_PLUGINS"


def load_plugins(names: Iterable[str] = ()) -> list[type[Stage]]:
    """Register the stages of installed packages, of ``NUCLEATE_PLUGINS`` (separated by commas), and of modules.

    names: modules, or paths of Python files. Returns the stages that are new. A broken installed package is skipped
    with a warning; for a module, raises ParameterError, which names it.
    """
    before = set(STAGES.values())
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
            _register(loaded)
        except Exception as error:  # noqa: BLE001 - the code is not ours, and the program does not depend on it
            warn_once(f"the plug-in {entry.name} ({entry.value}) was not loaded: {one_line(error)}")
    for name in (*os.environ.get(VARIABLE, "").split(","), *names):
        if name.strip():
            _load(name.strip())
    return [kind for kind in STAGES.values() if kind not in before]


def _load(name: str) -> None:
    try:
        _register(_module_of_file(Path(name)) if name.endswith(".py") else importlib.import_module(name))
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ParameterError("plugin", f"the plug-in {name} cannot be loaded: {reason}") from error


def _module_of_file(path: Path) -> ModuleType:
    name = f"nucleate_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register(found: object) -> None:
    """Register a stage, or every stage that a module defines and has not registered itself."""
    if isinstance(found, ModuleType):
        for kind in list(vars(found).values()):
            is_stage = isinstance(kind, type) and issubclass(kind, SHAPES) and kind not in SHAPES
            if is_stage and kind.__module__ == found.__name__ and not kind.__name__.startswith("_"):
                _register(kind)
    elif isinstance(found, type) and issubclass(found, Stage):
        if STAGES.get(found.name) is not found:
            register_stage(found)
    elif callable(found):
        found()
    else:
        raise TypeError(f"a plug-in is a module, a stage or a function, got {found!r:.60}")
