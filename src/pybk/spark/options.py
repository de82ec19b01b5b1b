"""Parsing and validation of the options of Spark readers and writers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from pybk.credentials import CLUSTER_SECRET, CredentialSources, Secret, cut_value
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType, is_keyed
from pybk.ledger.ledger_metadata import CUSTOM_METADATA_BYTES_MAX
from pybk.manager.arguments import LEDGER_ID_MAX, hints_of, user_type
from pybk.spark.connection import StoreOrCluster

BATCH_BYTES: Final = 8 << 20
BATCH_BYTES_MAX: Final = 512 << 20

SECRETS: Final = ("clusterSecret", "password", "secret")
"""The secrets, each of which two options name: that with ``File``, and that with ``Variable`` appended."""

WHERE: Final = ("path", "metadataUri", *(f"{name}{source}" for name in SECRETS for source in ("File", "Variable")))
"""The options that name the store or cluster, and the sources of its secrets."""

_READ: Final = (
    *("ledger", "ledgers", "ledgerType", "payload", "includeMetadata", "startingOffsets"),
    *("entriesPerPartition", "batchBytes", "failOnDataLoss", "requireSeal", "allowMissing", "raw"),
)
_BATCH: Final = ("startEntry", "endEntry", "endingOffsets", "maxEntries")
_STREAM: Final = ("maxEntriesPerTrigger", "maxBytesPerTrigger", "consumer")
LOG_SELECTIONS: Final = ("subscribe", "subscribePattern", "assign", "log", "wal")
"""The options that select logs: with one of them a read is of records of logs, else of entries of ledgers."""

LOG_READ: Final = (
    *(*LOG_SELECTIONS, "columns", "includeHeaders", "batchBytes", "failOnDataLoss", "allowMissing"),
    *("startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"),
    *("minPartitions", "maxRecordsPerPartition"),
)
LOG_BATCH: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
LOG_STREAM: Final = (
    *("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "subscription", "backlogBytes"),
)
_NEW_LEDGERS: Final = ("storageHints", "ensembleSize", "writeQuorum", "ackQuorum", "digestType", "insecure")
_RETENTION: Final = ("retainAge", "retainBytes", "retainRead", "retainUnread")
_SINK: Final = ("ledgerType", *_NEW_LEDGERS, *_RETENTION)
TOPIC: Final = "topic"
"""The option of a write that names the log to write to, and the column that names it for each row."""

LOG_SINK: Final = (TOPIC, "createTopics", "includeHeaders", *_NEW_LEDGERS)
SINK_BATCH: Final = ("txnAppId", "txnVersion")
SINK_STREAM: Final = ("appId",)
_SPARK: Final = ("path", "checkpointLocation", "queryName")
_OF_TABLE: Final = "provider"
"""A property that Spark passes with the options of a table that it creates."""

AGE_SECONDS_MAX: Final = 1e9
"""The longest age of ledgers, 11 574 days."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_NAME_BYTES_MAX: Final = 128
_NEAREST_MAX: Final = 5

