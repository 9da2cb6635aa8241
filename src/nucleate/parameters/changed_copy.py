"""A shallow copy of an object, with some attributes replaced."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

T = TypeVar("T")


def changed_copy(original: T, **attributes: Any) -> T:
    """A copy that shares everything with the original but these attributes. They may be slots, and private."""
    copied = copy.copy(original)
    for name, value in attributes.items():
        setattr(copied, name, value)
    return copied
