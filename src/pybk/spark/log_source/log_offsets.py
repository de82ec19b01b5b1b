"""The offset of a stream of logs, and how much of each log a micro-batch reads; pure, without input or output.

An offset names the next record of each log. With the columns of Kafka's source it has the form of Kafka's offsets,
``{"orders": {"0": 123}}``, in which every log is partition 0. With columns of pybk it is ``{"orders@1f3c9a2b": 123}``:
the log's name, and the beginning of its uid, by which a log that was deleted and made again is known as another one
even if the query did not run meanwhile. ``.2`` after that is the generation of a write-ahead log of which records were
cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pybk.errors import UnsupportedFormatError
from pybk.spark.log_source.log_options import KAFKA
from pybk.values import whole

BACKLOG_BYTES: Final = ".backlogBytes"
"""The key, in the latest offset that a query reports, of the bytes by log that it has not read; it names no log."""

_PARTITION: Final = "0"
_UID_BYTES: Final = 4


class LogPlace(NamedTuple):
    """A position in a log.

    Attributes:
        seq: The next record.
        uid: The beginning of the log's uid, hexadecimal; empty if it is not known.
        generation: The generation of the records before ``seq``.
    """

    seq: int
    uid: str = ""
    generation: int = 0

    def is_in(self, uid: bytes) -> bool:
        """Return whether the log of this position may be that with a uid."""
        return not self.uid or self.uid == short_uid(uid)

    def is_of_another(self, place: LogPlace) -> bool:
        """Return whether another position of the same name is known to be that of another log."""
        return bool(self.uid) and bool(place.uid) and self.uid != place.uid


LogOffset = Mapping[str, LogPlace]
"""Positions by log."""


def short_uid(uid: bytes) -> str:
    """Return the beginning of a uid, as it is in offsets."""
    return uid[:_UID_BYTES].hex()


def to_json(offset: LogOffset, columns: str) -> dict[str, Any]:
    """Return an offset as JSON values for Spark, in the form of the columns; equal offsets give equal texts."""
    if columns == KAFKA:
        return {log: {_PARTITION: offset[log].seq} for log in sorted(offset)}
    return {_key(log, offset[log]): offset[log].seq for log in sorted(offset)}


def _key(log: str, place: LogPlace) -> str:
    generation = f".{place.generation}" if place.generation else ""
    return f"{log}@{place.uid}{generation}"


def from_json(values: Mapping[str, Any]) -> dict[str, LogPlace]:
    """Decode the result of ``to_json``, in either form.

    Raises:
        UnsupportedFormatError: The values are not an offset of logs.
    """
    try:
        return dict(_place_of(key, value) for key, value in values.items())
    except (LookupError, TypeError, ValueError) as error:
        raise UnsupportedFormatError(
            f"the checkpoint has an offset that is none of logs ({error}): {json.dumps(values):.200}; use a new "
            "checkpoint, or read with the options of before"
        ) from error


def _place_of(key: str, value: object) -> tuple[str, LogPlace]:
    match value:
        case {"0": seq, **others} if not others:
            return key, LogPlace(_checked(seq))
    log, at, which = key.rpartition("@")
    uid, _, generation = which.partition(".")
    if not at or len(bytes.fromhex(uid)) != _UID_BYTES:
        raise ValueError(f"{key!r:.100} names no log")
    return log, LogPlace(_checked(value), uid, int(generation or 0))


def _checked(value: object) -> int:
    seq = whole(value)
    if seq is None or seq < 0:
        raise ValueError(f"{value!r:.50} is not the number of a record")
    return seq


def shares(most: int, available: Mapping[str, int]) -> dict[str, int]:
    """Return how many records of each log to read, in proportion to how many it has.

    Args:
        most: The most records of all logs.
        available: The records that each log has.

    Returns:
        As many as there are, at most ``most``. Each log that has records gets at least one, so that none waits for a
        larger one; if ``most`` is less than that, those with the most records do.
    """
    total = sum(available.values())
    if total <= most:
        return dict(available)
    having = sorted((log for log, count in available.items() if count), key=lambda log: (-available[log], log))
    if most <= len(having):
        return dict.fromkeys(available, 0) | dict.fromkeys(having[:most], 1)
    small = [log for log in having if most * available[log] < total]
    if small:
        others = {log: count for log, count in available.items() if log not in small}
        return dict.fromkeys(small, 1) | shares(most - len(small), others)
    taken = {log: most * count // total for log, count in available.items()}
    by_fraction = sorted(having, key=lambda log: (-(most * available[log] % total), log))
    for log in by_fraction[: most - sum(taken.values())]:
        taken[log] += 1
    return taken
