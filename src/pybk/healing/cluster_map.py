"""The ledgers of a cluster and the bookies that hold them, kept by deltas.

A cluster has many more ledgers than an auditor can read again for each question. So the map keeps the facts of each
ledger that repairs need, and for each bookie the ledgers whose fragments name it. The loss of a bookie then costs time
for the ledgers of that bookie only, and a healthy cluster costs none.

A ledger takes about 500 bytes with its entries in the index. Bookies are numbers, fragments are packed bytes, and
common properties of many ledgers are kept once.

The whole metadata are read in pages, and take minutes, while deltas arrive. From ``begin_read`` on the map records the
ledgers that a delta has changed, and pages neither remove nor add these, because a page may have been read before the
delta.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple

from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.metrics import OTHER_TYPES
from pybk.replication.quorum import Quorum

TYPES_MAX: Final = 100
"""The number of ledger types that are counted separately."""


class LedgerShape(NamedTuple):
    """The properties that many ledgers have in common.

    Attributes:
        quorum: The sizes.
        masks: The write sets, as bits of places.
        closed: Whether the end is final.
        tier: The tier of the entries.
        ledger_type: The type; ``OTHER_TYPES`` for one that came after ``TYPES_MAX`` others.
    """

    quorum: Quorum
    masks: tuple[int, ...]
    closed: bool
    tier: StorageHint
    ledger_type: str


class MappedLedger(NamedTuple):
    """The entry of a ledger in the map.

    Attributes:
        version: The version of the metadata in the metadata store.
        shape: The properties that it shares with other ledgers.
        last_entry_id: The last entry; -1 for none, and for a ledger that is not closed.
        length: The payload bytes of all entries; 0 for a ledger that is not closed.
        packed: The fragments: for each the first entry and the numbers of its bookies.
    """

    version: int
    shape: LedgerShape
    last_entry_id: int
    length: int
    packed: bytes


class MappedFragment(NamedTuple):
    """A fragment.

    Attributes:
        first_entry_id: The first entry.
        last_entry_id: The last entry, lower than the first one for an empty fragment; None if the fragment has no end
            yet.
        places: The numbers of its bookies, by place.
    """

    first_entry_id: int
    last_entry_id: int | None
    places: tuple[int, ...]


class ClusterMap:
    """All ledgers of a cluster. Threads: one at a time.

    Attributes:
        open_ledgers: The ledgers that are not closed.
        bookies: The bookies that ledgers named at any time; a bookie's number is its index.
    """

    def __init__(self) -> None:
        self.open_ledgers: Final[set[int]] = set()
        self.bookies: Final[list[Bookie]] = []
        self._numbers: Final[dict[Bookie, int]] = {}
        self._held: Final[list[set[int]]] = []
        """The ledgers of each bookie, by its number."""
        self._ledgers: Final[dict[int, MappedLedger]] = {}
        self._shapes: Final[dict[LedgerShape, LedgerShape]] = {}
        self._open_sizes: Final[Counter[int]] = Counter()
        """The number of open ledgers of each ensemble size."""
        self._counts: Final[Counter[tuple[bool, str]]] = Counter()
        """The numbers of ledgers, by whether they are closed, and by type; none of them is 0."""
        self._types: Final[set[str]] = set()
        self._packing: Final[dict[int, Struct]] = {}
        self._touched: set[int] | None = None
        """Ledgers that a delta changed since ``begin_read``; None if the metadata are not being read."""
        self._known: list[int] = []
        """The ledgers at ``begin_read``, ascending."""

    def __len__(self) -> int:
        """Return the number of ledgers."""
        return len(self._ledgers)

    def __iter__(self) -> Iterator[int]:
        """Yield the ids of all ledgers."""
        return iter(self._ledgers)

    def __contains__(self, ledger_id: object) -> bool:
        """Return whether the ledger is known."""
        return ledger_id in self._ledgers

    @property
    def largest_open_ensemble(self) -> int:
        """The largest ensemble of a ledger that is not closed; 0 if all are closed."""
        return max(self._open_sizes, default=0)

    @property
    def open_ensembles(self) -> tuple[int, int]:
        """The smallest and the largest ensemble of a ledger that is not closed; 0 and 0 if all are closed."""
        return min(self._open_sizes, default=0), self.largest_open_ensemble

    def counts(self) -> dict[tuple[bool, str], int]:
        """Return how many ledgers there are, by whether they are closed, and by type (``TYPES_MAX``)."""
        return dict(self._counts)

    def get(self, ledger_id: int) -> MappedLedger | None:
        """Return a ledger; None if it is not known."""
        return self._ledgers.get(ledger_id)

    def number_of(self, bookie: Bookie) -> int | None:
        """Return the number of a bookie; None if no ledger ever named it."""
        return self._numbers.get(bookie)

    def ledgers_of(self, number: int) -> set[int]:
        """Return the ledgers whose fragments name a bookie; not to be changed."""
        return self._held[number]

    def written_on(self, number: int) -> list[int]:
        """Return the open ledgers whose writers write to a bookie, or wrote to it before they ended; ascending."""
        found = sorted(self._held[number] & self.open_ledgers)
        return [each for each in found if number in self.fragments(self._ledgers[each])[-1].places]

    def numbers_of(self, ledger: MappedLedger) -> set[int]:
        """Return the numbers of all bookies of a ledger."""
        return {number for _, *places in self._unpacked(ledger) for number in places}

    def fragments(self, ledger: MappedLedger) -> list[MappedFragment]:
        """Return the fragments of a ledger, ascending."""
        rows = self._unpacked(ledger)
        last = ledger.last_entry_id if ledger.shape.closed else None
        ends = [*(row[0] - 1 for row in rows[1:]), last]
        return [MappedFragment(row[0], end, row[1:]) for row, end in zip(rows, ends, strict=True)]

    def apply(self, ledger_id: int, metadata: LedgerMetadata | None, version: int) -> bool:
        """Apply a delta of a ledger.

        Args:
            ledger_id: The ledger.
            metadata: Its metadata; None if it was deleted.
            version: The version of the metadata in the metadata store; one that is lower than the known one is ignored.

        Returns:
            Whether the map has changed.
        """
        if self._touched is not None:
            self._touched.add(ledger_id)
        return self._put(ledger_id, metadata, version)

    def begin_read(self) -> None:
        """Prepare for pages of all metadata, which are read from now on."""
        self._touched = set()
        self._known = sorted(self._ledgers)

    def apply_page(
        self,
        after: int,
        through: int | None,
        ledgers: Mapping[int, tuple[LedgerMetadata, int]],
        *,
        unknown: Iterable[int],
    ) -> list[int]:
        """Apply a page of the metadata of all ledgers: ledgers that it does not list were deleted.

        Args:
            after: The ledger before the page.
            through: The last ledger of the page; None for the last page.
            ledgers: The metadata and version of each ledger of the page.
            unknown: Ledgers of the page that could not be read, or have the version that is known; they stay as they
                are.

        Returns:
            The ledgers that changed.
        """
        assert self._touched is not None, "begin_read comes first"
        begin = bisect_right(self._known, after)
        end = len(self._known) if through is None else bisect_right(self._known, through)
        kept = self._touched.union(unknown)
        gone = [each for each in self._known[begin:end] if each not in ledgers and each not in kept]
        changed = [each for each in gone if self._put(each, None, 0)]
        for ledger_id, (metadata, version) in ledgers.items():
            # A ledger that a delta has removed stays removed; of one that is there, the higher version counts.
            if (ledger_id in self._ledgers or ledger_id not in kept) and self._put(ledger_id, metadata, version):
                changed.append(ledger_id)
        if through is None:
            self._touched, self._known = None, []
        return changed

    def bytes_of_place(self, ledger: MappedLedger, fragment: MappedFragment) -> int:
        """Return the payload bytes, about, of each place of a fragment; 0 if the length is not known."""
        if fragment.last_entry_id is None or ledger.last_entry_id < 0:
            return 0
        entries = fragment.last_entry_id - fragment.first_entry_id + 1
        quorum = ledger.shape.quorum
        share = ledger.length * entries * quorum.write_quorum
        return share // ((ledger.last_entry_id + 1) * quorum.ensemble_size)

    def _put(self, ledger_id: int, metadata: LedgerMetadata | None, version: int) -> bool:
        old = self._ledgers.get(ledger_id)
        if metadata is None or not metadata.fragments:
            if old is None:
                return False
            self._unlink(ledger_id, old, self.numbers_of(old))
            del self._ledgers[ledger_id]
            return True
        if old is not None and old.version >= version:
            return False
        new = self._mapped(metadata, version)
        before = set() if old is None else self.numbers_of(old)
        after = self.numbers_of(new)
        if old is not None:
            self._unlink(ledger_id, old, before - after)
        for number in after - before:
            self._held[number].add(ledger_id)
        self._ledgers[ledger_id] = new
        self._counts[new.shape.closed, new.shape.ledger_type] += 1
        if not new.shape.closed:
            self.open_ledgers.add(ledger_id)
            self._open_sizes[new.shape.quorum.ensemble_size] += 1
        return True

    def _unlink(self, ledger_id: int, old: MappedLedger, numbers: set[int]) -> None:
        """Remove a ledger from the counts, and from the sets of open ledgers and of some bookies."""
        for number in numbers:
            self._held[number].discard(ledger_id)
        key = old.shape.closed, old.shape.ledger_type
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
        if not old.shape.closed:
            self.open_ledgers.discard(ledger_id)
            size = old.shape.quorum.ensemble_size
            self._open_sizes[size] -= 1
            if not self._open_sizes[size]:
                del self._open_sizes[size]

    def _mapped(self, metadata: LedgerMetadata, version: int) -> MappedLedger:
        quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
        closed = metadata.state is LedgerState.CLOSED
        shape = LedgerShape(quorum, quorum.masks(), closed, metadata.tier, self._type(metadata))
        shape = self._shapes.setdefault(shape, shape)
        packing = self._struct(quorum.ensemble_size)
        packed = b"".join(
            packing.pack(fragment.first_entry_id, *map(self._number, fragment.ensemble))
            for fragment in metadata.fragments
        )
        last, length = (metadata.last_entry_id, metadata.length) if closed else (-1, 0)
        return MappedLedger(version, shape, last, length, packed)

    def _type(self, metadata: LedgerMetadata) -> str:
        name = str(metadata.ledger_type)
        if name not in self._types:
            if len(self._types) >= TYPES_MAX:
                return OTHER_TYPES
            self._types.add(name)
        return name

    def _number(self, bookie: Bookie) -> int:
        number = self._numbers.get(bookie)
        if number is None:
            number = self._numbers[bookie] = len(self.bookies)
            self.bookies.append(bookie)
            self._held.append(set())
        return number

    def _struct(self, size: int) -> Struct:
        packing = self._packing.get(size)
        if packing is None:
            packing = self._packing[size] = Struct(f"<q{size}H")
        return packing

    def _unpacked(self, ledger: MappedLedger) -> list[tuple[int, ...]]:
        return list(self._struct(ledger.shape.quorum.ensemble_size).iter_unpack(ledger.packed))
