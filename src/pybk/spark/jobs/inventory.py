"""Inventory of all ledgers and replicas, as data frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pybk.credentials import CredentialSources
from pybk.errors import NoSuchLedgerError, PybkError
from pybk.ledger.keys import end_is_sealed
from pybk.replication.fragments import fragment_ranges
from pybk.replication.replica_check import spans_of
from pybk.spark.connection import Connection, StoreOrCluster, connection
from pybk.spark.jobs.ledgers import StoreOrUrl, end_of, selected_ledgers, where_of
from pybk.spark.jobs.spreading import spread_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pybk.credentials import Credentials, Secret
    from pybk.ledger.ledger_metadata import LedgerMetadata

_CHUNK: Final = 200
logger = logging.getLogger(__name__)

LEDGERS: Final = StructType(
    [
        StructField("ledger_id", LongType()),
        StructField("ledger_type", StringType()),
        StructField("storage_hints", ArrayType(StringType())),
        StructField("tier", StringType()),
        StructField("state", StringType()),
        StructField("digest_type", StringType()),
        StructField("sealed", BooleanType()),
        StructField("created", TimestampType()),
        StructField("age_seconds", DoubleType()),
        StructField("entries", LongType()),
        StructField("bytes", LongType()),
        StructField("fragments", LongType()),
    ]
)
"""Columns of the data frame of ledgers.

