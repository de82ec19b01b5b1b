"""The SSD tier: one LMDB environment in each of its directories, a record a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.storage.format.entries_mark import read_entries_mark, write_entries_mark
from pybk.storage.format.index_rows import FileRow, entries_key
from pybk.storage.format.record import RunLocations, encode_entries, encode_entries_header
from pybk.storage.tiers.tier import Run, Tier, TierStore, TierWriter
from pybk.storage.volumes import ENTRIES

if TYPE_CHECKING:
    from pybk.config import StoreConfig
    from pybk.storage.io.lmdb_environment import WriteTransaction

_TRANSACTION_BYTES: Final = 16 << 20


class LmdbTier(Tier):
    """LMDB environments. They are made with the store; records are freed by deleting their keys."""

    kind: ClassVar[str] = ENTRIES
    hints: ClassVar[frozenset[StorageHint]] = frozenset({StorageHint.SSD})
    files_are_freed_whole: ClassVar[bool] = False

    def block_bytes(self, config: StoreConfig) -> int:
        """Return the entry bytes of a record: a point read copies a whole record."""
        return config.ssd_block_bytes

    def size_is_known(self, hint: StorageHint, config: StoreConfig) -> bool:
        """Return False: LMDB may have free pages to use again."""
        return False

    def writer(self, store: TierStore, hint: StorageHint) -> TierWriter:
        """Return a writer that spreads ledgers over the environments."""
        return _RowsWriter(store)

    def beyond_end(self, runs: RunLocations, row: FileRow) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return False for each: rows have no offset, and ``FileRow.bytes`` counts transactions here."""
        return np.zeros(len(runs), np.bool_)


class _RowsWriter(TierWriter):
    """Puts records in transactions of 16 MiB."""

    def __init__(self, store: TierStore) -> None:
        self._store = store
        self._environments = sorted(store.entries)
        self._puts: list[tuple[bytes, bytes]] = []
        self._put_bytes = 0
        self._changed: dict[int, FileRow] = {}

    def add(self, ledger_id: int, first: int, sizes: list[int], parts: Sequence[bytes | memoryview]) -> Run:
        """Put a record."""
        header, body = encode_entries(ledger_id, first, sizes, parts)
        return self._put(ledger_id, first, len(sizes), header, body)

    def add_body(self, ledger_id: int, first: int, count: int, body: bytes) -> Run:
        """Put a record as it is."""
        return self._put(ledger_id, first, count, encode_entries_header(ledger_id, first, count, body), body)

    def _put(self, ledger_id: int, first: int, count: int, header: bytes, body: bytes) -> Run:
        file_id = self._environments[ledger_id % len(self._environments)]
        self._puts.append((entries_key(ledger_id, first), header + body))
        self._put_bytes += len(body)
        if self._put_bytes >= _TRANSACTION_BYTES:
            self._flush()
        return first, count, 1, 0, file_id, len(body), 0

    def _flush(self) -> None:
        for number, file_id in enumerate(self._environments):
            mine = [(key, value) for key, value in self._puts if _ledger_of(key) % len(self._environments) == number]
            if mine:
                with self._store.entries[file_id].write() as transaction:
                    for key, value in mine:
                        transaction.put(key, value)
                    if self._store.feature_level > FeatureLevel.BASE:
                        self._count_puts(file_id, transaction)
        self._puts = []
        self._put_bytes = 0

    def _count_puts(self, file_id: int, transaction: WriteTransaction) -> None:
        """Count this transaction in the environment, and have the index rely on it by the file's row."""
        mark = read_entries_mark(transaction)
        mark = mark._replace(puts=mark.puts + 1)
        write_entries_mark(transaction, mark)
        self._changed[file_id] = self._store.volumes.rows[file_id]._replace(bytes=mark.puts)

    def finish(self) -> list[FileRow]:
        """Commit what is left; return the rows of the environments that count it."""
        if self._puts:
            self._flush()
        return list(self._changed.values())

    def abort(self) -> None:
        """Do nothing: records that were put stay there unused until they are put again."""


def _ledger_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big") ^ (1 << 63)