Ranges = tuple[tuple[int, int], ...]
"""Ranges of whole numbers (first and last), ascending and not adjacent."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The first or last entry to read of each ledger.

    Attributes:
        latest: For ledgers that ``entries`` does not name: the last add confirmed if true, else the first entry.
        entries: Entry ids by ledger id.
    """

    latest: bool = False
    entries: Mapping[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options of a read.

    Attributes:
        where: The store or cluster.
        given: The password and the secret of the ledgers.
        ledgers: Ranges of ledger ids to read; None if ``ledger_type`` selects the ledgers.
        ledger_type: The type of the ledgers to read; None if ``ledgers`` selects them.
        payload: Whether the rows have a payload column.
        include_metadata: Whether the rows have columns of the ledgers' metadata.
        start_entry: The first entry to read of each ledger.
        end_entry: The last entry to read of each ledger; None for all.
        starting: The first entries to read, by ledger.
        ending: The last entries to read, by ledger.
        entries_per_partition: The most entries of a task; None for about 128 MiB of entries.
        max_entries: The most entries of the whole read.
        batch_bytes: The approximate bytes of entries in an Arrow batch.
        fail_on_data_loss: Whether the read fails if a ledger to read no longer exists; otherwise it skips the ledger.
        require_seal: Whether ledgers that are not closed and sealed are refused.
        allow_missing: Whether ``ledger_type`` may be one that no ledger has yet.
        raw: Whether ledgers that are segments of logs may be read.
        max_entries_per_trigger: The most entries of a micro-batch.
        max_bytes_per_trigger: The most payload bytes of a micro-batch, unless a single entry is larger.
        consumer: The name under which the cluster records how far a stream has come; None for no record.
    """

    where: StoreOrCluster
    given: CredentialSources
    ledgers: Ranges | None
    ledger_type: str | None
    payload: bool
    include_metadata: bool
    start_entry: int
    end_entry: int | None
    starting: Positions
    ending: Positions
    entries_per_partition: int | None
    max_entries: int | None
    batch_bytes: int
    fail_on_data_loss: bool
    require_seal: bool
    allow_missing: bool
    raw: bool
    max_entries_per_trigger: int | None
    max_bytes_per_trigger: int | None
    consumer: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The options of a write.

    Attributes:
        where: The cluster.
        given: The password or secret of the new ledgers.
        ledger_type: The type of the new ledgers.
        storage_hints: The storage hints of the new ledgers.
        ensemble_size: The ensemble size of the new ledgers; None for the cluster's default, as for the quorums.
        write_quorum: The write quorum of the new ledgers.
        ack_quorum: The ack quorum of the new ledgers.
        digest_type: The digest type of the new ledgers.
        insecure: Whether HMAC_SHA256 with an empty password is intended.
        retain_age_s: The age, seconds, beyond which the sink's ledgers are deleted; None for no limit.
        retain_bytes: The bytes of the newest of them, beyond which the others are deleted; None for no limit.
        retain_read: Whether those within the limits are kept although all consumers have read them.
        retain_unread: Whether those beyond the limits are kept until all consumers have read them.
        app_id: The id of the stream's sink over restarts; None for the id of the query.
        txn_app_id: The id of the sink of idempotent batch writes; given together with ``txn_version``.
        txn_version: The number of this write; a number up to the last committed one is skipped.
    """

    where: StoreOrCluster
    given: CredentialSources
    ledger_type: str
    storage_hints: frozenset[StorageHint]
    ensemble_size: int | None
    write_quorum: int | None
    ack_quorum: int | None
    digest_type: DigestType
    insecure: bool
    retain_age_s: float | None
    retain_bytes: int | None
    retain_read: bool
    retain_unread: bool
    app_id: str | None
    txn_app_id: str | None
    txn_version: int | None


class VariableSecret(Secret):
    """A secret in an environment variable that an option names, so it has to be set in each process that reads it."""

    __slots__ = ()

    def read(self) -> bytes:
        """Return the secret.

        Raises:
            UsageError: The variable is not set in this process, or the file that it names cannot be read.
        """
        found = super().read()
        if not found:
            raise UsageError(
                f"{self.source} has no secret in this process: set {self.variable}, or {self.variable}_FILE, where the "
                f"driver starts, and spark.executorEnv.{self.variable} for the executors"
            )
        return found


class RawOptions:
    """Options as Spark passes them; Spark may have changed their names to lower case.

    Args:
        options: The options.
        known: The names of the options that may be given.
        what: The read or write that they belong to, for errors.

    Raises:
        UsageError: An option is unknown, is a list of paths, or is a secret itself instead of its source.
    """

    def __init__(self, options: Mapping[str, str], known: Iterable[str], what: str) -> None:
        names = {name.lower(): name for name in known}
        spark = {name.lower() for name in _SPARK}
        self._values: dict[str, str] = {}
        if _OF_TABLE in options:
            raise UsageError(
                "Spark keeps no options of a table for a Python source: declare its columns, as in CREATE TABLE t "
                "(payload BINARY) USING pybk, and give the options with each use, as in SELECT * FROM t WITH (...); or "
                "make a temporary view, which keeps them"
            )
        if TOPIC not in names and any(name.lower() == TOPIC for name in options):
            raise UsageError(
                f"option {TOPIC} is one of writes: to read, give one of {', '.join(LOG_SELECTIONS)}; a view to write "
                "to declares its columns, as in CREATE TEMPORARY VIEW v (key BINARY, value BINARY) USING pybk OPTIONS "
                "(...)"
            )
        for name, value in options.items():
            if name.lower() in names:
                self._values[names[name.lower()]] = value
            elif name.lower() not in spark:
                raise UsageError(_unknown(name, value, names, what))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str) -> str | None:
        """Return the text of an option."""
        return self._values.get(name)

    def whole(self, name: str, least: int = 1, most: int = LEDGER_ID_MAX) -> int | None:
        """Return an option as a whole number."""
        text = self._values.get(name)
        return None if text is None else _whole(text, name, least, most)

    def size(self, name: str) -> int | None:
        """Return an option as a number of bytes; it may have a unit, as in ``8m``."""
        text = self._values.get(name)
        if text is None:
            return None
        found = re.fullmatch(r"\s*(\d{1,18})\s*([bkmg]?)b?\s*", text.lower(), re.ASCII)
        if found is None or int(found[1]) == 0:
            raise UsageError(f"option {name} is {text!r:.100}; it takes bytes from 1 up, such as 8388608 or 8m")
        return int(found[1]) * _UNITS[found[2]]

    def seconds(self, name: str, bare: float | None = None) -> float | None:
        """Return an option as a time in seconds, such as ``90s``, ``15m`` or ``7d``.

        Args:
            name: The option.
            bare: The seconds that a number without a unit counts; None to refuse that.
        """
        text = self._values.get(name)
        if text is None:
            return None
        found = re.fullmatch(r"\s*(\d{1,15})\s*([a-z]*)\s*", text.lower(), re.ASCII)
        unit = None if found is None else _SECONDS.get(found[2], None if found[2] else bare)
        if found is None or unit is None:
            raise UsageError(f"option {name} is {text!r:.50}; it takes a time such as 30s, 15m or 1h")
        return int(found[1]) * unit

    def batch_bytes(self) -> int:
        """Return the bytes of an Arrow batch."""
        found = self.size("batchBytes") or BATCH_BYTES
        if found > BATCH_BYTES_MAX:
            raise UsageError(f"option batchBytes is {found}; it takes at most {BATCH_BYTES_MAX}, 5m to 10m is best")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """Return an option as true or false."""
        text = self._values.get(name, str(default)).strip().lower()
        if text not in ("true", "false"):
            raise UsageError(f"option {name} is {text!r:.100}; it takes true or false")
        return text == "true"

    def secret(self, name: str, variable: str | None = None) -> Secret:
        """Return the source of a secret.

        Args:
            name: The secret, one of ``SECRETS``.
            variable: The environment variable that may have it if no option names its source.
        """
        file, named = self._values.get(f"{name}File"), self._values.get(f"{name}Variable")
        if named is None:
            return Secret(file=file, variable=variable)
        if file is not None:
            raise UsageError(f"options {name}File and {name}Variable are both given; give one")
        if not _VARIABLE.fullmatch(named):
            raise UsageError(
                f"option {name}Variable is not the name of an environment variable, which has letters, digits and _; "
                "if it is the secret itself, replace that, because Spark may have recorded it"
            )
        return VariableSecret(variable=named)

    def name(self, name: str) -> str | None:
        """Return an option as a name for metadata."""
        text = self._values.get(name)
        if text is not None and not 0 < len(text.encode()) <= _NAME_BYTES_MAX:
            raise UsageError(f"option {name} is {text!r:.40}; it takes 1 to {_NAME_BYTES_MAX} bytes")
        return text


