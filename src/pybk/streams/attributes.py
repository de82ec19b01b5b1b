"""Key and headers of a record of a named log, encoded before its data.

Numbers are little-endian: 2 bytes length of the key, 65,535 for none; 2 bytes number of headers; the key; for each
header 2 bytes length of its name, 4 bytes length of its value, the name in UTF-8 and the value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pybk.errors import CorruptError, UsageError

KEY_BYTES_MAX: Final = 4 << 10
HEADERS_MAX: Final = 64
HEADERS_BYTES_MAX: Final = 64 << 10
_NAME_BYTES_MAX: Final = 255
_NO_KEY: Final = 0xFFFF
_COUNTS: Final = struct.Struct("<HH")
_HEADER: Final = struct.Struct("<HI")

NO_ATTRIBUTES: Final = _COUNTS.pack(_NO_KEY, 0)
"""Stands for no key and no headers."""

Headers = tuple[tuple[str, bytes], ...]


def encode_attributes(key: object, headers: object) -> bytes:
    """Return the bytes of a key, bytes or None, and of headers, pairs of a name and bytes; empty for neither.

    Raises:
        UsageError: A key or a header is of a wrong type, or too long.
    """
    if key is None and headers == ():
        return b""
    if not isinstance(key, bytes | None) or len(key or b"") > KEY_BYTES_MAX:
        raise UsageError(f"key is {key!r:.50}; it takes at most {KEY_BYTES_MAX} bytes, or None")
    pairs = _checked_headers(headers)
    parts = [_COUNTS.pack(_NO_KEY if key is None else len(key), len(pairs)), key or b""]
    for each in pairs:
        name, value = _checked_header(each)
        parts += [_HEADER.pack(len(name), len(value)), name, value]
    found = b"".join(parts)
    if len(found) > KEY_BYTES_MAX + HEADERS_BYTES_MAX:
        raise UsageError(f"key and headers have {len(found)} bytes; they take {HEADERS_BYTES_MAX}: put more into data")
    return found


def _checked_headers(headers: object) -> Sequence[object]:
    if not isinstance(headers, Sequence) or isinstance(headers, str | bytes) or len(headers) > HEADERS_MAX:
        raise UsageError(
            f"headers is {headers!r:.50}; it takes a sequence of at most {HEADERS_MAX} pairs of a name and bytes"
        )
    return headers


def _checked_header(header: object) -> tuple[bytes, bytes]:
    match header:
        case (str() as name, bytes() as value):
            try:
                encoded = name.encode()
            except UnicodeEncodeError:
                encoded = b""
            if 1 <= len(encoded) <= _NAME_BYTES_MAX:
                return encoded, value
    raise UsageError(
        f"a header is {header!r:.50}; it takes a pair of a name, of 1 to {_NAME_BYTES_MAX} bytes in UTF-8, and bytes"
    )


def decode_attributes(data: bytes, *, where: str) -> tuple[bytes | None, Headers, bytes]:
    """Return the key, the headers and the data of a record.

    Raises:
        CorruptError: The bytes do not begin with a key and headers; ``where`` names the record.
    """
    try:
        key_bytes, count = _COUNTS.unpack_from(data)
        at = _COUNTS.size
        key = None
        if key_bytes != _NO_KEY:
            key, at = _piece(data, at, key_bytes)
        headers = []
        for _ in range(count):
            name_bytes, value_bytes = _HEADER.unpack_from(data, at)
            name, at = _piece(data, at + _HEADER.size, name_bytes)
            value, at = _piece(data, at, value_bytes)
            headers.append((name.decode(), value))
    except (struct.error, ValueError) as error:
        raise CorruptError(f"{where}: its key and headers are damaged: {error}") from error
    return key, tuple(headers), data[at:]


def _piece(data: bytes, at: int, nbytes: int) -> tuple[bytes, int]:
    """Return some bytes and where they end; ValueError if there are fewer."""
    if at + nbytes > len(data):
        raise ValueError(f"{nbytes} bytes at {at} of {len(data)}")
    return data[at : at + nbytes], at + nbytes
