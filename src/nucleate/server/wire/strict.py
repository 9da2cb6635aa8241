"""JSON as it stands in its standard, and no more: no NaN, no infinity, no name twice. Knows no field."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from nucleate.core.parameter import ParameterError
from nucleate.core.values import shown


def read_json(text: str) -> Any:
    """What JSON text says. Raises ParameterError for all that is not, also for absurd depth."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ParameterError("body", "not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ParameterError("body", f"not valid JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"{shown(name)} is there twice")
        made[name] = value
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
