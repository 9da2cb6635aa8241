"""Whether a rule is a line in the score whatever the numbers of its row and stage are."""

from __future__ import annotations

from typing import Any

from numpy.lib.mixins import NDArrayOperatorsMixin

from nucleate.backends.rules import Line, Self, settings
from nucleate.core.stage import Row, Stage


class Unknown(NDArrayOperatorsMixin):
    """Stands for a number that may be any."""

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __array_function__(self, function: Any, kinds: Any, given: Any, others: Any) -> Any:
        return NotImplemented if any(isinstance(one, Line) for one in given) else Unknown()

    def __bool__(self) -> bool:
        raise TypeError("a rule that branches on a number has no one answer")


_forms: dict[Any, str | None] = {}


def form(stage: Stage, rule: str) -> str | None:
    """Whether a rule is a "line", or "bent", for every row and whatever the numbers of the stage are; else None."""
    key = (rule, *settings(stage))
    if key not in _forms:
        try:
            row = Row(*(Unknown() for _ in Row._fields))
            said = getattr(type(stage), rule)(Self(stage, Unknown), Line(1.0, 0.0), row)
        except Exception:  # noqa: BLE001  # a rule may do anything
            said = None
        _forms[key] = None if not isinstance(said, Line) else "bent" if said.bent else "line"
    return _forms[key]
