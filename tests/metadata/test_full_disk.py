"""A metadata store in LMDB takes deletes and changes on a disk with 0 bytes free, also after it was opened again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pybk import LedgerManager, Log, LogEnd
from pybk.metadata.lmdb_store import LmdbMetadataStore
from tests.cluster.inside import inside
from tests.full_device import filled
from tests.streams.test_real_full_disk import RECORD, free_bytes, new_device  # noqa: F401  # a fixture

VALUE = bytes(1000)


@pytest.mark.parametrize("reopens", [False, True])
def test_keys_are_changed_and_deleted_while_there_is_no_space(device: Path, *, reopens: bool) -> None:
    path = str(device / "metadata")
    store = LmdbMetadataStore(path)
    versions = {f"ledgers/{number}": store.create(f"ledgers/{number}", VALUE) for number in range(500)}
    with filled(device):
        if reopens:
            store.close()
            store = LmdbMetadataStore(path)
        assert free_bytes(device) == 0
        for key, version in versions.items():
            store.delete(key, store.put(key, VALUE[:100], version))
        assert store.get_many(list(versions)) == [None] * len(versions)
    store.close()


def test_ledgers_and_subscriptions_of_a_cluster_are_deleted_and_logs_truncated_on_a_full_disk(device: Path) -> None:
    with inside(device, count=1, secret=None) as cluster:
        client: LedgerManager = cluster.connect()
        quorums = (1, 1, 1)
        writers = [client.create_ledger(insecure=True, ensemble_size=1) for _ in range(20)]
        for writer in writers:
            writer.append(RECORD)
            writer.close()
        with (
            Log.open(client, "log", insecure=True, quorums=quorums) as log,
            log.writer() as appender,
            log.subscribe("all", start=LogEnd.EARLIEST) as subscription,
        ):
            for _ in range(5):
                appender.append_many([RECORD] * 10)
                appender.roll()
            with filled(device):
                for writer in writers:
                    client.delete_ledger(writer.ledger_id)
                subscription.delete()
                log.truncate(50)
                assert log.first_seq() == 50
                assert log.subscriptions() == []
            assert not {writer.ledger_id for writer in writers} & set(client.list_ledgers())
