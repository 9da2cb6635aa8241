"""Loads plug-ins: modules that define stages, and packages with entry points in the group ``nucleate.stages``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from nucleate.jit.kernel_cache import warn_once
from nucleate.parameters.converters import one_line
from nucleate.parameters.parameter import ParameterError
from nucleate.plugins.stage_registry import register_stage
from nucleate.sampling.stage import SHAPES, Stage
from nucleate.sampling.stages import STAGES

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
