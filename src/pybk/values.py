"""Values of callers, stored values, and values in messages: fixed mappings, whole numbers, flags, JSON, lists."""

from __future__ import annotations

import json
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable, Iterable
from operator import index
from typing import Any, Final, NoReturn, Self, TypeVar

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

INT64_MAX: Final = (1 << 63) - 1
"""The largest number that 8 bytes with a sign hold; on disk, on the wire and in JSON, numbers end there."""

LISTED_MAX: Final = 20
"""The number of ids or names that a message has, unless it says otherwise."""

_MESSAGE: Final = "this mapping cannot be changed; change a copy of it: dict(mapping)"


class FrozenDict(dict[K, V]):
    """A dict that refuses every change.

    It is a dict, so that ``dataclasses.asdict``, ``json`` and ``pickle`` take it as one.

    Threads: any.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a change."""
        raise TypeError(_MESSAGE)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> Self:
        """Return the mapping itself, because it cannot be changed."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[dict[K, V]]]:
        """Pickle as a call of the class, because unpickling a dict item by item would change it."""
        return type(self), (dict(self),)


def whole(value: Any) -> int | None:
    """Return a whole number as ``int``; None for anything that is not one, and for ``bool``."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def flag_of(value: object, name: str) -> bool:
    """Return an argument that is True or False; others, such as "no", would be taken for True."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r:.100}; it takes True or False")
    return value


def listed(items: Iterable[object], most: int = LISTED_MAX) -> str:
    """Return items for a message, at most some of them, and the number of the others."""
    given = list(map(str, items))
    more = f" and {len(given) - most} more" if len(given) > most else ""
    return ", ".join(given[:most]) + more


_encode_json: Final = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode


def encode_json(values: dict[str, Any]) -> bytes:
    """Return JSON in UTF-8 with sorted keys and no spaces."""
    return _encode_json(values).encode()


def decode_json(data: bytes, make: Callable[[dict[str, Any]], T], *, where: str, number: int | None = None) -> T:
    """Decode the output of ``encode_json``.

    Args:
        data: The bytes.
        make: Makes the result from the values. It may raise Python's errors for missing or wrong values, such as
            OverflowError for a number that JSON decodes to infinity.
        where: The name of the value in errors.
        number: The ``format`` that the values must have, which ``make`` does not get; None if they have none.

    Raises:
        CorruptError: The bytes are not JSON, or ``make`` refused them.
        UnsupportedFormatError: The values have another format.
    """
    try:
        values = json.loads(data.decode())
        if not isinstance(values, dict):
            raise ValueError("not an object")
        if number is not None and (found := values.pop("format")) != number:
            raise UnsupportedFormatError(
                f"{where}: format {found}; this pybk reads format {number}: install a newer pybk"
            )
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