def _inline(name: str) -> str:
    """Return the error text for an option that is a secret itself."""
    return (
        f"option {name} is a secret itself, and Spark may record options: give {name}File, a file that has it on each "
        f"machine, or {name}Variable, an environment variable of each process that has it"
    )


def _unknown(name: str, value: str, names: Mapping[str, str], what: str) -> str:
    """Return the error text for an unknown option; it does not contain a value that may be a secret."""
    if name.lower() == "paths":
        return f"paths are {cut_value(value, 100)}; a read takes one plain directory, such as /data/store"
    for secret in SECRETS:
        if name.lower() == secret.lower():
            return _inline(secret)
    every = {
        known.lower(): known
        for known in (
            *(*LOG_READ, *LOG_BATCH, *LOG_STREAM),
            *(*WHERE, *_READ, *_BATCH, *_STREAM, *_SINK, *LOG_SINK, *SINK_BATCH, *SINK_STREAM),
        )
    }
    if name.lower() in every:
        return f"option {every[name.lower()]} is not one of {what}"
    close = get_close_matches(name.lower(), names, 1, 0.5)
    meant = f"did you mean {names[close[0]]}?" if close else f"there are {', '.join(names.values())}"
    return f"there is no option {name!r:.100} of {what}: {meant}"


def nearest(name: str, names: Sequence[str], what: str) -> str:
    """Return the names that are most like one that does not exist, for its error, and the option that waits for it.

    Args:
        name: The name.
        names: Those that exist, ascending.
        what: What they name, such as "logs".
    """
    return f"{nearest_names(name, names)}; option allowMissing=true waits for {what} that do not exist yet"


