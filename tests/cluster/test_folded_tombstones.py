"""A deleted ledger whose tombstone was folded, and directories of bookies that still have its entries."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk import LedgerDeletedError, LedgerManager, rebuild_metadata
from pybk.manager.connect import open_cluster
from tests.cluster.inside import SECRET, inside

BOOKIES = 3


def write(client: LedgerManager) -> int:
    with client.create_ledger(password=b"p") as writer:
        writer.append(b"entry")
        return writer.ledger_id


def test_directories_that_were_put_back_do_not_bring_a_deleted_ledger_back(tmp_path: Path) -> None:
    """Nor do their bookies take the metadata for outdated, because no key is left of the ledger."""
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        deleted, kept = write(client), write(client)
    with open_cluster(cluster.url, SECRET, create=False)[0] as metadata:
        metadata.delete_ledger(deleted, metadata.read_ledger(deleted).version)
        page = metadata.append_deletions([deleted])
        for cookie in metadata.list_cookies():
            metadata.record_deletion_position(cookie.bookie, page)
        assert metadata.trim_deletions() == 1
        assert metadata.is_folded(deleted)
    directories = [tmp_path / f"bookie-{place}" for place in range(BOOKIES)]
    report = rebuild_metadata(cluster.url, directories, cluster_secret=SECRET, all_directories=True)
    assert (report.made, report.deleted) == ((), ())
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        with pytest.raises(LedgerDeletedError):
            client.open_ledger(deleted, password=b"p")
        with client.open_ledger(kept, password=b"p") as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
        assert list(client.list_ledgers()) == [kept]
