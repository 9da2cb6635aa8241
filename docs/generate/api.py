"""Generates the API reference: pages of directives, for which Sphinx's autodoc reads the docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import nucleate as nc
from generate.api_names import WITHOUT_MEMBERS, ApiPage
from nucleate.sampling.stages import STAGES


def resolve(name: str) -> Any:
    """Return the object with a dotted name below ``nucleate``."""
    if name in nc.__all__:
        return getattr(nc, name)
    module, _, attribute = name.rpartition(".")
    home = importlib.import_module(f"nucleate.{module}")
    return getattr(home, attribute) if hasattr(home, attribute) else importlib.import_module(f"nucleate.{name}")


def page(one: ApiPage) -> str:
    """Return the Markdown of a page."""
    return "\n\n".join([f"# {one.title}", *filter(None, [one.about]), *(_directives(one.names))]) + "\n"


def _directives(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        thing = resolve(name)
        if inspect.ismodule(thing):
            about = (inspect.getdoc(thing) or "").partition("\n\n")[0]
            yield from (
                about,
                *_directives([f"{thing.__name__.removeprefix('nucleate.')}.{n}" for n in members(thing)]),
            )
        else:
            kind = _directive(thing)
            path = f"{data_home(name, thing)}.{name.rpartition('.')[2]}" if kind == "autodata" else f"nucleate.{name}"
            yield f"```{{eval-rst}}\n.. {kind}:: {path}\n{_options(name, thing)}```"


def members(module: Any) -> list[str]:
    """Return the public names of a module, ``__all__`` or all that it defines, except stages, which have own pages."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    constants = [name for name in vars(module) if name.isupper() and name not in own]
    found = getattr(module, "__all__", [name for name in [*constants, *own] if not name.startswith("_")])
    return [name for name in found if getattr(module, name) not in STAGES.values()]


def data_home(name: str, thing: Any) -> str:
    """Return the module that assigns a constant and documents it below. Raises LookupError if there is none."""
    attribute = name.rpartition(".")[2]
    for home, module in sorted(sys.modules.items()):
        if home.startswith("nucleate.") and vars(module).get(attribute) is thing:
            body = ast.parse(inspect.getsource(module)).body
            for node, following in pairwise(body):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if any(isinstance(one, ast.Name) and one.id == attribute for one in targets) and _is_text(following):
                    return home
    raise LookupError(f"nucleate.{name} has no docstring")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _directive(thing: Any) -> str:
    if inspect.isclass(thing):
        return "autoexception" if issubclass(thing, BaseException) else "autoclass"
    return "autofunction" if inspect.isfunction(thing) else "autodata"


def _options(name: str, thing: Any) -> str:
    if not inspect.isclass(thing) or name in WITHOUT_MEMBERS:
        return "" if inspect.isclass(thing) or inspect.isfunction(thing) else "   :no-value:\n"
    return "   :members:\n   :undoc-members:\n   :member-order: bysource\n"