def nearest_names(name: str, names: Sequence[str]) -> str:
    """Return the names that are most like one that does not exist, for its error; arguments as for ``nearest``."""
    near = get_close_matches(name, names, _NEAREST_MAX, 0.5) or names[:_NEAREST_MAX]
    more = ", ..." if len(names) > len(near) else ""
    return f"there are {', '.join(near)}{more}" if names else "there are none"


def _whole(text: str, name: str, least: int, most: int) -> int:
    if not re.fullmatch(r"\s*[+-]?\d{1,20}\s*", text, re.ASCII) or not least <= int(text) <= most:
        raise UsageError(f"option {name} is {text!r:.100}; it takes a whole number from {least} to {most}")
    return int(text)


def selects_logs(options: Mapping[str, str]) -> bool:
    """Return whether the options of a read select logs, and not ledgers."""
    names = {name.lower() for name in LOG_SELECTIONS}
    return any(name.lower() in names for name in options)


def writes_logs(options: Mapping[str, str], columns: Iterable[str]) -> bool:
    """Return whether a write is of records to logs, and not of entries to ledgers of their own.

    Args:
        options: Its options.
        columns: The names of its columns.
    """
    return any(name.lower() == TOPIC for name in (*options, *columns))


def source_options(options: Mapping[str, str], *, streaming: bool | None = None) -> SourceOptions:
    """Parse and check the options of a read.

    Args:
        options: The options, as Spark passes them.
        streaming: Whether the read is a stream; None if that is not known yet.

    Raises:
        UsageError: An option is unknown, belongs to the other kind of read, or has a value that is not valid.
    """
    what, more = {
        None: ("a read", (*_BATCH, *_STREAM)),
        False: ("a batch read", _BATCH),
        True: ("a streaming read", _STREAM),
    }[streaming]
    given = RawOptions(options, (*WHERE, *_READ, *more), what)
    where = location_of(given)
    ledgers, ledger_type = _which(given)
    starting = _positions(given, "startingOffsets")
    if streaming is False and starting.latest:
        raise UsageError("option startingOffsets is 'latest', after which a batch read finds nothing; leave it out")
    ending = _positions(given, "endingOffsets")
    if given.text("endingOffsets") == "earliest":
        raise UsageError("option endingOffsets is 'earliest', before which there is nothing; leave it out")
    start_entry, end_entry = given.whole("startEntry", 0) or 0, given.whole("endEntry", 0)
    if end_entry is not None and end_entry < start_entry:
        raise UsageError(
            f"option endEntry is {end_entry} and comes before startEntry {start_entry}; both are inclusive"
        )
    return SourceOptions(
        where=where,
        given=credentials_of(given),
        ledgers=ledgers,
        ledger_type=ledger_type,
        payload=given.flag("payload", True),
        include_metadata=given.flag("includeMetadata", False),
        start_entry=start_entry,
        end_entry=end_entry,
        starting=starting,
        ending=ending,
        entries_per_partition=given.whole("entriesPerPartition"),
        max_entries=given.whole("maxEntries"),
        batch_bytes=given.batch_bytes(),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        require_seal=given.flag("requireSeal", False),
        allow_missing=given.flag("allowMissing", False),
        raw=given.flag("raw", False),
        max_entries_per_trigger=given.whole("maxEntriesPerTrigger"),
        max_bytes_per_trigger=given.size("maxBytesPerTrigger"),
        consumer=_consumer(given),
    )


