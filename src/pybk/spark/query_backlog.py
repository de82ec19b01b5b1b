"""The backlog of a streaming query, from its progress as Spark reports it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pybk.errors import UsageError
from pybk.spark.log_source.log_offsets import from_json
from pybk.spark.source.offsets import Offset, between

_PYTHON: Final = "python"
"""Part of Spark's description of a source that is written in Python."""


def backlog(progress: Mapping[str, Any] | None) -> dict[str | int, int]:
    """Return how much of each log or ledger a streaming query has not read yet.

    It is the difference of two offsets that Spark reports of each source of pybk: ``latestOffset``, where a micro-batch
    without limits would have ended, and ``endOffset``, where the last one did. Bytes are in neither.

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
    if progress is None:
        return found
    given: object = progress
    sources = given.get("sources") if isinstance(given, Mapping) else None
    if not isinstance(sources, list | tuple):
        raise UsageError(f"progress is {progress!s:.100}; it takes query.lastProgress")
    for source in sources:
        if _PYTHON in source["description"].lower():
            for name, count in _left(_decoded(source["endOffset"]), _decoded(source["latestOffset"])):
                found[name] = max(count, found.get(name, 0))
    return found


def _decoded(offset: Any) -> Any:
    """Return an offset as JSON values; PySpark gives the text of some, and the values of others."""
    return json.loads(offset) if isinstance(offset, str) else offset


def _left(end: Any, latest: Any) -> Iterator[tuple[str | int, int]]:
    """Yield the number of records or entries between two offsets of a source."""
    if not isinstance(end, dict) or not isinstance(latest, dict):
        return  # no micro-batch was planned yet
    if "of" in latest and "version" in latest:
        for entry_range in between(Offset.from_json(end), Offset.from_json(latest)):
            yield entry_range.ledger_id, len(entry_range)
        return
    before = from_json(end)
    for name, place in from_json(latest).items():
        begun = before.get(name)
        yield name, place.seq if begun is None or begun.is_of_another(place) else max(0, place.seq - begun.seq)
