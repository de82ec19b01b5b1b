"""Parsing and validation of the options of reads of logs, which are those of Spark's Kafka source."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pybk.credentials import CredentialSources
from pybk.errors import UsageError
from pybk.spark.connection import StoreOrCluster
from pybk.spark.kafka_options import CLIENT_REPEATS, refuse_elsewhere
from pybk.spark.options import (
    LOG_BATCH,
    LOG_READ,
    LOG_SELECTIONS,
    LOG_STREAM,
    WHERE,
    RawOptions,
    credentials_of,
    location_of,
)
from pybk.streams.cursor import checked_subscription
from pybk.streams.list_record import SEQ_MAX, ListKind, checked_name
from pybk.streams.log_reader import LogEnd

KAFKA: Final = "kafka"
PYBK: Final = "pybk"

_LATEST: Final = -1
_EARLIEST: Final = -2
_TIME_MS_MAX: Final = (1 << 63) // 10**6 - 1
_DELAY_S: Final = 900.0
_MILLISECOND: Final = 1e-3
"""The unit of a time without one, as Spark has it."""

_NO_GROUPS: Final = "there are no consumer groups: the checkpoint of the query has its position; leave it out"
_ELSEWHERE: Final = {
    "kafka.group.id": _NO_GROUPS,
    "groupidprefix": _NO_GROUPS,
    "fetchoffset.numretries": CLIENT_REPEATS,
    "fetchoffset.retryintervalms": CLIENT_REPEATS,
    "kafkaconsumer.polltimeoutms": "a task waits 10 s for records that the planner has seen; leave it out",
    "startentry": "records have no entry numbers; give startingOffsets",
    "endentry": "records have no entry numbers; give endingOffsets",
    "maxentries": "give endingOffsets",
    "consumer": "it is of ledgers; give subscription",
    "maxentriespertrigger": "give maxOffsetsPerTrigger",
    "maxbytespertrigger": "give maxOffsetsPerTrigger",
    "entriesperpartition": "give maxRecordsPerPartition",
    "payload": "leave out columns by .schema(...), such as .schema('offset BIGINT')",
    "includemetadata": "read the ledgers of the log with raw=true",
    "requireseal": "the record of the log says where its closed ledgers end; leave it out",
}
"""Options of the Kafka source, and of reads of ledgers, that reads of logs do not have, and what to do instead."""

logger = logging.getLogger(__name__)


class Seqs(NamedTuple):
    """Positions by sequence number.

    Attributes:
        by_log: The sequence number for each log; -1 for its end, -2 for its first record.
    """

    by_log: Mapping[str, int]


class Times(NamedTuple):
    """Positions by event time: the first record with at least that time.

    Attributes:
        every_ms: Milliseconds since 1970, for all logs; None if ``by_log`` has them.
        by_log: Milliseconds since 1970 by log.
    """

    every_ms: int | None
    by_log: Mapping[str, int]

    def of(self, log: str) -> int:
        """Return the time of a log in nanoseconds since 1970."""
        return (self.by_log[log] if self.every_ms is None else self.every_ms) * 10**6


Bound = LogEnd | Seqs | Times
"""The position at which a read begins or ends, in each log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """The options of a read of logs.

    Attributes:
        where: The store or cluster.
        given: The password and the secret of the logs.
        kind: LOG, or WAL for a write-ahead log.
        names: The logs; empty if ``pattern`` selects them.
        pattern: The regular expression that the whole name of a log matches.
        starting: The first record to read of each log.
        ending: The record after the last one to read of each log; for batch reads.
        latest_if_no_match: Whether a log without a record of the starting time is read from its end on.
        columns: ``KAFKA`` or ``PYBK``, the form of columns and offsets.
        include_headers: Whether columns of Kafka's form include the headers.
        batch_bytes: The approximate bytes of entries in an Arrow batch.
        fail_on_data_loss: Whether the read fails if records that it was to read are gone.
        allow_missing: Whether logs may be named that do not exist yet.
        min_partitions: The least number of tasks, if there are as many records.
        max_records_per_partition: The most records of a task.
        max_offsets_per_trigger: The most records of a micro-batch.
        min_offsets_per_trigger: The least records of a micro-batch, unless ``max_trigger_delay_s`` has passed.
        max_trigger_delay_s: The longest time between two micro-batches while records wait, seconds.
        subscription: The durable subscription that shows the lag of a stream; None for none.
        backlog_bytes: Whether the progress of a stream has the bytes of each log that it has not read.
    """

    where: StoreOrCluster
    given: CredentialSources
    kind: ListKind
    names: tuple[str, ...]
    pattern: str | None
    starting: Bound = field(hash=False)
    ending: Bound = field(hash=False)
    latest_if_no_match: bool
    columns: str
    include_headers: bool
    batch_bytes: int
    fail_on_data_loss: bool
    allow_missing: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    max_offsets_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    subscription: str | None
    backlog_bytes: bool


