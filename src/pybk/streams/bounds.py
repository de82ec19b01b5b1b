"""The bounds of a log's durable subscriptions: which records each of them needs (rule T9).

A log's record of format 1 has them itself. From format 2 on they are in records of their own, ``SHARDS`` of them, each
with the bounds of some subscriptions; together they are a *set*, which the log's record names. So raising a bound
writes what a few subscriptions need, however many there are, and nothing of the log.

This module decides, without input or output: each change takes bounds and returns the next ones.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from zlib import crc32

from pybk.errors import LogFencedError, UnsupportedFormatError
from pybk.values.json_text import decode_json, encode_json

SHARDS: Final = 16
"""Records of a set of bounds."""

_FORMAT: Final = 1


class CursorBound(NamedTuple):
    """What a durable subscription needs of a log.

    Attributes:
        name: The subscription's.
        seq: It needs no record before this one; at most the first record that it has not acknowledged.
        uid: That of the ledger list which keeps its cursor, hexadecimal: a subscription that is made again under the
            same name is another.
        epoch: The epoch of its owner in that list; an owner of an earlier epoch changes nothing here.
    """

    name: str
    seq: int
    uid: str
    epoch: int = 0


Bounds = tuple[CursorBound, ...]
"""Bounds of different subscriptions, by name."""


def bound_of(bounds: Bounds, name: str) -> CursorBound | None:
    """Return what a subscription needs; None if there is no such subscription."""
    return next((each for each in bounds if each.name == name), None)


def subscribed(bounds: Bounds, cursor: CursorBound) -> Bounds:
    """Return bounds with one more subscription, unless there is one of that name."""
    if bound_of(bounds, cursor.name) is not None:
        return bounds
    return tuple(sorted((*bounds, cursor)))


def claimed(bounds: Bounds, log: str, name: str, uid: str, epoch: int) -> Bounds:
    """Return bounds in which a subscription of a log has a new owner.

    Raises:
        LogFencedError: It has a later owner, or was deleted.
    """
    return _with_bound(bounds, _owned(bounds, log, name, uid, epoch, claim=True)._replace(epoch=epoch))


def needing(bounds: Bounds, log: str, cursor: CursorBound) -> Bounds:
    """Return bounds in which a subscription of a log needs records from ``cursor.seq`` on.

    Raises:
        LogFencedError: The subscription has a later owner, or was deleted.
    """
    _owned(bounds, log, cursor.name, cursor.uid, cursor.epoch)
    return _with_bound(bounds, cursor)


def unsubscribed(bounds: Bounds, name: str, uid: str) -> Bounds:
    """Return bounds without a subscription."""
    return tuple(each for each in bounds if (each.name, each.uid) != (name, uid))


def _owned(bounds: Bounds, log: str, name: str, uid: str, epoch: int, *, claim: bool = False) -> CursorBound:
    found = bound_of(bounds, name)
    if found is None or found.uid != uid:
        raise LogFencedError(f"subscription {name!r} of log {log!r} was deleted; subscribe again")
    if found.epoch > epoch or (found.epoch < epoch and not claim):
        raise LogFencedError(
            f"subscription {name!r} of log {log!r} was taken over: its epoch is {found.epoch}, not {epoch}"
        )
    return found


def _with_bound(bounds: Bounds, cursor: CursorBound) -> Bounds:
    return tuple(cursor if each.name == cursor.name else each for each in bounds)


# ---- records of bounds -----------------------------------------------------------------------------------------------


def shard_of(name: str) -> int:
    """Return the number of the record of a set that has the bound of a subscription."""
    return crc32(name.encode()) % SHARDS


def encode_bounds(bounds: Bounds) -> bytes:
    """Return a record of a set as JSON."""
    return encode_json({"format": _FORMAT, "bounds": [list(each) for each in bounds]})


def decode_bounds(data: bytes, *, where: str) -> Bounds:
    """Decode the result of ``encode_bounds``; ``where`` names the record in errors.

    Raises:
        CorruptError: The bytes are not bounds.
        UnsupportedFormatError: A newer pybk wrote them.
    """

    def make(values: dict[str, Any]) -> Bounds:
        if values["format"] != _FORMAT:
            raise UnsupportedFormatError(
                f"{where}: format {values['format']}; this pybk reads format {_FORMAT}: install a newer pybk"
            )
        return tuple(CursorBound(*each) for each in values["bounds"])

    return decode_json(data, make, where=where)
