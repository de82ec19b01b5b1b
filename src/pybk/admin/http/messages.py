"""A request to the administration interface and its response, whatever server carries them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

BODY_BYTES_MAX: Final = 64 << 10
"""Limit on the body of a request; servers refuse a longer one before they read it."""

JSON: Final = "application/json"
PROBLEM: Final = "application/problem+json"
TEXT: Final = "text/plain; charset=utf-8"


class Request(NamedTuple):
    """A request.

    Attributes:
        method: The method, in capital letters.
        path: The path, decoded.
        query: The parameters of the query; of one that is given twice, the last value.
        headers: The headers by name in small letters.
        body: The body, at most ``BODY_BYTES_MAX``.
        peer: Where it comes from, for the log.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""
    peer: str = ""


class Response(NamedTuple):
    """A response.

    Attributes:
        status: The status code.
        content_type: The type of the body.
        body: The body.
        headers: Other headers, but for the length.
    """

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def by_name(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by name in small letters.

    Several of one name become one, as RFC 9110 joins them: two hosts, tokens or lengths are none that is valid, and
    neither of them counts alone, because another server on the way might have gone by the other one.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found
