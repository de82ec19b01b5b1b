"""The ledgers of a read, with the end up to which each can be read now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pybk.credentials import mismatch
from pybk.errors import CorruptError, NoSuchLedgerError, UnauthorizedError, UsageError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import HOW_TO_SEAL
from pybk.spark.connection import Connection, connection, ledger_seal, refuse_bookie_directory
from pybk.spark.options import nearest
from pybk.spark.sink.manifest import SINK_KEY, committed
from pybk.spark.source.planning import ReadableLedger, intersect, within
from pybk.spark.source.reading import lost_ledgers_error
from pybk.streams.format import DETACHED_KEY, SEGMENT_KEY, DetachedHeader, SegmentHeader

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import LedgerMetadata
    from pybk.manager.ledger_reader import LedgerReader
    from pybk.spark.options import Positions, Ranges, SourceOptions

_LIST_SHARE: Final = 10
_READ_BY_NAME: Final = ("log", "wal")
"""The types of the segments of what is read by name."""


class LedgerCatalog:
    """The ledgers of a read.

    Ledgers that a sink has written and not committed are hidden. Ledgers of system types are left out unless a type is
    selected.

    Args:
        options: The options of the read.
        ids: Ranges of ledger ids to which the read is restricted; None for all.

    Attributes:
        hidden: The creation times of the ledgers that were hidden at the last listing, by id.

    Threads: one.
    """

    def __init__(self, options: SourceOptions, ids: Ranges | None = None) -> None:
        asked = options.ledgers
        self._where: Final = options.where
        self._given: Final = options.given.read()
        self._type: Final = options.ledger_type
        self._asked: Final = asked
        self._pushed: Final = ids
        self._ids: Final = asked if ids is None else ids if asked is None else intersect(asked, ids)
        self._named: Final = tuple(low for low, high in asked or () if low == high and within(low, ids))
        self._all_named: Final = asked is not None and all(low == high for low, high in asked)
        self._closed: dict[int, ReadableLedger] = {}
        self._open: dict[int, LedgerReader] = {}
        self._unlocked = False
        self._require_seal: Final = options.require_seal
        self._allow_missing: Final = options.allow_missing
        self._raw: Final = options.raw
        self._fail_on_data_loss: Final = options.fail_on_data_loss
        self._types: set[str] = set()
        """The types of the ledgers of the last listing, except the system's; if a type selects the ledgers."""
        self._checked: dict[int, LedgerMetadata] = {}
        self.list_at = 0.0
        """The time of the next listing of ledgers, by the monotonic clock."""
        self._elsewhere: set[int] = set()
        self.hidden: dict[int, int] = {}

    @property
    def missing(self) -> list[int]:
        """The ids of ledgers that the options name one by one and that did not exist."""
        return [
            each for each in self._named if not any(each in some for some in (self._closed, self._open, self.hidden))
        ]

    def source(self) -> str:
        """Return the store or cluster and the selection of ledgers, as text."""
        store = connection(self._where).manager.store_id.hex()
        if self._type is not None:
            return f"{store} type {self._type}"
        return f"{store} ledgers {','.join(f'{low}-{high}' for low, high in self._asked or ())}"

    def check_type(self) -> None:
        """Check that the last look found ledgers of the type that is selected, unless ``allow_missing`` is set.

        Raises:
            NoSuchLedgerError: It found none, not even one that is hidden.
        """
        if self._type is None or self._allow_missing or self._type in self._types:
            return
        names = sorted(filter(None, self._types))
        raise NoSuchLedgerError(
            f"no ledger of {self._where} has type {self._type!r:.100}; {nearest(self._type, names, 'types')}"
        )

    def check_selection(self) -> None:
        """Check that what the options select exists, before ledgers are opened; as far as the options demand it.

        Raises:
            NoSuchLedgerError: No ledger has the selected type; or a ledger that is selected by its id does not exist.
            UsageError: The directory is that of a bookie; or a ledger is a segment of a log, and ``raw`` is not set.
            PybkError: The metadata store cannot be read.

        Cost: One read of the metadata store per ledger that is selected by its id; for a type, a listing up to the
            first ledger that has it.
        """
        found = connection(self._where)
        if self._type is not None:
            if not self._allow_missing and next(self._wanted(found), None) is None:
                self.check_type()
        elif self._fail_on_data_loss and (missing := self.deleted(self._named)):
            refuse_bookie_directory(self._where, found.backend.ledgers())
            raise lost_ledgers_error(sorted(missing))

    def deleted(self, ledger_ids: Iterable[int]) -> set[int]:
        """Return those of some ledgers that were deleted, by the metadata of each, because listings may be late.

        Raises:
            PybkError: The metadata store cannot be read.

        Cost: One read of the metadata store per ledger.
        """
        manager = connection(self._where).manager
        found = set()
        for ledger_id in ledger_ids:
            try:
                manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                found.add(ledger_id)
        return found

    def absent(self, *positions: Positions) -> list[int]:
        """Return the ledgers that positions name and that do not exist.

        Raises:
            UsageError: Such a ledger exists, but is not among the selected ledgers.
            PybkError: The metadata store cannot be read.
        """
        manager = connection(self._where).manager
        named = {ledger_id for each in positions for ledger_id in each.entries if within(ledger_id, self._pushed)}
        absent = []
        for ledger_id in sorted(named.difference(self._closed, self._open, self.hidden)):
            try:
                found = manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                absent.append(ledger_id)
                continue
            if not self._wants(found):
                raise UsageError(
                    f"startingOffsets or endingOffsets names ledger {ledger_id} of type {str(found.ledger_type)!r}, "
                    "which is not among the ledgers that are read; leave it out there, or read it too"
                )
        return absent

    def look(self, *, now: bool = True) -> dict[int, ReadableLedger]:
        """Return the ledgers by ascending id, each with the end up to which it can be read.

        Args:
            now: Whether to list the ledgers in any case; if False, the last listing is used while a new one would take
                too long.

        Raises:
            UnauthorizedError: The password is not that of a ledger.
            LedgerUnsealedError, SealMismatchError: A seal is required, and a ledger is open or unsealed, or its seal
                does not match its kind or end.
            UsageError: The directory is that of a bookie; or a ledger is a segment of a log, and ``raw`` is not set.
            PybkError: The metadata store or bookies cannot be read.
        """
        began = time.monotonic()
        if now or began >= self.list_at:
            self._list(connection(self._where))
            ended = time.monotonic()
            self.list_at = ended + _LIST_SHARE * (ended - began)
        found = {**self._closed, **dict(self._advanced())}
        return dict(sorted(found.items()))

    def _list(self, found: Connection) -> None:
        before, self._open, self._closed, self.hidden = self._open, {}, {}, {}
        listed, counting = self._listed(found)
        for ledger_id, metadata in listed.items():
            app = _app(metadata)
            if app and found.metadata is not None and ledger_id not in counting.get(app, ()):
                self.hidden[ledger_id] = metadata.creation_time_ns
            elif metadata.state is LedgerState.CLOSED:
                self._check_password(found, ledger_id)
                self._check_seal(found, metadata)
                end, length = metadata.last_entry_id + 1, metadata.length
                self._closed[ledger_id] = ReadableLedger(ledger_id, metadata.creation_time_ns, end, length, True)
            elif ledger_id in before:
                self._open[ledger_id] = before[ledger_id]
            else:
                self._open_ledger(found, ledger_id)

    def _listed(self, found: Connection) -> tuple[dict[int, LedgerMetadata], dict[str, set[int]]]:
        """Return metadata by ledger, and the committed ledgers of each sink; of each commit all ledgers or none."""
        listed = {each.ledger_id: each for each in self._wanted(found)}
        if found.metadata is None:
            return listed, {}
        counting = {app: committed(found, app) for app in {_app(each) for each in listed.values()} if app}
        named = {each for ids in counting.values() for each in ids if within(each, self._ids)}
        if unseen := named - listed.keys() - self._elsewhere:
            # A commit during the listing may have added ledgers, so the listing may have only some of its ledgers.
            listed = {each.ledger_id: each for each in self._wanted(found)}
            self._elsewhere |= unseen - listed.keys()  # deleted, or of another type
        return listed, counting

    def _wanted(self, found: Connection) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that the options select, without those of system types."""
        for metadata in self.there(found):
            refuse_bookie_directory(self._where, (metadata,))
            if self._type is not None and not metadata.ledger_type.is_system:
                self._types.add(str(metadata.ledger_type))
            if self._wants(metadata):
                if not self._raw:
                    refuse_segment(metadata)
                yield metadata

    def _wants(self, metadata: LedgerMetadata) -> bool:
        kind = metadata.ledger_type
        wanted = not kind.is_system if self._type is None else kind == self._type
        return wanted and within(metadata.ledger_id, self._ids)

    def there(self, found: Connection) -> Iterator[LedgerMetadata]:
        """Yield the metadata of the ledgers that exist and may be asked for."""
        left = set(self._named)
        if not self._all_named:
            found.backend.catch_up()
            for metadata in found.backend.ledgers():
                left.discard(metadata.ledger_id)
                yield metadata
        for ledger_id in sorted(left):  # a listing may be late
            try:
                yield found.manager.ledger_metadata(ledger_id)
            except NoSuchLedgerError:
                # The ids of a bookie's store are not those of the cluster.
                refuse_bookie_directory(self._where, found.backend.ledgers())

    def _check_password(self, found: Connection, ledger_id: int) -> None:
        """Open one ledger, so that a wrong password is reported before reading begins."""
        if not self._unlocked:
            self._open_ledger(found, ledger_id)
            self._open.pop(ledger_id, None)

    def _check_seal(self, found: Connection, metadata: LedgerMetadata) -> None:
        """Check the seal of a closed ledger if one is required.

        The tasks check the ledgers that they open. A ledger that was truncated to zero entries is not opened by any
        task, so it must be checked here. A ledger is checked again only if its metadata have changed.
        """
        if not self._require_seal or self._checked.get(metadata.ledger_id) == metadata:
            return
        seal = ledger_seal(found, metadata, self._given)
        if seal is None:
            raise UnauthorizedError(mismatch(metadata.key_kind, self._given, f"ledger {metadata.ledger_id}"))
        seal.require(metadata, HOW_TO_SEAL)
        self._checked[metadata.ledger_id] = metadata

    def _open_ledger(self, found: Connection, ledger_id: int) -> None:
        try:
            self._open[ledger_id] = found.manager.open_ledger(
                ledger_id,
                password=self._given.password,
                secret=self._given.secret,
                recover=False,
                require_seal=self._require_seal,
            )
        except NoSuchLedgerError:  # deleted since it was listed
            return
        self._unlocked = True

    def _advanced(self) -> Iterator[tuple[int, ReadableLedger]]:
        """Read the last add confirmed of the open ledgers."""
        for ledger_id, reader in list(self._open.items()):
            try:
                last = reader.read_last_add_confirmed()
            except NoSuchLedgerError:
                del self._open[ledger_id]
                continue
            closed = reader.is_closed
            if closed:  # perhaps since the read above
                last = reader.metadata.last_entry_id
            yield (
                ledger_id,
                ReadableLedger(ledger_id, reader.metadata.creation_time_ns, last + 1, reader.length, closed),
            )


def refuse_segment(metadata: LedgerMetadata) -> None:
    """Raise an error if a ledger is a segment of a log, because its entries are not the log's records.

    Raises:
        UsageError: It is one; the error names the log.
    """
    segment, detached = (metadata.custom_metadata.get(key) for key in (SEGMENT_KEY, DETACHED_KEY))
    where = f"ledger {metadata.ledger_id}"
    try:
        if segment is not None:
            name = SegmentHeader.describes(segment, where=where).name
        elif detached is not None:
            name = DetachedHeader.describes(detached, where=where).name
        else:
            return
    except CorruptError:  # the application's own value
        return
    kind = str(metadata.ledger_type)
    remedy = f"read it by option {kind}={name!r}, or" if kind in _READ_BY_NAME else "to"
    raise UsageError(
        f"ledger {metadata.ledger_id} is a segment of {kind} {name!r}, and its entries are not records: {remedy} read "
        "the entries as they are with raw=true"
    )


def _app(metadata: LedgerMetadata) -> str:
    """Return the app id of the sink that wrote a ledger; empty if no sink did."""
    return metadata.custom_metadata.get(SINK_KEY, b"").decode(errors="replace")
