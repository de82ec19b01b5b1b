"""Makes the golden index and catalog; run it only when a format changes: ``python tests/golden/make_index.py``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pybk.flags import LedgerType, StorageHint
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.storage.format.catalog import CatalogWriter
from pybk.storage.format.index_rows import CheckpointMark, FileRow, LedgerRow
from pybk.storage.format.log_file import RunLocations, location_dtype
from pybk.storage.index.index import Index
from pybk.storage.io.filesystem import FileSystem, OsFileSystem
from pybk.storage.io.lmdb_environment import Environment, LmdbEnvironment

HERE = Path(__file__).parent
STORE_ID = bytes(range(16))
CATALOG_ID = 5
CATALOG = HERE / "catalog-0000000000000005"

FILES = [
    FileRow(2, "log", "nvme", 0, 1 << 20),
    FileRow(3, "entries", "ssd", 0, 0),
    FileRow(9, "cold", "hdd", 1, 123_456),
]
MARK = CheckpointMark(
    store_id=STORE_ID.hex(),
    first_log_file_id=4,
    next_lsn=1001,
    durable_lsn=1000,
    next_file_id=10,
    next_ledger_id=8,
    next_creation_sequence=6,
    catalog_file_id=CATALOG_ID,
    catalog_bytes=16_384,
)


def ledger_row(ledger_id: int, last_entry_id: int, *, version: int = 1) -> LedgerRow:
    """Return the row of a ledger that is always the same."""
    metadata = LedgerMetadata(
        ledger_id=ledger_id,
        state=LedgerState.CLOSED,
        ledger_type=LedgerType("orders"),
        storage_hints=frozenset({StorageHint.NVME}),
        digest_type=DigestType.HMAC_SHA256,
        last_entry_id=last_entry_id,
        length=100 * (last_entry_id + 1),
        creation_time_ns=1_700_000_000_000_000_000,
        creation_sequence=ledger_id,
        custom_metadata={"app": b"shop"},
        tier=StorageHint.NVME,
        key_salt=bytes(range(16)),
        verifier=bytes(range(32)),
        version=version,
    )
    return LedgerRow(metadata, last_entry_id, last_entry_id, 100 * (last_entry_id + 1))


def locations_of(*runs: tuple[int, ...]) -> RunLocations:
    """Return runs given whole, or as first entry, count, file and offset, with 100 body bytes for each entry."""
    whole = [run if len(run) == 7 else (run[0], run[1], 1, run[3], run[2], 100 * run[1], 0) for run in runs]
    return np.array(whole, location_dtype())


def made_index(environment: Environment) -> None:
    """Make an index of three ledgers and three files."""
    with Index(environment).update() as update:
        for row in FILES:
            update.put_file(row)
        for ledger_id, runs in (
            (1, locations_of((0, 4, 2, 0), (4, 2, 2, 1024), (6, 1, 3, 0))),
            (4, locations_of((0, 3, 2, 2048))),
            (7, locations_of()),
        ):
            update.put_ledger(ledger_row(ledger_id, sum(runs["count"].tolist()) - 1))
            update.append_locations(ledger_id, runs)
        update.put_mark(MARK)


def made_catalog(fs: FileSystem, path: str) -> list[int]:
    """Make a catalog of three checkpoints; return where each ends, the header first."""
    writer = CatalogWriter.create(fs, path, STORE_ID, CATALOG_ID)
    ends = [
        writer.length,
        writer.append([ledger_row(1, 3), ledger_row(2, 0)], [], MARK._replace(next_lsn=10), FILES[:1]),
        writer.append([ledger_row(1, 6, version=2), ledger_row(4, 2)], [2, 3], MARK._replace(next_lsn=20), FILES[:2]),
        writer.append([ledger_row(7, -1)], [], MARK, FILES),
    ]
    writer.close()
    return ends


def main() -> None:
    """Write the golden files anew."""
    scratch = HERE / "scratch"
    scratch.mkdir()
    environment = LmdbEnvironment(str(scratch))
    made_index(environment)
    with environment.read() as transaction:
        rows = {key.hex(): value.hex() for key, value in transaction.items(b"\0", b"\xff")}
    environment.close()
    for path in scratch.iterdir():
        path.unlink()
    scratch.rmdir()
    (HERE / "index.json").write_text(json.dumps(rows, indent=0) + "\n")
    CATALOG.unlink(missing_ok=True)
    made_catalog(OsFileSystem(), str(CATALOG))


if __name__ == "__main__":
    main()