def _consumer(given: RawOptions) -> str | None:
    """Return the name of the consumer of a stream."""
    if "consumer" in given and "path" in given:
        raise UsageError(
            "option consumer: a cluster records how far queries have come, and a query writes nothing to a store in a "
            "directory; leave it out"
        )
    return given.name("consumer")


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Parse and check the options of a write.

    Args:
        options: The options, as Spark passes them.
        streaming: Whether the write is a stream.

    Raises:
        UsageError: An option is unknown, belongs to the other kind of write, names a path, or has a value that is not
            valid.
    """
    what, more = ("a streaming write", SINK_STREAM) if streaming else ("a batch write", SINK_BATCH)
    given = RawOptions(options, (*WHERE, *_SINK, *more), what)
    check_written(given)
    _check_retention(given, streaming=streaming)
    where, credentials = location_of(given), credentials_of(given)
    digest_type, insecure = digest_type_of(given) or DigestType.HMAC_SHA256, given.flag("insecure", False)
    if is_keyed(digest_type) and credentials == CredentialSources() and not insecure:
        raise UsageError(
            f"{digest_type.name} with an empty password proves nothing, because anybody can make the key: give "
            "secretFile or passwordFile, another digestType, or insecure=true if that is meant"
        )
    return SinkOptions(
        where=where,
        given=credentials,
        ledger_type=user_type(given.text("ledgerType") or ""),
        storage_hints=storage_hints_of(given),
        ensemble_size=given.whole("ensembleSize"),
        write_quorum=given.whole("writeQuorum"),
        ack_quorum=given.whole("ackQuorum"),
        digest_type=digest_type,
        insecure=insecure,
        retain_age_s=given.seconds("retainAge"),
        retain_bytes=given.size("retainBytes"),
        retain_read=given.flag("retainRead", True),
        retain_unread=given.flag("retainUnread", True),
        app_id=given.name("appId"),
        txn_app_id=given.name("txnAppId"),
        txn_version=given.whole("txnVersion", 0),
    )


def _check_retention(given: RawOptions, *, streaming: bool) -> None:
    """Check that a write may have the options of retention that it has.

    Raises:
        UsageError: It is a batch write without an app id; or unread ledgers are to go, and neither age nor size says
            which; or the age is too long.
    """
    named = [name for name in _RETENTION if name in given]
    if named and not streaming and "txnAppId" not in given:
        raise UsageError(
            f"option {named[0]}: a batch write without txnAppId is a sink of its own, which no later write looks at; "
            "give txnAppId and txnVersion, or run pybk spark retain now and then"
        )
    age_s = given.seconds("retainAge")
    if age_s is not None and age_s > AGE_SECONDS_MAX:
        raise UsageError(
            f"option retainAge is {given.text('retainAge')!r:.50}; it takes at most {AGE_SECONDS_MAX / 86_400:.0f}d: "
            "leave it out to keep ledgers whatever their age"
        )
    if not given.flag("retainUnread", True) and "retainAge" not in given and "retainBytes" not in given:
        raise UsageError("option retainUnread=false is of ledgers beyond retainAge or retainBytes: give one of them")


def check_written(given: RawOptions) -> None:
    """Check what writes of ledgers and of logs have in common.

    Raises:
        UsageError: The options name a directory, or one of ``SINK_BATCH`` without the other.
    """
    if "path" in given:
        raise UsageError(
            "option path: the store in a directory is written by the one process that holds it, and Spark writes from "
            "many; give metadataUri, and run bookies"
        )
    if ("txnAppId" in given) != ("txnVersion" in given):
        raise UsageError("options txnAppId and txnVersion are given together, or neither")


def storage_hints_of(given: RawOptions) -> frozenset[StorageHint]:
    """Return the storage hints of new ledgers."""
    return hints_of(_hint(part.strip()) for part in (given.text("storageHints") or "").split(",") if part)


def credentials_of(given: RawOptions) -> CredentialSources:
    """Return the sources of the password and the secret of ledgers."""
    return CredentialSources(given.secret("password"), given.secret("secret"))


def location_of(given: RawOptions) -> StoreOrCluster:
    """Return the store or cluster; raises UsageError unless exactly one is named."""
    path, uri = given.text("path"), given.text("metadataUri")
    if (path is None) == (uri is None):
        table = "; of a table Spark keeps no options, so give them with each use: SELECT ... FROM t WITH (...)"
        raise UsageError(
            "give either path, the directory of a store, or metadataUri, a cluster's: lmdb:///... or zk://..."
            f"{table if path is None else ''}"
        )
    if path is not None and _URL.match(path):
        raise UsageError(
            f"option path is {cut_value(path, 100)}; it takes one plain directory, such as /data/store, "
            "and metadataUri takes the URL of a cluster"
        )
    secret = given.secret("clusterSecret", None if uri is None else CLUSTER_SECRET)
    if path is not None and secret != Secret():
        raise UsageError("the secret of a cluster goes with metadataUri; a store in a directory has none")
    return StoreOrCluster(path, uri, secret)


def _which(given: RawOptions) -> tuple[Ranges | None, str | None]:
    """Return the ranges of ledger ids, or the ledger type; the other is None."""
    names = [name for name in ("ledger", "ledgers", "ledgerType") if name in given]
    if len(names) != 1:
        raise UsageError(
            f"give exactly one of ledger, ledgers and ledgerType, or to read logs one of {', '.join(LOG_SELECTIONS)}; "
            f"given are {', '.join(names) or 'none'}"
        )
    if names == ["ledgerType"]:
        return None, user_type(given.text("ledgerType") or "")
    if names == ["ledger"]:
        ledger_id = given.whole("ledger", 0)
        assert ledger_id is not None
        return ((ledger_id, ledger_id),), None
    return _ranges(given.text("ledgers") or ""), None


def _ranges(text: str) -> Ranges:
    """Return the ranges of a text such as ``3,5,7-9``, in ascending order, with adjacent ranges joined."""
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        ids = re.fullmatch(r"\s*(\d{1,19})\s*(?:-\s*(\d{1,19})\s*)?", part, re.ASCII)
        if ids is None or max(int(each) for each in ids.groups("0")) > LEDGER_ID_MAX:
            raise UsageError(
                f"option ledgers has {part.strip()!r:.100}; it takes ids from 0 to {LEDGER_ID_MAX} and ranges of both "
                "ends, such as 3,5,7-9"
            )
        low, high = int(ids[1]), int(ids[2] or ids[1])
        if high < low:
            raise UsageError(f"option ledgers has {part.strip()!r}, whose end comes before its start")
        found.append((low, high))
    joined: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def _positions(given: RawOptions, name: str) -> Positions:
    text = given.text(name)
    if text is None or text.strip() == "earliest":
        return Positions()
    if text.strip() == "latest":
        return Positions(latest=True)
    try:
        if len(text) > CUSTOM_METADATA_BYTES_MAX << 4:
            raise ValueError("too long")
        values = json.loads(text)
        if not isinstance(values, dict) or not all(type(entry) is int and entry >= 0 for entry in values.values()):
            raise ValueError("not an object of entry ids")
        entries = {_whole(ledger, name, 0, LEDGER_ID_MAX): entry for ledger, entry in values.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"option {name} is {text!r:.100}; it takes earliest, latest, or JSON of entries by ledger such as "
            '{"7": 100}'
        ) from error
    return Positions(entries=entries)


def _hint(text: str) -> StorageHint:
    try:
        return StorageHint(text.lower())
    except ValueError:
        known = ", ".join(StorageHint)
        raise UsageError(f"option storageHints has {text!r:.40}; it takes {known}, separated by commas") from None


def digest_type_of(given: RawOptions) -> DigestType | None:
    """Return the digest type of new ledgers, None for a default; NONE is not allowed."""
    text = given.text("digestType")
    if text is None:
        return None
    known = {member.name: member for member in DigestType if member is not DigestType.NONE}
    found = known.get(text.strip().upper())
    if found is None:
        raise UsageError(f"option digestType is {text!r:.40}; it takes {', '.join(known)}")
    return found
