"""The consumers of ledgers: streaming queries that record in a cluster's metadata which ledgers they have finished.

Retention (``pybk.spark.sink.sink_retention``) keeps what a consumer has not read, so a record must never be ahead of
the checkpoint of its query:

- CO1: A query records the offset with which it begins before it plans the first micro-batch, whatever an earlier run
  has recorded. So a ledger that an older checkpoint needs is kept again.
- CO2: From then on it records what Spark reports as committed (``commit(end)``): the checkpoint says that the
  micro-batches up to there are done, so no restart reads them again.
- CO3: The record names the run that wrote it last. A run that finds another one's ends with an error, because two
  queries with one name would protect only what one of them needs.
- CO4: A run does not begin in the place of one that read other ledgers, because what that one has yet to read would be
  protected no more.

A record that cannot be read is an error to retention, which then deletes nothing. A record stays when its query ends,
because the query may be started again; ``remove_consumer`` removes it.
"""

from __future__ import annotations

import logging
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pybk.errors import IllegalOperationError, MetadataVersionError, PybkError
from pybk.spark.finished_ledgers import DescribedLedger, FinishedLedgers, is_selected
from pybk.spark.options import Ranges, nearest_names
from pybk.spark.packed_ids import pack_ranges, unpack_ranges
from pybk.values import decode_json, encode_json

if TYPE_CHECKING:
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.pointers import Pointer

CONSUMERS: Final = "sink-consumers"
"""The group of the records among the cluster's pointers."""

RECORD_SECONDS: Final = 5.0
"""The least time between two records of a query; a close records what is left."""

_FORMAT: Final = 1

logger = logging.getLogger(__name__)


class Selection(NamedTuple):
    """The ledgers that a query selects.

    Attributes:
        ledger_type: Their type; None for all types but the system's.
        ids: Ranges of their ids; None for all.
    """

    ledger_type: str | None
    ids: Ranges | None

    def __str__(self) -> str:
        """Return the ledgers for messages."""
        if self.ids is None:
            return f"type {self.ledger_type!r}"
        return "ledgers " + ",".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ids)


@dataclass(frozen=True, slots=True)
class Consumer:
    """What a query has recorded.

    Attributes:
        name: The name of the consumer.
        selection: The ledgers that it reads.
        finished: Those of them that it has read to their ends.
        run: The run of the query that recorded this.
        recorded_ns: When it did, nanoseconds since 1970 by its clock.
    """

    name: str
    selection: Selection
    finished: FinishedLedgers
    run: str
    recorded_ns: int

    def needs(self, ledger: DescribedLedger) -> bool:
        """Return whether the query selects a ledger, and has yet to read it."""
        return is_selected(ledger, *self.selection) and not self.finished.has(ledger.ledger_id, ledger.creation_time_ns)

    def encode(self) -> bytes:
        """Return the record as JSON, without the name."""
        kind, ids = self.selection
        values = {"finished": self.finished.to_json(), "format": _FORMAT, "type": kind}
        values |= {"ids": None if ids is None else pack_ranges(ids), "recorded_ns": self.recorded_ns, "run": self.run}
        return encode_json(values)

    @classmethod
    def decode(cls, name: str, data: bytes) -> Consumer:
        """Decode the result of ``encode``; raises CorruptError or UnsupportedFormatError for other data."""

        def of(values: dict[str, Any]) -> Consumer:
            kind, ids = values["type"], values["ids"]
            selection = Selection(
                None if kind is None else str(kind),
                None if ids is None else unpack_ranges(ids),
            )
            finished = FinishedLedgers.from_json(values["finished"])
            return cls(name, selection, finished, str(values["run"]), int(values["recorded_ns"]))

        return decode_json(data, of, where=f"the record of consumer {name!r}", number=_FORMAT)


def read_consumers(metadata: ClusterMetadata) -> list[Consumer]:
    """Return what all consumers of a cluster have recorded, by name.

    Raises:
        CorruptError, MetadataForgedError, UnsupportedFormatError: A record cannot be read.
        PybkError: As the metadata store.

    Every record that was written before the call is seen.

    Cost: A request for their names, and as ``MetadataStore.get_many`` for their records.
    """
    metadata.catch_up()
    return [Consumer.decode(name, pointer.value) for name, pointer in sorted(metadata.list_pointers(CONSUMERS))]


