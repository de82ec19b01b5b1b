"""Whole numbers that callers give: any type that stands for one, such as numpy's."""

from __future__ import annotations

from operator import index
from typing import Any


def whole(value: Any) -> int | None:
    """Return a whole number as ``int``; None for anything that is not one, and for ``bool``."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None
