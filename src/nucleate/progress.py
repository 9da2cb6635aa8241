"""The bar that long work shows on stderr. Knows no work."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def bar(items: Iterable[Any] | None = None, *, total: int | None = None, unit: str, shown: bool = True) -> Any:
    """A bar over items, or one that is moved by its ``update``. total: how many there are, if that is known."""
    from tqdm import tqdm

    return tqdm(items, total=total, unit=unit, disable=not shown, file=sys.stderr, dynamic_ncols=True)