def log_options(options: Mapping[str, str], *, streaming: bool | None = None) -> LogOptions:
    """Parse and check the options of a read of logs.

    Args:
        options: The options, as Spark passes them.
        streaming: Whether the read is a stream; None if that is not known yet.

    Raises:
        UsageError: An option is unknown, has no meaning for logs, belongs to the other kind of read, has a value that
            is not valid, or is a secret itself instead of the file that has it.
    """
    refuse_elsewhere(options, _ELSEWHERE)
    what, more = {
        None: ("a read of logs", (*LOG_BATCH, *LOG_STREAM)),
        False: ("a batch read of logs", (*LOG_BATCH, *LOG_STREAM)),
        True: ("a streaming read of logs", LOG_STREAM),
    }[streaming]
    given = RawOptions(options, (*WHERE, *LOG_READ, *more), what)
    for name in LOG_STREAM:
        if streaming is False and name in given:
            logger.warning("option %s is of streaming reads, and has no effect on a batch read", name)
    least, most = _limits(given)
    kind, names, pattern = _selection(given)
    return LogOptions(
        where=location_of(given),
        given=credentials_of(given),
        kind=kind,
        names=names,
        pattern=pattern,
        starting=_starting(given, names, streaming=streaming),
        ending=_ending(given, names),
        latest_if_no_match=_choice(given, "startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest",
        columns=_choice(given, "columns", (KAFKA, PYBK)),
        include_headers=given.flag("includeHeaders", False),
        batch_bytes=given.batch_bytes(),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        allow_missing=given.flag("allowMissing", False),
        min_partitions=given.whole("minPartitions"),
        max_records_per_partition=given.whole("maxRecordsPerPartition"),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_s=_DELAY_S if (delay := given.seconds("maxTriggerDelay", _MILLISECOND)) is None else delay,
        subscription=_subscription(given, kind),
        backlog_bytes=given.flag("backlogBytes", False),
    )


def _choice(given: RawOptions, name: str, choices: tuple[str, ...]) -> str:
    """Return an option that is one of some words; the first one if it is not given."""
    text = given.text(name)
    found = choices[0] if text is None else text.strip().lower()
    if found not in choices:
        raise UsageError(f"option {name} is {text!r:.50}; it takes {' or '.join(choices)}")
    return found


def _subscription(given: RawOptions, kind: ListKind) -> str | None:
    """Return the name of the subscription of a stream."""
    name = given.text("subscription")
    if name is None:
        return None
    if kind is ListKind.WAL or given.text("path") is not None:
        raise UsageError(
            "option subscription: only logs of a cluster have subscriptions of queries, because a query writes nothing "
            "to write-ahead logs and to stores in a directory; leave it out"
        )
    return checked_subscription(name)


def _limits(given: RawOptions) -> tuple[int | None, int | None]:
    """Return the least and the most records of a micro-batch."""
    least, most = given.whole("minOffsetsPerTrigger"), given.whole("maxOffsetsPerTrigger")
    if least is not None and most is not None and least > most:
        raise UsageError(
            f"option minOffsetsPerTrigger is {least}, and maxOffsetsPerTrigger {most}: no micro-batch has as many "
            "records as it would wait for; give at most the latter"
        )
    return least, most


# ---- which logs ------------------------------------------------------------------------------------------------------


def _selection(given: RawOptions) -> tuple[ListKind, tuple[str, ...], str | None]:
    """Return the kind of the logs, and their names or the pattern of these."""
    named = [name for name in LOG_SELECTIONS if name in given]
    if len(named) != 1:
        raise UsageError(f"give exactly one of {', '.join(LOG_SELECTIONS)}; given are {', '.join(named) or 'none'}")
    [option] = named
    text = given.text(option) or ""
    match option:
        case "subscribePattern":
            try:
                re.compile(text)
            except re.error as error:
                raise UsageError(
                    f"option subscribePattern is {text!r:.100}, which is not a regular expression: {error}"
                ) from error
            return ListKind.LOG, (), text
        case "wal":
            return ListKind.WAL, (checked_name(text, "a write-ahead log"),), None
        case "subscribe":
            names = tuple(sorted({checked_name(part) for part in map(str.strip, text.split(",")) if part}))
            if not names:
                raise UsageError(f"option subscribe is {text!r:.50}; it takes names of logs, separated by commas")
        case "assign":
            names = tuple(sorted(_by_log(text, option, _partitions)))
        case _:
            names = (checked_name(text),)
    return ListKind.LOG, names, None


def _partitions(value: object) -> object:
    """Return the partitions that are assigned of a log; ValueError unless it is the one that a log has."""
    if value != [0]:
        raise ValueError(f"a log is partition 0 of its topic, and not {value!r:.50}")
    return value


# ---- positions -------------------------------------------------------------------------------------------------------


def _starting(given: RawOptions, names: tuple[str, ...], *, streaming: bool | None) -> Bound:
    found = _bound(given, "starting", names)
    if found is None:
        return LogEnd.LATEST if streaming else LogEnd.EARLIEST
    if streaming is False and (
        found is LogEnd.LATEST or (isinstance(found, Seqs) and _LATEST in found.by_log.values())
    ):
        raise UsageError("startingOffsets is the latest record, after which a batch read finds nothing; leave it out")
    return found


def _ending(given: RawOptions, names: tuple[str, ...]) -> Bound:
    found = _bound(given, "ending", names)
    if found is None:
        return LogEnd.LATEST
    if found is LogEnd.EARLIEST or (isinstance(found, Seqs) and _EARLIEST in found.by_log.values()):
        raise UsageError("endingOffsets is the earliest record, before which there is nothing; leave it out")
    return found


def _bound(given: RawOptions, side: str, names: tuple[str, ...]) -> Bound | None:
    """Return the position of options such as ``startingOffsets``; a time counts before offsets, as Kafka's does."""
    every, by_time, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    if every in given:
        return Times(given.whole(every, 0, _TIME_MS_MAX), {})
    text = given.text(by_time)
    if text is not None:
        return Times(None, _of_all(_by_log(text, by_time, _time_ms), by_time, names))
    text = given.text(offsets)
    if text is None:
        return None
    word = text.strip().lower()
    if word in (LogEnd.EARLIEST.value, LogEnd.LATEST.value):
        return LogEnd(word)
    return Seqs(_of_all(_by_log(text, offsets, _seq), offsets, names))


def _seq(value: object) -> int:
    return _number(value, _EARLIEST, SEQ_MAX + 1)


def _time_ms(value: object) -> int:
    return _number(value, 0, _TIME_MS_MAX)


def _number(value: object, least: int, most: int) -> int:
    """Return the number of a log, which Kafka's form has as that of its partition 0; ValueError if it is none."""
    if isinstance(value, dict) and value.keys() == {"0"}:
        value = value["0"]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.50} is not a number from {least} to {most}, nor one of partition 0")
    return value


