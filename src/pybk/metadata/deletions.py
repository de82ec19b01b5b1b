"""Pages of deleted ledgers, from which bookies learn which ledgers to drop, without a request for each.

Only a ledger's tombstone proves that it was deleted; a page is a hint to read it. The auditor gets new tombstones from
the feed of changes and appends their ids in *pages*, numbered from 1. The *head* has the number of the last valid page.
Each bookie keeps its *position*, the number of the page up to which it has dropped all deleted ledgers, and reads the
head once a minute. A page that all bookies have passed is removed, and the tombstones that it announced are *folded*
with it: their ids go to a value that keeps ranges of ids, and then their keys are removed.

A folded tombstone cannot make a bookie drop entries, so it is folded only if no bookie needs it:

- DT1: It is folded once each bookie that belongs to the cluster, running or not, has recorded that it has passed the
  page that announced it. A bookie leaves the cluster when it is removed for good, and no directory of that instance is
  started again.
- DT2: A bookie records that it has passed a page one look after it has read it, when it has no entries of the page's
  deleted ledgers. A bookie stores the first entry of a ledger only after a look-up that finds the metadata. A look-up
  that still found them began before the deletion, and was answered before the second look.
- DT3: The id is recorded before the key is removed. So a deleted ledger is known as deleted for ever: its id is not
  given again, metadata that are rebuilt do not bring it back, and a bookie whose directory was put back to an older
  state does not conclude from the missing key that the metadata are outdated. The entries that this bookie has of such
  a ledger are orphans.

To append means to create the page after the head's, and then to raise the head by compare-and-set:

- If the auditor stops between the two, the page exists and does not count. The next append finds it, raises the head to
  it, because a page only ever has ids of tombstones, and then appends its own page.
- If two auditors run at once, because the lease of one was lost, one of them creates the page or raises the head. The
  other finds the key or the version changed, and begins again from the new head. An id that was appended twice is
  dropped once.
- An auditor that was suspended may create a page whose number was used and removed since. The head is above it, so its
  compare-and-set is refused, no bookie reads that page, and it is removed with the next ones; the ids are appended
  again.

Numbers never start again, because the head stays. A new bookie reads the head and then checks all its ledgers once:
every ledger of the pages up to that number had its tombstone before.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final
from urllib.parse import unquote

from pybk.errors import (
    CorruptError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataVersionError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.ledger.ledger_metadata import INSTANCE_BYTES, Bookie
from pybk.metadata.authenticated_values import UnknownEpochError, ValueKind
from pybk.metadata.id_ranges import with_ids
from pybk.metadata.ledgers import DELETED_KEY, LEDGERS_KEY, Ledgers, deleted_ids_key, ledger_path
from pybk.metadata.registration import COOKIES_KEY, Bookies, BookieState, name_in_key
from pybk.values import decode_json, encode_json, from_base64, to_base64

logger = logging.getLogger(__name__)

DELETIONS_KEY: Final = "deletions"
DELETION_HEAD_KEY: Final = "deletion-head"
DELETION_POSITIONS_KEY: Final = "deletion-positions"

PAGE_LEDGERS_MAX: Final = 10_000
"""Ledgers in one page."""

FOLDED_MAX: Final = 1000
"""Tombstones that one call of ``trim_deletions`` folds; each is one change of the metadata store."""

DELETED_IDS: Final = 10_000
"""Ids that one value of folded tombstones covers."""

_DELETED_IDS_KEY: Final = re.compile(rf"{DELETED_KEY}/[0-9]{{3}}(/[0-9]{{4}}){{3}}")
_NUMBER_MAX: Final = (1 << 53) - 1
_DIGITS: Final = 16


class Deletions(Ledgers, Bookies):
    """The pages of deleted ledgers of a cluster. Threads: any.

    Every method may raise MetadataUnreachableError; and CorruptError, MetadataForgedError or UnsupportedFormatError if
    a value cannot be used.
    """

    # ---- the auditor's side --------------------------------------------------------------------------------------

    def begin_deletions(self) -> int:
        """Create the head unless it exists, and return its number. Bookies read pages from then on.

        Call it just before appending all tombstones of the cluster, because running bookies check their ledgers
        themselves only until the head exists.
        """
        while True:
            head = self._deletion_head()
            if head is not None:
                return head[0]
            with suppress(MetadataExistsError):
                self.create_value(ValueKind.DELETION_HEAD, DELETION_HEAD_KEY, encode_json({"last": 0}))
                return 0

    def append_deletions(self, ledger_ids: Sequence[int]) -> int:
        """Announce to bookies that ledgers have a tombstone, durably; the head of this module describes the races.

        Args:
            ledger_ids: Their ids, 1 to ``PAGE_LEDGERS_MAX``.

        Returns:
            The number of their page.

        Raises:
            UsageError: Too many or no ids are given.
        """
        if not 0 < len(ledger_ids) <= PAGE_LEDGERS_MAX:
            raise UsageError(f"{len(ledger_ids)} deleted ledgers; a page takes 1 to {PAGE_LEDGERS_MAX}: make several")
        for ledger_id in ledger_ids:
            ledger_path(ledger_id)
        payload = encode_json({"ledger_ids": sorted(set(ledger_ids))})
        self.begin_deletions()
        while True:
            head = self._deletion_head()
            if head is None:
                raise CorruptError(f"metadata key {DELETION_HEAD_KEY!r} was removed; nothing removes it: restore it")
            number, mine = head[0] + 1, True
            try:
                self.create_value(ValueKind.DELETIONS, _page_key(number), payload)
            except MetadataExistsError:
                mine = False  # of an auditor that was stopped, or is about to raise the head
            with suppress(MetadataVersionError):
                self._put(ValueKind.DELETION_HEAD, DELETION_HEAD_KEY, encode_json({"last": number}), head[1])
                if mine:
                    return number

    def oldest_deletion_position(self) -> int | None:
        """Return the page up to which every bookie that belongs to the cluster has dropped its deleted ledgers.

        Returns:
            The page; None if a bookie has recorded none, or if the cluster has no bookies.
        """
        oldest: int | None = None
        keys = [f"{COOKIES_KEY}/{name}" for name in self._store.children(COOKIES_KEY)]
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            # A cookie that cannot be read raises: its bookie may not have passed the page.
            cookie = None if node is None else self._cookie(key, node)
            if cookie is None or cookie.state is BookieState.REMOVED:
                continue
            position = self.read_deletion_position(cookie.bookie)
            if position is None:
                return None
            oldest = position if oldest is None else min(oldest, position)
        return oldest

    def trim_deletions(self) -> int:
        """Fold the tombstones of pages that all bookies have passed, and remove the pages (DT1).

        It may be stopped, and repeated at any time, also by two processes at once.

        If the value for folded tombstones is damaged, the pages with tombstones for it stay; the others are folded.

        Returns:
            The number of pages that were removed.

        Cost: Up to ``FOLDED_MAX`` changes; the next call does the rest.
        """
        oldest = self.oldest_deletion_position()
        removed, left = 0, FOLDED_MAX
        for name in self._store.children(DELETIONS_KEY) if oldest else ():
            if not name.isdecimal() or int(name) > (oldest or 0):
                continue
            key = f"{DELETIONS_KEY}/{name}"
            node = self._store.get(key)
            if node is None:
                continue
            folded, whole = self._fold(self._announced(key, node.value), left)
            left -= folded
            if left <= 0:
                break
            if not whole:
                continue
            with suppress(MetadataVersionError):  # another auditor has removed it
                self._delete(key, node.version)
                removed += 1
        return removed

    def _announced(self, key: str, value: bytes) -> list[int]:
        """Return the ledgers of a page; none if it is damaged, so that they stay until they are announced again."""
        try:
            payload = self._payload_of(ValueKind.DELETIONS, key, value)
            return decode_json(payload, _decode_page, where=f"metadata key {key!r}")
        except PybkError as error:
            logger.warning("the tombstones of a deletion page stay until they are announced again: %s", error)
            return []

    def _fold(self, ledger_ids: list[int], count: int) -> tuple[int, bool]:
        """Fold the tombstones of some ledgers (DT3).

        Args:
            ledger_ids: The ledgers, ascending.
            count: The most tombstones to fold.

        Returns:
            The number of folded ones, and False if others have to wait until a damaged value is repaired.
        """
        if self.feature_level < FeatureLevel.STREAMS:
            return 0, True  # an older pybk would take the metadata for outdated
        versions = self._tombstones(ledger_ids)
        folded, whole = 0, True
        for key, group in groupby(versions, deleted_ids_key):
            chosen = list(group)[: count - folded]
            if not chosen:
                break
            try:
                self._record_deleted(key, chosen)
            except (CorruptError, MetadataForgedError, UnsupportedFormatError) as error:
                logger.warning("%d tombstones are not folded: %s", len(chosen), error)
                whole = False
                continue
            for ledger_id in chosen:
                with suppress(MetadataVersionError):  # another auditor has removed it
                    self._delete(f"{LEDGERS_KEY}/{ledger_path(ledger_id)}", versions[ledger_id], reused=True)
            folded += len(chosen)
        return folded, whole

    def _record_deleted(self, key: str, ledger_ids: Sequence[int]) -> None:
        """Record durably that ledgers were deleted."""
        while True:
            ranges, version = self._deleted_ids(key)
            payload = encode_json({"ranges": with_ids(ranges, ledger_ids)})
            with suppress(MetadataExistsError, MetadataVersionError):  # another auditor records others
                if version is None:
                    self.create_value(ValueKind.DELETED_IDS, key, payload)
                else:
                    self._put(ValueKind.DELETED_IDS, key, payload, version)
                return

    def repair_deleted_ids(self, held: Collection[int] = ()) -> list[str]:
        """Replace damaged values of deleted ids, durably; return their keys.

        The ids of such a value are not known any more. From then on each of its ten thousand ids that has no key counts
        as deleted, so none is given again; the next ids that are given are above them.

        Args:
            held: Ledgers that bookies still have; they were not folded (DT1), although they have no key.

        Threads: Other clients may use the metadata meanwhile: they neither create nor fold ledgers of these ids before.
        """
        repaired = []
        for key in self._damaged_deleted_ids():
            node = self._store.get(key, latest=True)
            known = self._ids_with_keys(key)
            deleted = [each for each in _ids_of(key) if each not in known and each not in held]
            payload = encode_json({"ranges": with_ids((), deleted)})
            if node is None:
                continue
            with suppress(MetadataVersionError):  # another process has just made it again
                self._put(ValueKind.DELETED_IDS, key, payload, node.version)
            # An auditor may have been folding these when the value was damaged.
            while gone := known - self._ids_with_keys(key):
                self._record_deleted(key, sorted(gone))
                known -= gone
            if self.next_id() in _ids_of(key):
                self.raise_ids(_ids_of(key).stop)
            repaired.append(key)
        return repaired

    def _damaged_deleted_ids(self) -> list[str]:
        """Return the keys of the values of deleted ids that are damaged."""
        found = [key for key, _ in self._store.walk() if _DELETED_IDS_KEY.fullmatch(key)]
        return [key for key in found if self._is_damaged(key)]

    def _is_damaged(self, key: str) -> bool:
        """Return whether no process can read a value of deleted ids.

        Its header may name a secret, or have a format, that this process does not know. It is sound only if the cluster
        has such a secret, or a feature level with such a format.
        """
        try:
            self._deleted_ids(key)
            return False
        except UnknownEpochError as error:
            return self.keys is None or error.epoch not in self.keys.unknown
        except (CorruptError, MetadataForgedError, UnsupportedFormatError):
            self.refresh_keys()  # raises if this process lacks the cluster's secret, or does not know its level
            return True

    def _ids_with_keys(self, key: str) -> set[int]:
        """Return those ids of a value's range that have metadata, a tombstone, or a damaged value."""
        names = self._store.children(f"{LEDGERS_KEY}{key.removeprefix(DELETED_KEY)}")
        first = _ids_of(key).start
        return {first + int(name) for name in names if name.isdecimal()}

    def _tombstones(self, ledger_ids: Sequence[int]) -> dict[int, int]:
        """Return the ledgers among some that have a tombstone, in their order, with its version."""
        keys = [f"{LEDGERS_KEY}/{ledger_path(ledger_id)}" for ledger_id in ledger_ids]
        pairs = zip(ledger_ids, keys, self._store.get_many(keys), strict=True)
        return {
            ledger_id: node.version
            for ledger_id, key, node in pairs
            if node is not None and self._is_deleted(key, node)
        }

    # ---- the bookies' side ---------------------------------------------------------------------------------------

    def last_deletion_page(self) -> int | None:
        """Return the number of the last page, 0 before the first; None if no auditor has created the head.

        Cost: One read.
        """
        head = self._deletion_head()
        return None if head is None else head[0]

    def read_deletions(self, after: int, last: int) -> set[int]:
        """Return the ledgers of the pages above ``after`` up to ``last``, which may be deleted.

        Args:
            after: The number of the last page that was read.
            last: The result of ``last_deletion_page``.

        Raises:
            CorruptError: A page is missing, or is not a page.
        """
        found: set[int] = set()
        keys = [_page_key(number) for number in range(after + 1, last + 1)]
        for key, node in zip(keys, self._store.get_many(keys), strict=True):
            if node is None:
                raise CorruptError(f"metadata key {key!r} is missing; look at all ledgers instead")
            payload = self._payload_of(ValueKind.DELETIONS, key, node.value)
            found.update(decode_json(payload, _decode_page, where=f"metadata key {key!r}"))
        return found

    def deletion_proofs(self, ledger_ids: Sequence[int]) -> list[bytes | None]:
        """Return the proof in each ledger's tombstone, in their order; None for a ledger without a tombstone.

        A value that cannot be read is no tombstone, and is logged.

        Cost: As ``MetadataStore.get_many``.
        """
        keys = [f"{LEDGERS_KEY}/{ledger_path(ledger_id)}" for ledger_id in ledger_ids]
        return [
            None if node is None else self._proof_in(key, node.value)
            for key, node in zip(keys, self._store.get_many(keys), strict=True)
        ]

    def _proof_in(self, key: str, value: bytes) -> bytes | None:
        try:
            kind, payload = self.decoded(key, value)
            if kind is not ValueKind.DELETED:
                return None
            return decode_json(payload, lambda values: from_base64(values["proof"]), where=f"metadata key {key!r}")
        except PybkError as error:
            logger.warning("whether a ledger was deleted cannot be read: %s", error)
            return None

    def read_deletion_position(self, bookie: Bookie) -> int | None:
        """Return the page up to which a bookie has dropped its deleted ledgers; None if this instance recorded none."""
        key = _position_key(bookie.bookie_id)
        node = self._store.get(key, latest=True)
        if node is None:
            return None
        payload = self._payload_of(ValueKind.DELETION_POSITION, key, node.value)
        found, page = decode_json(payload, _decode_position, where=f"metadata key {key!r}")
        if found.bookie_id != unquote(key.rpartition("/")[2]):
            raise CorruptError(f"metadata key {key!r} holds the position of {found}; remove it")
        return page if found == bookie else None

    def record_deletion_position(self, bookie: Bookie, page: int) -> None:
        """Record that the bookie of this process has durably dropped all deleted ledgers of the pages up to one."""
        key = _position_key(bookie.bookie_id)
        payload = encode_json(
            {"bookie_id": bookie.bookie_id, "instance": to_base64(bookie.instance), "page": _number(page)}
        )
        while True:
            node = self._store.get(key, latest=True)
            with suppress(MetadataExistsError, MetadataVersionError):
                if node is None:
                    self.create_value(ValueKind.DELETION_POSITION, key, payload)
                else:
                    self._put(ValueKind.DELETION_POSITION, key, payload, node.version)
                return

    def _deletion_head(self) -> tuple[int, int] | None:
        """Return the number of the last page and the version of the head; None without a head."""
        node = self._store.get(DELETION_HEAD_KEY, latest=True)
        if node is None:
            return None
        payload = self._payload_of(ValueKind.DELETION_HEAD, DELETION_HEAD_KEY, node.value)
        where = f"metadata key {DELETION_HEAD_KEY!r}"
        return decode_json(payload, lambda values: _number(values["last"]), where=where), node.version


def _ids_of(key: str) -> range:
    """Return the ids that a value of ``DELETED_KEY`` covers."""
    first = int(key.removeprefix(DELETED_KEY).replace("/", "")) * DELETED_IDS
    return range(first, first + DELETED_IDS)


def _page_key(number: int) -> str:
    return f"{DELETIONS_KEY}/{number:0{_DIGITS}d}"


def _position_key(bookie_id: str) -> str:
    return f"{DELETION_POSITIONS_KEY}/{name_in_key(bookie_id)}"


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _NUMBER_MAX:
        raise ValueError(f"page {value!r} is not a whole number from 0 to {_NUMBER_MAX}")
    return value


def _decode_page(values: dict[str, Any]) -> list[int]:
    found = values["ledger_ids"]
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise ValueError("ledger_ids are not whole numbers")
    return found


def _decode_position(values: dict[str, Any]) -> tuple[Bookie, int]:
    bookie = Bookie(str(values["bookie_id"]), from_base64(values["instance"]))
    if len(bookie.instance) != INSTANCE_BYTES:
        raise ValueError(f"an instance of {len(bookie.instance)} bytes")
    return bookie, _number(values["page"])
