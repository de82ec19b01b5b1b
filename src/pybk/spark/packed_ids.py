"""Sets of ledger ids, and numbers by ledger, as JSON values that stay small; pure.

A few are written out: ranges as ``[[3, 5], [9, 9]]``, numbers as ``{"3": 17}``. Many become a text: the differences of
ascending ids, with what belongs to each, as variable-length numbers (LEB128), deflated (zlib), in base 85. Ids of one
kind that alternate with those of others take a few bytes in all that way; ids in no order take their entropy.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from pybk.spark.options import Ranges

WRITTEN_OUT_MAX: Final = 16
"""The most ranges or numbers that are written out."""

_LEVEL: Final = 9


def pack_ranges(ranges: Ranges) -> list[list[int]] | str:
    """Return ranges of ids as a JSON value."""
    if len(ranges) <= WRITTEN_OUT_MAX:
        return [[low, high] for low, high in ranges]
    numbers, after = [], 0
    for low, high in ranges:
        numbers += [low - after, high - low]
        after = high + 1
    return _packed(numbers)


def unpack_ranges(value: Any) -> Ranges:
    """Decode the result of ``pack_ranges``; raises ValueError or TypeError for another value."""
    if not isinstance(value, str):
        return tuple((int(low), int(high)) for low, high in value)
    ranges, after = [], 0
    for gap, more in _pairs(value):
        low = after + gap
        ranges.append((low, low + more))
        after = low + more + 1
    return tuple(ranges)


def pack_numbers(numbers: Mapping[int, int]) -> dict[str, int] | str:
    """Return numbers by id as a JSON value."""
    ascending = sorted(numbers.items())
    if len(ascending) <= WRITTEN_OUT_MAX:
        return {str(each): number for each, number in ascending}
    flat, after = [], 0
    for each, number in ascending:
        flat += [each - after, number]
        after = each + 1
    return _packed(flat)


def unpack_numbers(value: Any) -> dict[int, int]:
    """Decode the result of ``pack_numbers``; raises ValueError, TypeError or AttributeError for another value."""
    if not isinstance(value, str):
        return {int(each): int(number) for each, number in value.items()}
    numbers, after = {}, 0
    for gap, number in _pairs(value):
        numbers[after + gap] = number
        after += gap + 1
    return numbers


def _packed(numbers: Iterable[int]) -> str:
    data = bytearray()
    for number in numbers:
        while number > 0x7F:
            data.append(number & 0x7F | 0x80)
            number >>= 7
        data.append(number)
    return base64.b85encode(zlib.compress(bytes(data), _LEVEL)).decode()


def _pairs(text: str) -> Iterator[tuple[int, int]]:
    try:
        data = zlib.decompress(base64.b85decode(text))
    except zlib.error as error:
        raise ValueError(f"{text:.50} is not packed: {error}") from error
    numbers, number, shift = [], 0, 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            numbers.append(number)
            number = shift = 0
    if shift or len(numbers) % 2:
        raise ValueError(f"{text:.50} is cut off")
    return zip(numbers[::2], numbers[1::2], strict=True)