``entries`` and ``bytes`` are null where they are not known; ``sealed`` is null for a ledger that is not closed, or that
has no password.
"""

REPLICAS: Final = StructType(
    [
        StructField("ledger_id", LongType()),
        StructField("ledger_type", StringType()),
        StructField("tier", StringType()),
        StructField("first_entry_id", LongType()),
        StructField("bookie", StringType()),
        StructField("entries", LongType()),
        StructField("bytes", LongType()),
        StructField("registered", BooleanType()),
        StructField("recorded", BooleanType()),
        StructField("under_replicated", BooleanType()),
    ]
)
"""Columns of the data frame of replicas: one row per fragment and bookie."""


class Inventory(NamedTuple):
    """The ledgers and replicas of a store or cluster.

    Attributes:
        ledgers: One row per ledger (``LEDGERS``).
        replicas: One row per fragment and bookie (``REPLICAS``), with the entries and the approximate payload bytes
            of the fragment that the bookie should have; empty for a store. A replica is under-replicated if its bookie
            is not ``registered``, or if the metadata store has a record that the bookie lacks entries (``recorded``).
    """

    ledgers: DataFrame
    replicas: DataFrame

    def by_kind(self) -> DataFrame:
        """Return the number of ledgers, entries, bytes and the oldest ledger's age by type, hints, tier and state.

        ``sealed`` and ``unsealed`` count the closed ledgers with and without a seal.
        """
        keys = ("ledger_type", "hints", "tier", "state")
        kinds = self.ledgers.withColumn("hints", functions.array_join("storage_hints", " ")).groupBy(*keys)
        return kinds.agg(
            functions.count("*").alias("ledgers"),
            functions.sum("entries").alias("entries"),
            functions.sum("bytes").alias("bytes"),
            functions.max("age_seconds").alias("oldest_seconds"),
            functions.count_if("sealed").alias("sealed"),
            functions.count_if(~functions.col("sealed")).alias("unsealed"),
        ).sort(*keys)

    def by_bookie(self) -> DataFrame:
        """Return the numbers of replicas, under-replicated replicas, entries and bytes by bookie."""
        return (
            self.replicas.groupBy("bookie", "registered")
            .agg(
                functions.count("*").alias("fragments"),
                functions.count_if("under_replicated").alias("under_replicated"),
                functions.sum("entries").alias("entries"),
                functions.sum("bytes").alias("bytes"),
            )
            .sort("bookie", "registered")
        )

    def under_replicated(self) -> DataFrame:
        """Return the replicas that are under-replicated."""
        return self.replicas.filter("under_replicated").sort("ledger_id", "first_entry_id", "bookie")


class _ClusterState(NamedTuple):
    """The state of the cluster, read once for all ledgers.

    Attributes:
        now_ns: The time of reading.
        registered: The names of the registered bookies, as in the metadata of ledgers.
        recorded: The ids of under-replicated ledgers, each with the name of the bookie that lacks entries.
    """

    now_ns: int
    registered: frozenset[str]
    recorded: frozenset[tuple[int, str]]


def inventory(
    spark: SparkSession,
    where: StoreOrUrl,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    quiet: bool = False,
) -> Inventory:
    """Return all ledgers and all replicas; replicas that are under-replicated are marked.

    Args:
        spark: The session whose executors read the metadata.
        where: A store's directory, or a cluster's metadata URL.
        cluster_secret: The secret of the cluster.
        password: The password of open ledgers; without it, their entries and bytes are not known.
        secret: The secret of ledgers that have one. If both are given, each ledger takes its own.
        ledgers: Ids of the ledgers to list; None for all.
        ledger_type: List only ledgers of this type.
        quiet: Do not show progress.

    Returns:
        Two data frames, computed and persisted; call their ``unpersist`` when they are no longer needed. They do not
        show later changes.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist.
        PybkError: The store or cluster cannot be opened.

    Cost: Reads the metadata of each ledger, and the last add confirmed of open ledgers from their bookies; does not
        read other entries.
    """
    place = where_of(where, cluster_secret)
    ids = [each.ledger_id for each in selected_ledgers(place, ledgers, ledger_type, system=ledger_type is None)]
    known = _known(connection(place))
    chunks = [ids[low : low + _CHUNK] for low in range(0, len(ids), _CHUNK)]
    sizes = list(map(len, chunks))

    def frame(rows: Any, schema: StructType, what: str) -> DataFrame:
        work = partial(rows, place, CredentialSources.of(password, secret), known)
        return spread_rows(
            spark, work, chunks, schema, sizes=sizes, what=f"pybk: inventory of {what} {place}", quiet=quiet
        )

    return Inventory(frame(_ledgers, LEDGERS, "ledgers"), frame(_replicas, REPLICAS, "replicas"))


def _known(found: Connection) -> _ClusterState:
    """Return the registered bookies and the recorded under-replicated ledgers."""
    metadata = found.metadata
    if metadata is None:
        return _ClusterState(time.time_ns(), frozenset(), frozenset())
    recorded = frozenset((each.ledger_id, str(each.bookie)) for each in metadata.marks())
    registered = frozenset(str(each.bookie) for each in metadata.list_bookies())
    return _ClusterState(time.time_ns(), registered, recorded)


def _looked(
    where: StoreOrCluster, given: CredentialSources, ids: Iterable[int]
) -> Iterator[tuple[LedgerMetadata, int | None, int | None]]:
    """Yield metadata, entries and payload bytes of ledgers; None for unknown numbers. Runs in an executor."""
    found = connection(where)
    for ledger_id in ids:
        with suppress(NoSuchLedgerError):  # deleted meanwhile
            metadata = found.manager.ledger_metadata(ledger_id)
            yield metadata, *_extent(found, metadata, given.read())


def _extent(found: Connection, metadata: LedgerMetadata, given: Credentials) -> tuple[int | None, int | None]:
    """Return the number of entries and payload bytes of a ledger; None where they are not known."""
    if found.metadata is None:
        descriptor = found.backend.descriptor(metadata.ledger_id)
        return descriptor.last_add_confirmed + 1, descriptor.length_durable
    try:
        last, length = end_of(found, metadata, given)
    except NoSuchLedgerError:
        raise
    except PybkError as error:  # the password is wrong, or too few bookies answer
        logger.info("the last add confirmed of ledger %d cannot be read: %s", metadata.ledger_id, error)
        return None, None
    return last + 1, length


def _ledgers(
    where: StoreOrCluster, given: CredentialSources, known: _ClusterState, ids: list[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of some ledgers."""
    for metadata, entries, length in _looked(where, given, ids):
        created_ns = metadata.creation_time_ns
        yield (
            metadata.ledger_id,
            str(metadata.ledger_type),
            sorted(hint.value for hint in metadata.storage_hints),
            metadata.tier.value,
            metadata.state.value,
            metadata.digest_type.name,
            end_is_sealed(metadata),
            datetime.fromtimestamp(created_ns / 1e9, UTC),
            (known.now_ns - created_ns) / 1e9,
            entries,
            length,
            len(metadata.fragments),
        )


def _replicas(
    where: StoreOrCluster, given: CredentialSources, known: _ClusterState, ids: list[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the replicas of some ledgers."""
    for metadata, entries, length in _looked(where, given, ids):
        kinds = metadata.ledger_id, str(metadata.ledger_type), metadata.tier.value
        last = (entries or 0) - 1
        found = (
            fragment_ranges(metadata.fragments, 0, last) if metadata.fragments else []
        )  # a store's ledgers have none
        parts = {each[0].first_entry_id: each for each in found}
        for fragment in metadata.fragments:
            part = parts.get(fragment.first_entry_id)
            for place, bookie in enumerate(fragment.ensemble):
                held = None if entries is None else 0
                if part is not None:
                    held = sum(span.entries for span in spans_of(metadata, place, part[1], part[2]))
                size = None if held is None or length is None else length * held // max(1, entries or 0)
                name = str(bookie)
                there, noted = name in known.registered, (metadata.ledger_id, name) in known.recorded
                shown = bookie.bookie_id
                yield (*kinds, fragment.first_entry_id, shown, held, size, there, noted, noted or not there)
