"""The backlog of a streaming query, from its progress as Spark reports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pybk.errors import UnsupportedFormatError, UsageError
from pybk.spark.log_source.log_offsets import BACKLOG_BYTES, from_json
from pybk.spark.source.offsets import Offset, between

_PYTHON: Final = "python"
"""Part of Spark's description of a source that is written in Python."""


def backlog(progress: Mapping[str, Any] | None) -> dict[str | int, int]:
    """Return how much of each log or ledger a streaming query has not read yet.

    It is the difference of two offsets that Spark reports of each source of pybk: ``latestOffset``, where a micro-batch
    without limits would have ended, and ``endOffset``, where the last one did. Offsets of other sources do not count.

    Args:
        progress: ``query.lastProgress``, or one of ``query.recentProgress``, or such a value decoded from JSON; None
            before the first micro-batch.

    Returns:
        The records of each log that the query reads, by its name, also where it is 0; and the entries of each ledger
        that has some, by its id. If several sources of the query read the same log, the largest number. A log that is
        new to the query counts from record 0.

    Raises:
        UsageError: This is not the progress of a query.
        UnsupportedFormatError: An offset is of a later version.

    Cost: Reads nothing; as old as the progress is.
    """
    found: dict[str | int, int] = {}
    for end, latest in _offsets(progress):
        for name, count in _left(end, latest):
            found[name] = max(count, found.get(name, 0))
    return found


def backlog_bytes(progress: Mapping[str, Any] | None) -> dict[str, int]:
    """Return how many bytes of each log a streaming query has not read yet, if it has the option ``backlogBytes``.

    Args:
        progress: As for ``backlog``.

    Returns:
        The bytes of the entries of each log that the query reads, by its name. They are an estimate: of a segment that
        the query has read in part, the share of its records.

    Raises:
        UsageError: This is not the progress of a query; or it has no bytes, because the option was not given.
        UnsupportedFormatError: An offset is of a later version.

    Cost: Reads nothing; as old as the progress is.
    """
    found: dict[str, int] = {}
    for end, latest in _offsets(progress):
        told = latest.get(BACKLOG_BYTES)
        if told is None and any(isinstance(name, str) for name, _ in _left(end, latest)):
            raise UsageError("the progress has no bytes: give the streaming read of the logs backlogBytes=true")
        for name, count in (told or {}).items():
            found[name] = max(count, found.get(name, 0))
    return found


def _offsets(progress: Mapping[str, Any] | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the end of the last micro-batch and the latest offset of each source in Python, once there is one."""
    if progress is None:
        return
    given: object = progress
    sources = given.get("sources") if isinstance(given, Mapping) else None
    if not isinstance(sources, list | tuple):
        raise UsageError(f"progress is {progress!s:.100}; it takes query.lastProgress")
    for source in sources:
        if _PYTHON in source["description"].lower():
            end, latest = _decoded(source["endOffset"]), _decoded(source["latestOffset"])
            if isinstance(end, dict) and isinstance(latest, dict):  # else no micro-batch was planned yet
                yield end, latest


def _decoded(offset: Any) -> Any:
    """Return an offset as JSON values; PySpark gives the text of some, and the values of others."""
    return json.loads(offset) if isinstance(offset, str) else offset


def _left(end: dict[str, Any], latest: dict[str, Any]) -> Iterator[tuple[str | int, int]]:
    """Yield the number of records or entries between two offsets; nothing for those of another source in Python."""
    if isinstance(latest.get("of"), str) and "version" in latest:  # else logs that are named so
        for entry_range in between(Offset.from_json(end), Offset.from_json(latest)):
            yield entry_range.ledger_id, len(entry_range)
        return
    try:
        before = from_json(end)
        after = from_json({log: place for log, place in latest.items() if log != BACKLOG_BYTES})
    except UnsupportedFormatError:
        return
    for name, place in after.items():
        begun = before.get(name)
        yield name, place.seq if begun is None or begun.is_of_another(place) else max(0, place.seq - begun.seq)