def _by_log(text: str, name: str, checked: Any) -> dict[str, Any]:
    """Return the values of an option that is JSON by log."""
    try:
        values = json.loads(text)
        if not isinstance(values, dict) or not values:
            raise ValueError("it has no logs")
        return {checked_name(log): checked(value) for log, value in values.items()}
    except (ValueError, TypeError, RecursionError, UsageError) as error:
        example = '{"orders": [0]}' if name == "assign" else '{"orders": 123} or {"orders": {"0": 123}}'
        raise UsageError(
            f"option {name} is {text!r:.100}; it takes JSON by log such as {example}: {error!s:.200}"
        ) from error


def _of_all(values: dict[str, int], name: str, names: tuple[str, ...]) -> Mapping[str, int]:
    """Return the positions, which have to name the logs that are read; those of a pattern are known later."""
    return values if not names else checked_logs(values, name, names)


def checked_logs(values: Mapping[str, int], name: str, names: tuple[str, ...]) -> Mapping[str, int]:
    """Return the positions of an option.

    Raises:
        UsageError: They leave out a log that is read, or name another one.
    """
    left, others = sorted(set(names) - set(values)), sorted(set(values) - set(names))
    if left or others:
        raise UsageError(
            f"option {name} names {', '.join(sorted(values)):.200}, and the read is of {', '.join(names):.200}: give a "
            "number for each of these, -1 for the latest and -2 for the earliest record"
        )
    return values
