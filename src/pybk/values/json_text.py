"""JSON as it is stored: one text for the same values, and errors that name what cannot be decoded."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pybk.errors import CorruptError

T = TypeVar("T")

_encode_json: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def encode_json(values: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8 with sorted keys and no spaces."""
    return _encode_json(values).encode()


def decode_json(data: bytes, make: Callable[[dict[str, Any]], T], *, where: str) -> T:
    """Decode the output of ``encode_json``.

    Args:
        data: The bytes.
        make: Makes the result of the values. It may raise what Python raises for missing or wrong values, such as
            OverflowError for a number that JSON decodes to infinity.
        where: Names the value in errors.

    Raises:
        CorruptError: The bytes are not JSON, or ``make`` refused them.
    """
    try:
        values = json.loads(data.decode())
        if not isinstance(values, dict):
            raise ValueError("not an object")
        return make(values)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise CorruptError(
            f"{where}: {len(data)} bytes do not decode to the expected values: {error!r}; restore it"
        ) from error


def to_base64(data: bytes) -> str:
    """Return bytes as base64."""
    return b2a_base64(data, newline=False).decode()


def from_base64(text: object) -> bytes:
    """Return the bytes of base64, or raise ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not base64")
    return a2b_base64(text, strict_mode=True)
