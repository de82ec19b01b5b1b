"""Ledgers in the metadata store: ids given in blocks, changes by compare-and-set, tombstones of deleted ledgers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, overload

from pybk.errors import (
    CorruptError,
    LedgerDeletedError,
    LedgerExistsError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    NoSuchLedgerError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.flags import LedgerType
from pybk.ledger.ledger_metadata import LedgerMetadata, decode_type, type_marked
from pybk.metadata.authenticated_values import AuthenticatedValues, UnknownEpochError, ValueKind, new_token, token_of
from pybk.metadata.id_ranges import IdRange, decode_ranges, has_id
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metadata.lost_answers import settle
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.store import MetadataStore, Node, Watch
from pybk.values import decode_json, encode_json, to_base64

logger = logging.getLogger(__name__)

LEDGERS_KEY: Final = "ledgers"
DELETED_KEY: Final = "deleted"
"""The key above the ids of deleted ledgers whose tombstones were folded: a value for each ten thousand ids."""

DELETED_IDS_REMEDY: Final = (
    "`pybk metadata check URL --repair` makes it again: of its ten thousand ids those that no ledger has count as "
    "deleted then"
)
"""The remedy for a damaged value of deleted ids."""

IDS_KEY: Final = "ids"
LEDGERS_PAGE: Final = 500
"""Ledgers whose ids, metadata or tombstones one request reads."""

ID_BLOCK: Final = 1000
LEDGER_ID_MAX: Final = (1 << 63) - 1

_DIGITS: Final = frozenset("0123456789")
_LEVELS: Final = (3, 4, 4, 4, 4)
"""The digits of each component of a ledger's key, as in BookKeeper: 19 in all, so a key has at most 10 000 children."""

LISTED_KEYS: Final = 10_000
"""Keys that are listed at a time for pages of all ledgers, because a store lists all children of a key."""

_GIVEN_BEFORE: Final = "ledger {} exists, or existed and was deleted; ids are given once: take another"

_KEY_CHARS: Final = len(LEDGERS_KEY) + sum(_LEVELS) + len(_LEVELS)


class StoredLedger(NamedTuple):
    """A ledger's metadata as the store has it.

    Attributes:
        metadata: The metadata.
        version: The version of its key, which the next ``write_ledger`` expects.
    """

    metadata: LedgerMetadata
    version: int


class OtherLedger(NamedTuple):
    """A ledger of another type than the caller asked for, whose metadata were not decoded whole.

    Attributes:
        ledger_type: Its type.
        version: The version of its key.
    """

    ledger_type: LedgerType
    version: int


class LedgerPage(NamedTuple):
    """A page of all ledgers, in ascending order.

    Attributes:
        ledgers: The metadata and version of each ledger that is in none of the next collections.
        others: Ledgers of other types than the one that was asked for.
        same: Ledgers that have the version that the caller knows.
        deleted: Ledgers that have a tombstone.
        unknown: Ledgers whose metadata are damaged, forged or of another format, which is logged.
        through: The last ledger of the page; None if this was the last page.
    """

    ledgers: dict[int, StoredLedger]
    others: dict[int, OtherLedger]
    same: frozenset[int]
    deleted: frozenset[int]
    unknown: frozenset[int]
    through: int | None


def ledger_path(ledger_id: int) -> str:
    """Return the part of a ledger's key that names it: its id in 19 digits, split 3-4-4-4-4.

    Raises:
        UsageError: The id is not a whole number from 0 to ``LEDGER_ID_MAX``.
    """
    if type(ledger_id) is not int or not 0 <= ledger_id <= LEDGER_ID_MAX:
        raise UsageError(f"ledger id {ledger_id!r}; it takes a whole number from 0 to {LEDGER_ID_MAX}")
    digits = f"{ledger_id:019d}"
    return f"{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/{digits[15:]}"


def deleted_ids_key(ledger_id: int) -> str:
    """Return the key that has a ledger's id once its tombstone was folded."""
    return f"{DELETED_KEY}/{ledger_path(ledger_id).rpartition('/')[0]}"


