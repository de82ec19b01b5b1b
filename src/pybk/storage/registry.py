"""Catalog and index, changed together: the catalog first, then the index, whose mark says how far the catalog counts.

Whatever says where entries lie goes through here, so the order holds everywhere: data are synced before ``commit`` is
called, and old places are dropped after it has returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from pybk.errors import PybkError, StorageFailedError
from pybk.storage.catalog import CatalogWriter, rewrite_is_due
from pybk.storage.creation import catalog_path
from pybk.storage.failures import is_full, undoing
from pybk.storage.index_rows import FileRow, LedgerRow, Mark
from pybk.storage.volumes import COLD

if TYPE_CHECKING:
    from pybk.storage.index import Index
    from pybk.storage.index_update import IndexUpdate
    from pybk.storage.volumes import Volumes

Change = Callable[["IndexUpdate"], Counter[int]]
"""Makes a change in the index, and returns what it does to the live bytes of each file."""


class Registry:
    """What a store knows durably of its ledgers and files, besides the log.

    Threads: one at a time.

    Args:
        volumes: The store's directories.
        index: The index.
        mark: The index's mark.
        catalog: The catalog that the mark names.
        store_id: The 16 bytes of the store.

    Attributes:
        mark: The mark as of the last commit.
        live: Bytes of the records that each file still holds, by file id.
    """

    def __init__(self, volumes: Volumes, index: Index, mark: Mark, catalog: CatalogWriter, store_id: bytes) -> None:
        self._volumes = volumes
        self._index = index
        self._catalog = catalog
        self._store_id = store_id
        self.mark = mark
        self.live = Counter(index.file_bytes_live())

    @classmethod
    def open(cls, volumes: Volumes, index: Index, mark: Mark, store_id: bytes) -> Registry:
        """Go on where the mark says that the catalog ends; what an interrupted change left beyond is durably gone.

        Call it before anything is removed that such a change might name.

        Raises:
            CorruptError: The catalog does not fit the mark, or the index is damaged.
            OSError: The catalog cannot be read or written.
        """
        path = catalog_path(volumes.root, mark.catalog_file_id)
        catalog = CatalogWriter.resume(volumes.fs, path, store_id, mark.catalog_file_id, mark.catalog_bytes)
        try:
            return cls(volumes, index, mark, catalog, store_id)
        except BaseException:
            catalog.close()
            raise

    def close(self) -> None:
        """Close the catalog."""
        self._catalog.close()

    def commit(
        self,
        mark: Mark,
        change: Change,
        *,
        rows: Iterable[LedgerRow] = (),
        dropped: Iterable[int] = (),
        added: Iterable[FileRow] = (),
        gone: Iterable[int] = (),
    ) -> None:
        """Make a change durable, in the catalog and then in the index.

        Args:
            mark: The mark from then on; what it says of the catalog is filled in here.
            change: Changes the index.
            rows: Ledgers that are new or changed.
            dropped: Ledgers that are no more.
            added: Files that are part of the store from now on; cold segments among them were made for this change.
            gone: Files that are part of it no more.

        Raises:
            StorageFullError, CorruptError: Nothing was changed, and the cold segments that were added are gone.
            StorageFailedError, OSError: It may have happened; the store must be closed.
        """
        added = list(added)
        files = self._index.files()
        files.update((row.file_id, row) for row in added)
        for file_id in gone:
            del files[file_id]
        before = self._catalog
        try:
            catalog, mark = self._write_catalog(rows, dropped, mark, files.values())
            try:
                counts = self._change_index(mark, change, added, gone)
            except StorageFailedError:
                raise
            except PybkError:
                self._take_back(catalog)
                raise
        except StorageFailedError:
            raise
        except (PybkError, OSError) as error:
            if isinstance(error, PybkError) or is_full(error):
                self._discard(added)
            raise
        self.mark = mark
        self._catalog = catalog
        self.live.update(counts)
        if catalog is not before:
            before.close()
            self._volumes.fs.unlink(before.path)

    def _change_index(self, mark: Mark, change: Change, added: list[FileRow], gone: Iterable[int]) -> Counter[int]:
        with self._index.update() as update:
            counts = change(update)
            for row in added:
                update.put_file(row)
            for file_id in gone:
                update.drop_file(file_id)
            update.put_mark(mark)
        return counts

    def _write_catalog(
        self, rows: Iterable[LedgerRow], dropped: Iterable[int], mark: Mark, files: Iterable[FileRow]
    ) -> tuple[CatalogWriter, Mark]:
        """Append to the catalog, or begin a new one when most of it is history; return it, and the mark naming it."""
        if rewrite_is_due(self._catalog.length, self._index.totals()):
            return self._begin_catalog(rows, dropped, mark, files)
        try:
            length = self._catalog.append(rows, dropped, mark, files)
        except OSError as error:
            if is_full(error):
                self._catalog.take_back()
            raise
        return self._catalog, mark._replace(catalog_bytes=length)

    def _begin_catalog(
        self, rows: Iterable[LedgerRow], dropped: Iterable[int], mark: Mark, files: Iterable[FileRow]
    ) -> tuple[CatalogWriter, Mark]:
        volumes = self._volumes
        file_id = volumes.new_id()
        path = catalog_path(volumes.root, file_id)
        mark = mark._replace(catalog_file_id=file_id, next_file_id=volumes.next_file_id)
        try:
            catalog = CatalogWriter.create(volumes.fs, path, self._store_id, file_id)
            try:
                length = catalog.append(self._ledgers(rows, dropped), (), mark, files)
            except BaseException:
                catalog.close()
                raise
        except OSError as error:
            with undoing(error):
                if volumes.fs.exists(path):
                    volumes.fs.unlink(path)
            raise
        return catalog, mark._replace(catalog_bytes=length)

    def _ledgers(self, rows: Iterable[LedgerRow], dropped: Iterable[int]) -> Iterator[LedgerRow]:
        """Yield all ledgers as they will be."""
        changed = {row.metadata.ledger_id: row for row in rows}
        gone = set(dropped)
        for row in self._index.ledgers():
            if row.metadata.ledger_id not in gone:
                yield changed.pop(row.metadata.ledger_id, row)
        yield from changed.values()

    def _take_back(self, catalog: CatalogWriter) -> None:
        """Unsay in the catalog what the index did not take."""
        if catalog is self._catalog:
            catalog.take_back()
        else:
            catalog.close()
            self._volumes.fs.unlink(catalog.path)

    def _discard(self, added: list[FileRow]) -> None:
        for row in added:
            if row.kind == COLD:
                self._volumes.drop(row.file_id)
