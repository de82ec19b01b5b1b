"""Commits to catalog and index: first the catalog, then the index, whose mark names the valid end of the catalog.

All changes of entries' locations pass through this module, so one order holds for all of them: data are synced before
``commit`` is called, and old locations are freed after it has returned.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from pybk.errors import PybkError, StorageFailedError
from pybk.metrics import Gauge, MetricKey
from pybk.storage.format.catalog import (
    CATALOG_FORMATS,
    CatalogWriter,
    catalog_path,
    fits_in_spare,
    has_spare,
    remove_catalog,
    rewrite_is_due,
    spare_path,
)
from pybk.storage.format.cookie import format_of
from pybk.storage.format.index_rows import CheckpointMark, EncodedLedger, FileRow, LedgerRow, NamedRow
from pybk.storage.io.failures import is_refused, undoing
from pybk.storage.volumes import tier_of_kind

if TYPE_CHECKING:
    from pybk.storage.format.cookie import Cookie
    from pybk.storage.index.index import Index, IndexUpdate
    from pybk.storage.volumes import Volumes

logger = logging.getLogger(__name__)

RENEWED_BELOW_BYTES: Final = 256 << 10
"""A catalog that can grow by less is written anew in the spare file; enough for the rows of one checkpoint."""

Change = Callable[["IndexUpdate"], Counter[int]]
"""Makes a change in the index, and returns by how much it changes the live bytes of each file."""


class _Changed(NamedTuple):
    """The changes of a commit besides the locations of entries; see ``CatalogAndIndex.commit``."""

    rows: Iterable[LedgerRow]
    dropped: Iterable[int]
    added: list[FileRow]
    gone: list[int]
    named: list[NamedRow]


class CatalogAndIndex:
    """The durable state of a store's ledgers and files, besides the log.

    Threads: one at a time.

    Args:
        volumes: The store's directories.
        index: The index.
        mark: The index's mark.
        catalog: The catalog that the mark names; if it is lost or unusable, None, and ``begin`` makes another.
        cookie: The store's main cookie.

    Attributes:
        cookie: The store's main cookie; a catalog that is begun repeats its salt, cost and level.
        mark: The mark as of the last commit.
        files: All files of the store that the index knows, by id; so a job need not read their rows again.
        live: Bytes of the records that each file still holds, by file id.
    """

    def __init__(
        self, volumes: Volumes, index: Index, mark: CheckpointMark, catalog: CatalogWriter | None, cookie: Cookie
    ) -> None:
        self._volumes = volumes
        self._index = index
        self._catalog = catalog
        self.cookie = cookie
        self.mark = mark
        uses = index.checked_uses()
        self.files = {file_id: use.row for file_id, use in uses.items()}
        self.live = Counter({file_id: use.live_bytes for file_id, use in uses.items()})

    @classmethod
    def open(cls, volumes: Volumes, index: Index, mark: CheckpointMark, cookie: Cookie) -> CatalogAndIndex:
        """Open the catalog at the end that the mark names, without changing anything.

        Call ``begin`` once the store was checked.

        Raises:
            CorruptError: The catalog does not fit the mark, or the index is damaged.
            OSError: The catalog cannot be read.
        """
        path = catalog_path(volumes.root, mark.catalog_file_id)
        catalog = CatalogWriter.examine(volumes.fs, path, cookie.store_id, mark.catalog_file_id, mark.catalog_bytes)
        try:
            return cls(volumes, index, mark, catalog, cookie)
        except BaseException:
            catalog.close()
            raise

    def gauges(self) -> list[Gauge]:
        """Return the bytes of records that each tier has, and the further bytes that its files take. Threads: any."""
        found: Counter[tuple[str, str]] = Counter()
        live = dict(self.live)  # copied in one step, because commits change both
        for file_id, row in list(self.files.items()):
            found[row.tier, "live"] += live.get(file_id, 0)
            if not tier_of_kind(row.kind).uses_environments:
                found[row.tier, "dead"] += max(0, row.bytes - live.get(file_id, 0))
        return [
            (MetricKey("tier_bytes", tier=tier, labels=(("kind", kind),)), size) for (tier, kind), size in found.items()
        ]

    def begin(self) -> None:
        """Truncate the catalog durably at the mark, after an interrupted commit, or make a lost catalog again.

        Call it once the store was checked, and before any file is removed that the interrupted commit may name.
        """
        if self._catalog is not None:
            self._catalog.clear()
        else:
            self.commit(self.mark, lambda update: Counter())

    def reserve(self, nbytes: int) -> None:
        """Allocate space for the catalog to grow by ``nbytes`` and more; OSError if there is too little."""
        if self._catalog is not None:
            self._catalog.reserve(self._volumes.fs, nbytes)

    def free_bytes(self) -> int:
        """Return the bytes by which the catalog can grow."""
        reserved = 0 if self._catalog is None else self._catalog.reserved_bytes(self._volumes.fs)
        return reserved + self._volumes.fs.free_bytes(self._volumes.root)

    def renew_in_spare(self) -> None:
        """Begin a new catalog in the spare file if the present one can hardly grow; do nothing if it does not fit.

        The present one becomes the spare file. So checkpoints need no free space, as many as there may be.

        Raises:
            PybkError, OSError: As ``commit``.
        """
        volumes, catalog = self._volumes, self._catalog
        if catalog is None or self.free_bytes() >= RENEWED_BELOW_BYTES or not has_spare(volumes.fs, volumes.root):
            return
        named_bytes = sum(len(row.value or b"") + len(row.name) for row in self._index.all_named())
        if fits_in_spare(self._index.totals(), named_bytes):
            self.commit(self.mark, lambda update: Counter(), in_spare=True)

    def close(self) -> None:
        """Close the catalog."""
        if self._catalog is not None:
            self._catalog.close()

    def commit(
        self,
        mark: CheckpointMark,
        change: Change,
        *,
        rows: Iterable[LedgerRow] = (),
        dropped: Iterable[int] = (),
        added: Iterable[FileRow] = (),
        gone: Iterable[int] = (),
        named: Iterable[NamedRow] = (),
        in_spare: bool = False,
    ) -> None:
        """Make a change durable, in the catalog and then in the index.

        Args:
            mark: The new mark; this call sets its fields about the catalog.
            change: Changes the index.
            rows: Ledgers that are new or changed.
            dropped: Deleted ledgers.
            added: New files; cold segments among them were made for this change.
            gone: Files that are removed from the store.
            named: Named records that are new, changed or, if they have no value, deleted.
            in_spare: Begin a new catalog in the spare file, regardless of the length of the present one.

        Raises:
            StorageFullError, CorruptError: Nothing was changed, and the added cold segments were removed.
            StorageFailedError, OSError: The change may have been made; the store must be closed.
        """
        changed = _Changed(rows, dropped, list(added), list(gone), list(named))
        before = self._catalog
        try:
            catalog, mark = self._write_catalog(changed, mark, in_spare=in_spare)
            try:
                counts = self._change_index(mark, change, changed)
            except StorageFailedError:
                raise
            except PybkError:
                self._take_back(catalog)
                raise
        except StorageFailedError:
            raise
        except (PybkError, OSError) as error:
            if isinstance(error, PybkError) or is_refused(error):
                self._discard(changed.added)
            raise
        self.mark = mark
        self._catalog = catalog
        self.files.update((row.file_id, row) for row in changed.added)
        for file_id in changed.gone:
            self.files.pop(file_id, None)
            self.live.pop(file_id, None)
        self.live.update(counts)
        if before is not None and catalog is not before:
            before.close()
            try:
                remove_catalog(self._volumes.fs, before.path)
            except OSError as error:
                if not is_refused(error):
                    raise
                # The index already names the new catalog: the change was made, so this error is not a refusal.
                logger.warning("%s is not needed any more, and removed by the next open: %s", before.path, error)

    def _change_index(self, mark: CheckpointMark, change: Change, changed: _Changed) -> Counter[int]:
        with self._index.update() as update:
            counts = change(update)
            for row in changed.added:
                update.put_file(row)
            for file_id in changed.gone:
                update.drop_file(file_id)
            for named in changed.named:
                update.put_named(named)
            update.put_mark(mark)
        return counts

    def _write_catalog(
        self, changed: _Changed, mark: CheckpointMark, *, in_spare: bool
    ) -> tuple[CatalogWriter, CheckpointMark]:
        """Append to the catalog, or begin a new one if most of it is outdated; return it and its mark."""
        catalog = self._catalog
        if (
            in_spare
            or catalog is None
            or catalog.format != format_of(self.cookie, CATALOG_FORMATS)
            or (self._fits_anew(catalog) and rewrite_is_due(catalog.length, self._index.totals()))
        ):
            return self._begin_catalog(changed, mark, in_spare=in_spare)
        try:
            length = catalog.append(
                changed.rows,
                changed.dropped,
                mark,
                self._files(changed),
                changed=changed.added,
                gone=changed.gone,
                named=changed.named,
            )
        except OSError as error:
            if is_refused(error):
                catalog.take_back()
            raise
        return catalog, mark._replace(catalog_bytes=length)

    def _fits_anew(self, catalog: CatalogWriter) -> bool:
        """Return whether there is space for a catalog next to the present one, which takes up to half of its bytes."""
        return self._volumes.fs.free_bytes(self._volumes.root) > catalog.length

    def _begin_catalog(
        self, changed: _Changed, mark: CheckpointMark, *, in_spare: bool
    ) -> tuple[CatalogWriter, CheckpointMark]:
        volumes = self._volumes
        file_id = volumes.new_id()
        path = catalog_path(volumes.root, file_id)
        mark = mark._replace(catalog_file_id=file_id, next_file_id=volumes.next_file_id)
        files = list(self._files(changed))
        named = {row.name: row for row in (*self._index.all_named(), *changed.named)}
        kept = [row for row in named.values() if row.value is not None]
        spare = spare_path(volumes.root) if in_spare else None
        try:
            catalog = CatalogWriter.create(
                volumes.fs, path, self.cookie.store_id, file_id, cookie=self.cookie, spare=spare
            )
            try:
                ledgers = self._ledgers(changed.rows, changed.dropped)
                length = catalog.append(ledgers, (), mark, files, changed=files, named=kept)
            except BaseException:
                catalog.close()
                raise
        except OSError as error:
            with undoing(error):
                if volumes.fs.exists(path):
                    remove_catalog(volumes.fs, path)
            raise
        return catalog, mark._replace(catalog_bytes=length)

    def _files(self, changed: _Changed) -> Iterator[FileRow]:
        """Yield the rows of all files after the change, by ascending id."""
        files = dict(self.files)
        files.update((row.file_id, row) for row in changed.added)
        for file_id in changed.gone:
            del files[file_id]
        yield from (files[file_id] for file_id in sorted(files))

    def _ledgers(self, rows: Iterable[LedgerRow], dropped: Iterable[int]) -> Iterator[LedgerRow | EncodedLedger]:
        """Yield all ledgers after the change; unchanged ones in their stored encoding."""
        changed = {row.metadata.ledger_id: row for row in rows}
        gone = set(dropped)
        for row in self._index.encoded_ledgers():
            if row.ledger_id not in gone:
                yield changed.pop(row.ledger_id, row)
        yield from changed.values()

    def _take_back(self, catalog: CatalogWriter) -> None:
        """Revert in the catalog a change that the index has refused."""
        if catalog is self._catalog:
            catalog.take_back()
        else:
            catalog.close()
            remove_catalog(self._volumes.fs, catalog.path)

    def _discard(self, added: list[FileRow]) -> None:
        for row in added:
            if tier_of_kind(row.kind).is_written_by_moves:
                self._volumes.drop(row.file_id)
