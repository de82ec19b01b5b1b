"""Columns of bytes or of text in rows that are written."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def bytes_of(column: pa.Array) -> list[Any]:
    """Return the values of a binary or string column, text in UTF-8, and None for a null."""
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    found: list[Any] = column.to_pylist()
    return found