def remove_consumer(metadata: ClusterMetadata, name: str) -> None:
    """Remove the record of a consumer, whose query has ended for good; retention then keeps nothing for it.

    Raises:
        IllegalOperationError: There is no such consumer; the error has the nearest names.
        PybkError: As the metadata store.

    Durability: The record is removed when this returns. A query that still runs records itself again.
    """
    while (found := metadata.read_pointer(CONSUMERS, name)) is not None:
        try:
            metadata.delete_pointer(CONSUMERS, name, found.version)
        except MetadataVersionError:
            continue  # its query has recorded something meanwhile
        return
    names = sorted(metadata.pointer_names(CONSUMERS))
    raise IllegalOperationError(f"there is no consumer {name!r:.100}; {nearest_names(name, names)}")


class QueryConsumer:
    """Records how far one run of a query has come.

    Args:
        metadata: The cluster's metadata.
        name: The name of the consumer.
        selection: The ledgers that the query reads.

    Threads: one.
    """

    def __init__(self, metadata: ClusterMetadata, name: str, selection: Selection) -> None:
        self._metadata = metadata
        self._name: Final = name
        self._selection: Final = selection
        self._run: Final = secrets.token_hex(8)
        self._version: int | None = None
        """The version of the record as this run has written it."""
        self._recorded: FinishedLedgers | None = None
        """What the record has; None before the first."""
        self._latest: FinishedLedgers | None = None
        """What it should have."""
        self._due = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether this run has recorded an offset."""
        return self._recorded is not None

    def begin(self, finished: FinishedLedgers) -> None:
        """Record the offset with which the query begins, unless this run has recorded one (CO1).

        Raises:
            IllegalOperationError: A query that reads other ledgers has recorded itself under this name (CO4).
            PybkError: As the metadata store; nothing is protected yet.
        """
        while not self.has_begun:
            found = self._metadata.read_pointer(CONSUMERS, self._name)
            self._check_selection(found)
            try:
                self._write(finished, None if found is None else found.version)
            except MetadataVersionError:
                continue  # an earlier run is ending, and has recorded something

    def _check_selection(self, found: Pointer | None) -> None:
        """Check that the record is of the ledgers that this query reads."""
        recorded = self._selection if found is None else Consumer.decode(self._name, found.value).selection
        if recorded != self._selection:
            raise IllegalOperationError(
                f"consumer {self._name!r} reads {recorded!s:.200}, and this query {self._selection!s:.200}: give each "
                "query a consumer of its own; or, if the query of that one has ended for good, remove it: "
                f"pybk spark consumers URL --forget {self._name}"
            )

    def record(self, finished: FinishedLedgers) -> None:
        """Record an offset that the checkpoint has (CO2); at most every ``RECORD_SECONDS``.

        An error of the metadata store is logged, because the record then says less than it could, which is safe.

        Raises:
            IllegalOperationError: Another run has recorded itself under this name (CO3).
        """
        self.begin(finished)
        self._latest = finished
        if time.monotonic() >= self._due:
            self._record_latest()

    def close(self) -> None:
        """Record what was put off; errors are logged."""
        try:
            self._record_latest()
        except PybkError as error:
            logger.warning("consumer %r is recorded as of before: %s", self._name, error)

    def _record_latest(self) -> None:
        finished = self._latest
        if finished is None or finished == self._recorded:
            return
        try:
            self._write_own(finished)
        except IllegalOperationError:
            raise
        except PybkError as error:
            logger.warning("consumer %r is recorded as of before: %s", self._name, error)

    def _write_own(self, finished: FinishedLedgers) -> None:
        """Write the record, unless it is another run's."""
        try:
            self._write(finished, self._version)
            return
        except MetadataVersionError:
            found = self._metadata.read_pointer(CONSUMERS, self._name)
        if found is not None:
            run = Consumer.decode(self._name, found.value).run
            if run != self._run:
                raise IllegalOperationError(
                    f"consumer {self._name!r} is recorded by run {run} now, and this is run {self._run}: give each "
                    "query a consumer of its own, or stop one of the two"
                )
        self._write(finished, None if found is None else found.version)  # an answer was lost, or somebody removed it

    def _write(self, finished: FinishedLedgers, version: int | None) -> None:
        consumer = Consumer(self._name, self._selection, finished, self._run, time.time_ns())
        self._version = self._metadata.write_pointer(CONSUMERS, self._name, consumer.encode(), version)
        self._recorded = finished
        self._due = time.monotonic() + RECORD_SECONDS