def ledger_in_key(key: str) -> int | None:
    """Return the ledger whose path follows the first component of a key; None if the key has none.

    Characters after the digits in the last component are ignored.
    """
    parts = key.split("/")[1:]
    if len(parts) != len(_LEVELS):
        return None
    digits = [part[:size] for part, size in zip(parts, _LEVELS, strict=True)]
    if any(len(part) != size for part, size in zip(digits, _LEVELS, strict=True)):
        return None
    return int("".join(digits)) if _DIGITS.issuperset("".join(digits)) else None


def leaves_after(store: MetadataStore, root: str, after: int, count: int) -> list[tuple[int, str]]:
    """Return the leaf keys below ``root`` of the next ledgers whose ids are above ``after``.

    Args:
        store: The store.
        root: The key above the ledgers' paths.
        after: Only ledgers above this id are returned.
        count: The number of keys wanted; more are returned if the last ledger has several, fewer at the end.

    Returns:
        Ledger ids and keys, ascending. The last component of a key begins with the ledger's last four digits. Keys
        that are not on the path of a ledger are left out, and logged.
    """
    found: list[tuple[int, str]] = []
    _descend(store, root, "", after, count, found)
    return found


def _descend(store: MetadataStore, key: str, digits: str, after: int, count: int, found: list[tuple[int, str]]) -> None:
    size = _LEVELS[digits.count("/")]
    last = digits.count("/") == len(_LEVELS) - 1
    for name in store.children(key):
        prefix = name[:size]
        if len(prefix) != size or not _DIGITS.issuperset(prefix) or (name != prefix and not last):
            logger.warning(
                "metadata key %s/%.200r is not part of a ledger's path, and is left out; remove it", key, name
            )
            continue
        highest = int((digits + prefix).replace("/", "").ljust(sum(_LEVELS), "9"))
        if highest <= after:
            continue
        if len(found) >= count and found[-1][0] != highest:
            return
        if last:
            found.append((highest, f"{key}/{name}"))
        else:
            _descend(store, f"{key}/{name}", f"{digits}{prefix}/", after, count, found)


