"""Parsing and validation of the options of writes to logs, which are those of Spark's Kafka sink, and some more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pybk.credentials import CredentialSources
from pybk.errors import UsageError
from pybk.spark.connection import StoreOrCluster
from pybk.spark.kafka_options import CLIENT_REPEATS, refuse_elsewhere
from pybk.spark.options import (
    LOG_SELECTIONS,
    LOG_SINK,
    SINK_BATCH,
    SINK_STREAM,
    TOPIC,
    WHERE,
    RawOptions,
    check_written,
    credentials_of,
    digest_type_of,
    location_of,
    storage_hints_of,
)
from pybk.streams.list_record import checked_name
from pybk.streams.log_settings import LogSettings

_ELSEWHERE: Final = {
    "kafka.bootstrap.servers": "give metadataUri, the URL of the cluster's metadata store",
    "kafka.acks": "give ackQuorum; without it the settings of the log apply",
    "kafka.enable.idempotence": "each record is written once; leave it out",
    "kafka.transactional.id": "give appId for a stream, txnAppId and txnVersion for a batch write, or leave it out",
    "kafka.retries": CLIENT_REPEATS,
    **{
        name.lower(): "it is of writes to ledgers of their own; give the log a retention (Log.set_retention)"
        for name in ("retainAge", "retainBytes", "retainRead", "retainUnread")
    },
    "ledgertype": "it is of writes to ledgers of their own; leave it out",
    **{name.lower(): "it is of reads; a write takes topic, or a column topic" for name in LOG_SELECTIONS},
}
"""Options of the Kafka sink, and of other reads and writes, that writes to logs do not have, and what to do instead."""

APP_ID_BYTES_MAX: Final = 80
"""The most bytes of ``appId``: a log keeps it together with the id of the query, as one name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSinkOptions:
    """The options of a write to logs.

    Attributes:
        where: The cluster.
        given: The password or secret of the logs.
        topic: The log to write to; None if a column names one for each row.
        create: Whether logs that do not exist are created.
        asked: The settings of the ledgers that are written; what it lacks is as each log keeps it. New logs keep it.
        insecure: Whether to write without a password and a secret.
        app_id: A name of the stream, which logs keep before the id of the query; None for the id alone.
        txn_app_id: The name of idempotent batch writes; given together with ``txn_version``.
        txn_version: The number of this write; a number up to the last committed one is skipped.
    """

    where: StoreOrCluster
    given: CredentialSources
    topic: str | None
    create: bool
    asked: LogSettings
    insecure: bool
    app_id: str | None
    txn_app_id: str | None
    txn_version: int | None


def log_sink_options(options: Mapping[str, str], *, streaming: bool) -> LogSinkOptions:
    """Parse and check the options of a write to logs.

    Args:
        options: The options, as Spark passes them.
        streaming: Whether the write is a stream.

    Raises:
        UsageError: An option is unknown, has no meaning for logs, belongs to the other kind of write, names a
            directory, has a value that is not valid, or is a secret itself instead of its source.
    """
    refuse_elsewhere(options, _ELSEWHERE)
    what, more = ("a streaming write", SINK_STREAM) if streaming else ("a batch write", SINK_BATCH)
    given = RawOptions(options, (*WHERE, *LOG_SINK, *more), f"{what} to logs")
    check_written(given)
    given.flag("includeHeaders", False)  # it is of Kafka's sink, which does not heed it either
    where, credentials, insecure = location_of(given), credentials_of(given), given.flag("insecure", False)
    if credentials == CredentialSources() and not insecure:
        raise UsageError(
            "a write without a password would make a log that anybody can forge: give secretFile or passwordFile, or "
            "insecure=true if the logs have neither"
        )
    return LogSinkOptions(
        where=where,
        given=credentials,
        topic=_name(given, TOPIC),
        create=given.flag("createTopics", False),
        asked=LogSettings(
            quorums=(given.whole("ensembleSize"), given.whole("writeQuorum"), given.whole("ackQuorum")),
            digest_type=digest_type_of(given),
            storage_hints=storage_hints_of(given),
        ),
        insecure=insecure,
        app_id=_app_id(given),
        txn_app_id=_name(given, "txnAppId"),
        txn_version=given.whole("txnVersion", 0),
    )


def _app_id(given: RawOptions) -> str | None:
    found = _name(given, "appId")
    size = 0 if found is None else len(found.encode())
    if size > APP_ID_BYTES_MAX:
        raise UsageError(f"option appId: {found!r:.50} has {size} bytes in UTF-8; it takes 1 to {APP_ID_BYTES_MAX}")
    return found


def _name(given: RawOptions, option: str) -> str | None:
    """Return an option that is the name of a log or of a query."""
    text = given.text(option)
    try:
        return None if text is None else checked_name(text)
    except UsageError as error:
        raise UsageError(f"option {option}: {error}") from error
