"""All stages, in files and folders by kind. A file that is put here is found: there is no list to edit."""

from __future__ import annotations

import importlib
import pkgutil

from nucleate.sampling.stage import Stage


def _find() -> dict[str, type[Stage]]:
    found: dict[str, type[Stage]] = {}
    for info in pkgutil.walk_packages(__path__, f"{__name__}."):
        module = importlib.import_module(info.name)
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Stage) and value.__module__ == module.__name__:
                if value.name in found:
                    raise TypeError(f"two stages are named {value.name}: {found[value.name]!r} and {value!r}")
                found[value.name] = value
    return dict(sorted(found.items(), key=lambda item: (item[1].rank, item[0])))


STAGES = _find()
"""Every stage by its name, in canonical order."""

globals().update({kind.__name__: kind for kind in STAGES.values()})
__all__ = ["STAGES", *(kind.__name__ for kind in STAGES.values())]  # noqa: PLE0604  # names are found, not listed