class Ledgers(AuthenticatedValues):
    """The ledgers of a cluster. Every method may also raise MetadataUnreachableError. Threads: any."""

    def __init__(self, store: MetadataStore, keys: MetadataKeys | None) -> None:
        super().__init__(store, keys)
        self._ids = range(0)
        self._ids_lock = threading.Lock()
        self._folded: tuple[tuple[str, int], list[IdRange]] = ("", 0), []
        """The ids of the folded tombstones that were decoded last, with the key and the version of their value."""

    def new_ledger_id(self) -> int:
        """Return a ledger id that this method has never returned in this cluster.

        A client reserves ids in blocks of ``ID_BLOCK``, so most calls need no round trip; it loses the rest of its
        block when it ends. An application may have used the id without asking for it: ``create_ledger`` then refuses
        it, and the caller takes the next id.

        Raises:
            UsageError: All ids are used up.
        """
        with self._ids_lock:
            if not self._ids:
                first = self._take_block()
                self._ids = range(first, first + ID_BLOCK)
            ledger_id, self._ids = self._ids[0], self._ids[1:]
            return ledger_id

    def _take_block(self) -> int:
        """Reserve a block of ids for this client by compare-and-set, and return its first id."""
        while True:
            node = self._store.get(IDS_KEY, latest=True)
            first = 0 if node is None else self._next_of(node)
            if first + ID_BLOCK - 1 > LEDGER_ID_MAX:
                raise UsageError(f"all ledger ids up to {LEDGER_ID_MAX} were given; use another cluster")
            payload = encode_json({"next": first + ID_BLOCK})
            try:
                if node is None:
                    self.create_value(ValueKind.IDS, IDS_KEY, payload)
                else:
                    self._put(ValueKind.IDS, IDS_KEY, payload, node.version)
            except (MetadataExistsError, MetadataVersionError):
                continue
            return first

    def next_id(self) -> int:
        """Return the first id that no client has reserved; 0 if none was reserved yet."""
        node = self._store.get(IDS_KEY, latest=True)
        return 0 if node is None else self._next_of(node)

    def _next_of(self, node: Node) -> int:
        payload = self._payload_of(ValueKind.IDS, IDS_KEY, node.value)
        return decode_json(payload, lambda values: int(values["next"]), where=f"metadata key {IDS_KEY!r}")

    def raise_ids(self, next_id: int) -> None:
        """Raise the next id that is given to ``next_id``, durably, unless it is higher already."""
        while True:
            node = self._store.get(IDS_KEY, latest=True)
            payload = encode_json({"next": next_id})
            with suppress(MetadataExistsError, MetadataVersionError):  # another process has just reserved ids
                if node is None:
                    self.create_value(ValueKind.IDS, IDS_KEY, payload)
                    return
                if self._next_of(node) < next_id:
                    self._put(ValueKind.IDS, IDS_KEY, payload, node.version)
                return

    def create_ledger(self, metadata: LedgerMetadata) -> int:
        """Record a new ledger, durably.

        Args:
            metadata: The ledger's metadata; its random ``key_salt`` distinguishes it from another ledger of this id.

        Returns:
            The version that ``write_ledger`` expects.

        Raises:
            LedgerExistsError: A ledger of this id exists or existed; ids are used once.
        """
        key, value, token = self._encoded(metadata)

        def mine(node: Node | None) -> bool:
            # Another process may have changed the ledger already, so the token may be its own. The description never
            # changes, and has the random key_salt of this call.
            if node is None:
                return False
            if token_of(node.value) == token:
                return True
            kind, payload = self.decoded(key, node.value)
            if kind is not ValueKind.LEDGER:
                return False
            return LedgerDescription.of(_metadata(key, payload)) == LedgerDescription.of(metadata)

        try:
            version = settle(self._store, key, lambda: self._store.create(key, value), mine)
        except MetadataExistsError as error:
            raise LedgerExistsError(_GIVEN_BEFORE.format(metadata.ledger_id)) from error
        # The id was recorded before the tombstone was removed (DT3), and the key could be created only after that. So
        # this read finds the id without a sync, and mostly without a request.
        try:
            given_before = self.is_folded(metadata.ledger_id, latest=False)
        except PybkError:
            self._store.delete(key, version)
            raise
        if given_before:
            self._store.delete(key, version)
            raise LedgerExistsError(_GIVEN_BEFORE.format(metadata.ledger_id))
        return version

    def read_ledger(self, ledger_id: int) -> StoredLedger:
        """Return a ledger's metadata; every change that took effect before the call is seen.

        Args:
            ledger_id: The ledger.

        Raises:
            LedgerDeletedError: It was deleted: the store has its tombstone, or keeps its id among the deleted ones.
            NoSuchLedgerError: The store has no such key, which proves nothing about the ledger's entries.
            MetadataForgedError: Its metadata was not written with the cluster's secret.
            CorruptError: The value is not a ledger's metadata.
        """
        key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
        node = self._store.get(key, latest=True)
        if node is None and not self.is_folded(ledger_id):
            raise NoSuchLedgerError(f"ledger {ledger_id}: the cluster has none of this id")
        found = None if node is None else self._ledger(key, ledger_id, node)
        if found is None:
            raise LedgerDeletedError(f"ledger {ledger_id} was deleted")
        return found

    def read_ledgers(
        self,
        ledger_ids: Sequence[int],
        *,
        damaged: Callable[[int, PybkError], None] | None = None,
        deleted: Callable[[int], None] = lambda ledger_id: None,
    ) -> list[StoredLedger | None]:
        """Return the metadata of many ledgers, in their order; None for a ledger that does not exist or was deleted.

        Args:
            ledger_ids: The ledgers.
            damaged: Called with a ledger whose metadata is damaged, forged or of another format, and the error; the
                ledger is None in the result. Without it the error is raised.
            deleted: Called with a ledger that has a tombstone; one without a key may exist, because reads may be late.

        Raises:
            MetadataForgedError, CorruptError: As ``read_ledger``.

        Cost: As ``MetadataStore.get_many``.
        """
        keys = [f"{LEDGERS_KEY}/{ledger_path(ledger_id)}" for ledger_id in ledger_ids]
        found: list[StoredLedger | None] = []
        for key, ledger_id, node in zip(keys, ledger_ids, self._store.get_many(keys), strict=True):
            try:
                found.append(None if node is None else self._ledger(key, ledger_id, node))
                if node is not None and found[-1] is None:
                    deleted(ledger_id)
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                if damaged is None:
                    raise
                damaged(ledger_id, error)
                found.append(None)
        return found

    def read_sound_ledgers(self, ledger_ids: Sequence[int]) -> list[StoredLedger]:
        """Return the metadata of those ledgers that exist, in their order; damaged metadata is left out, and logged."""

        def log(ledger_id: int, error: PybkError) -> None:
            logger.warning("ledger %d is left out of a listing: %s", ledger_id, error)

        return [found for found in self.read_ledgers(ledger_ids, damaged=log) if found is not None]

    def write_ledger(self, metadata: LedgerMetadata, version: int) -> int:
        """Replace a ledger's metadata, durably.

        Args:
            metadata: The new metadata.
            version: The version of the metadata that it replaces.

        Returns:
            The new version.

        Raises:
            MetadataVersionError: Another process has changed the metadata or deleted the ledger: read it again. With
                ``outcome_unknown`` this change may have taken effect before that.
        """
        key, value, token = self._encoded(metadata)
        return self.change(
            key,
            version,
            lambda current: self._store.put(key, value, current),
            lambda node: node is not None and token_of(node.value) == token,
        )

    def delete_ledger(self, ledger_id: int, version: int, proof: bytes = b"") -> None:
        """Delete a ledger, durably: replace its metadata by a tombstone, which allows bookies to drop its entries.

        Args:
            ledger_id: The ledger.
            version: The version of the metadata that the caller has read.
            proof: A signature that proves to bookies that the caller knows the ledger's password; it is stored in the
                tombstone. Empty if there is none.

        Raises:
            MetadataVersionError: Another process has changed the metadata or deleted the ledger.
        """
        key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
        self._put(ValueKind.DELETED, key, encode_json({"ledger_id": ledger_id, "proof": to_base64(proof)}), version)

    def delete_anew(self, ledger_id: int, proof: bytes) -> None:
        """Write a tombstone, durably, for a deleted ledger whose tombstone was lost or replaced by older metadata."""
        key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
        payload = encode_json({"ledger_id": ledger_id, "proof": to_base64(proof)})
        while True:
            node = self._store.get(key, latest=True)
            with suppress(MetadataExistsError, MetadataVersionError):
                if node is None:
                    self.create_value(ValueKind.DELETED, key, payload)
                else:
                    self._put(ValueKind.DELETED, key, payload, node.version)
                return

    def ledger_pages(
        self,
        *,
        count: int = 500,
        known: Callable[[int], int | None] = lambda ledger_id: None,
        ledger_type: str | None = None,
    ) -> Iterator[LedgerPage]:
        """Yield all ledgers in pages, each read when it is asked for; known ledgers only if they changed.

        A caller follows all ledgers with this and ``watch_ledgers``: versions show the changes that the watch may have
        missed. Keys are listed for ten thousand ledgers at a time; ledgers that are created later may be missing.

        Args:
            count: The most keys of a page.
            known: Returns the version of a ledger that the caller has; None for a ledger that it does not have.
            ledger_type: The type of the ledgers whose metadata are wanted; None for all types.

        Cost: Some round trips per page; a ledger whose version is known is neither verified nor decoded, and one of
            another type is verified and decoded in part.
        """
        after, more = -1, True
        while more:
            leaves = leaves_after(self._store, LEDGERS_KEY, after, LISTED_KEYS)
            more = len(leaves) >= LISTED_KEYS
            for at in range(0, len(leaves) or 1, count):
                page = leaves[at : at + count]
                is_last = not more and at + count >= len(leaves)
                yield self._page(page, None if is_last else page[-1][0], known, ledger_type)
            after = leaves[-1][0] if leaves else after

    def _page(
        self,
        leaves: list[tuple[int, str]],
        through: int | None,
        known: Callable[[int], int | None],
        ledger_type: str | None,
    ) -> LedgerPage:
        """Return the page with the ledgers of some keys; see ``ledger_pages``."""
        ledgers: dict[int, StoredLedger] = {}
        others: dict[int, OtherLedger] = {}
        same, deleted, unknown = set[int](), set[int](), set[int]()
        for (ledger_id, key), node in zip(leaves, self._store.get_many([key for _, key in leaves]), strict=True):
            if node is None:
                continue
            if node.version == known(ledger_id):
                same.add(ledger_id)
                continue
            try:
                found = self._ledger(key, ledger_id, node, ledger_type)
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("ledger %d cannot be read: %s", ledger_id, error)
                unknown.add(ledger_id)
                continue
            if found is None:
                deleted.add(ledger_id)
            elif isinstance(found, OtherLedger):
                others[ledger_id] = found
            else:
                ledgers[ledger_id] = found
        return LedgerPage(ledgers, others, frozenset(same), frozenset(deleted), frozenset(unknown), through)

    def watch_ledgers(self, callback: Callable[[frozenset[int] | None], None]) -> Watch:
        """Call ``callback`` with the ledgers that were created, changed or deleted, as ``watch_below`` does.

        None means that some may have been missed: ``ledger_pages`` finds them by their versions.
        """

        def changed(keys: frozenset[str] | None) -> None:
            if keys is None:
                callback(None)
            elif found := frozenset(each for key in keys if (each := ledger_in_key(key)) is not None):
                callback(found)

        return self._store.watch_below(LEDGERS_KEY, changed)

    def list_ledgers(self, *, after: int = -1, count: int = 1000) -> list[int]:
        """Return a page of the ids of ledgers that are not deleted, ascending.

        Args:
            after: The last ledger of the previous page; -1 for the first page.
            count: The most ids to return.

        Returns:
            Their ids, fewer than ``count`` at the end. Ledgers whose metadata is damaged are included.

        Cost: Some round trips per page; it reads the metadata of the page's ledgers and of deleted ones between them.
        """
        if count < 1:
            raise UsageError(f"count is {count!r}; it takes a whole number from 1 up")
        live: list[int] = []
        while len(live) < count:
            wanted = count - len(live)
            leaves = leaves_after(self._store, LEDGERS_KEY, after, wanted)
            for (ledger_id, key), node in zip(leaves, self._store.get_many([key for _, key in leaves]), strict=True):
                if len(key) != _KEY_CHARS:
                    logger.warning("metadata key %.200r does not name a ledger, and is left out; remove it", key)
                elif node is not None and not self._is_deleted(key, node):
                    live.append(ledger_id)
            if len(leaves) < wanted:
                break
            after = leaves[-1][0]
        return live

    def id_pages(self, *, after: int = -1) -> Iterator[list[int]]:
        """Yield what ``list_ledgers`` returns, page by page, each read when it is asked for.

        Args:
            after: Only ledgers above this id are yielded.
        """
        while ids := self.list_ledgers(after=after, count=LEDGERS_PAGE):
            yield ids
            after = ids[-1]

    def sound_ledgers(self, *, after: int = -1) -> Iterator[StoredLedger]:
        """Yield the ledgers above an id, ascending, read in pages; damaged metadata is left out, and logged."""
        for ids in self.id_pages(after=after):
            yield from self.read_sound_ledgers(ids)

    def _is_deleted(self, key: str, node: Node) -> bool:
        """Return whether a key holds a tombstone; a damaged value does not count as one."""
        try:
            kind, _ = self.decoded(key, node.value)
        except (CorruptError, MetadataForgedError, UnsupportedFormatError):
            return False  # reading the ledger's metadata raises the error
        return kind is ValueKind.DELETED

    def ledger_versions(self, ledger_ids: Sequence[int], *, latest: bool = False) -> list[int | None]:
        """Return the version of each ledger's metadata, which each change increases; None for a ledger without a key.

        Values are neither decoded nor verified.

        Args:
            ledger_ids: The ledgers.
            latest: Whether every change that took effect before the call is seen.

        Cost: As ``MetadataStore.get_many``.
        """
        keys = [f"{LEDGERS_KEY}/{ledger_path(ledger_id)}" for ledger_id in ledger_ids]
        nodes = self._store.get_many(keys, latest=latest)
        return [None if node is None else node.version for node in nodes]

    def is_unheard_of(self, ledger_id: int) -> bool:
        """Return whether a ledger has neither metadata nor a deletion; sees all changes before the call."""
        key = f"{LEDGERS_KEY}/{ledger_path(ledger_id)}"
        return self._store.get(key, latest=True) is None and not self.is_folded(ledger_id)

    def is_folded(self, ledger_id: int, *, latest: bool = True) -> bool:
        """Return whether a ledger was deleted so long ago that its tombstone was folded (DT3).

        Args:
            ledger_id: The ledger.
            latest: As for ``read_ledger``; False may save the round trip.
        """
        key = deleted_ids_key(ledger_id)
        node = self._store.get(key, latest=True) if latest else self._store.recall(key)
        if node is None:
            return False
        at, ranges = self._folded
        if at != (key, node.version):
            ranges = self._ranges_in(key, node)
            self._folded = (key, node.version), ranges
        return has_id(ranges, ledger_id)

    def _deleted_ids(self, key: str) -> tuple[list[IdRange], int | None]:
        """Return the ids in a value of ``DELETED_KEY``, and its version; no ids and None without a value."""
        node = self._store.get(key, latest=True)
        return ([], None) if node is None else (self._ranges_in(key, node), node.version)

    def _ranges_in(self, key: str, node: Node) -> list[IdRange]:
        """Decode a value of ``DELETED_KEY``."""
        try:
            payload = self._payload_of(ValueKind.DELETED_IDS, key, node.value)
            return decode_json(payload, decode_ranges, where=f"metadata key {key!r}")
        except UnknownEpochError:
            raise
        except (CorruptError, MetadataForgedError) as error:
            raise type(error)(f"{error}; {DELETED_IDS_REMEDY}") from error

    def watch_ledger(self, ledger_id: int, callback: Callable[[], None]) -> Watch:
        """Call ``callback`` after each change of a ledger's metadata, as ``MetadataStore.watch`` does."""
        return self._store.watch(f"{LEDGERS_KEY}/{ledger_path(ledger_id)}", callback)

    def describe(self, metadata: LedgerMetadata) -> bytes:
        """Return a ledger's description, encoded with the current key's MAC; see ``LedgerDescription.encode``."""
        return LedgerDescription.of(metadata).encode(None if self.keys is None else self.keys.key)

    def check_description(self, data: bytes, *, where: str) -> LedgerDescription:
        """Decode and verify a result of ``describe``, of now or of an earlier secret of the cluster.

        See ``LedgerDescription.decode``.
        """
        keys = self.keys
        return LedgerDescription.decode(data, None if keys is None else keys.of_descriptions, where=where)

    def _encoded(self, metadata: LedgerMetadata) -> tuple[str, bytes, bytes]:
        """Return a ledger's key, its encoded value, and the value's random token."""
        key = f"{LEDGERS_KEY}/{ledger_path(metadata.ledger_id)}"
        token = new_token()
        return key, self.encoded(ValueKind.LEDGER, key, token, metadata.encode()), token

    @overload
    def _ledger(self, key: str, ledger_id: int, node: Node) -> StoredLedger | None: ...

    @overload
    def _ledger(
        self, key: str, ledger_id: int, node: Node, ledger_type: str | None
    ) -> StoredLedger | OtherLedger | None: ...

    def _ledger(
        self, key: str, ledger_id: int, node: Node, ledger_type: str | None = None
    ) -> StoredLedger | OtherLedger | None:
        """Decode the value of a ledger's key, only in part if it is of another type; None for a tombstone."""
        kind, payload = self.decoded(key, node.value)
        if kind is ValueKind.DELETED:
            return None
        if kind is not ValueKind.LEDGER:
            raise CorruptError(f"metadata key {key!r}: kind {kind.name} where LEDGER belongs; restore it")
        if ledger_type is not None and type_marked(ledger_type) not in payload:
            named, found = decode_type(payload, where=f"metadata key {key!r}")
            if named == ledger_id and found != ledger_type:
                return OtherLedger(found, node.version)
        metadata = _metadata(key, payload)
        if metadata.ledger_id != ledger_id:
            raise CorruptError(f"metadata key {key!r} holds ledger {metadata.ledger_id}; restore it")
        return StoredLedger(metadata, node.version)


def _metadata(key: str, payload: bytes) -> LedgerMetadata:
    return LedgerMetadata.decode(payload, where=f"metadata key {key!r}")
