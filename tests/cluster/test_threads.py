"""Bookies and clients that get no more threads from the operating system serve on."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from pybk.client.backend import ClusterBackend
from pybk.flags import StorageHint
from tests.cluster.inside import inside
from tests.internals import cluster_backend_of
from tests.test_workers import no_more_threads

PASSWORD = b"a password of the tests"


def test_without_more_threads_a_bookie_looks_ledgers_up_and_moves_them_and_a_client_changes_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=2) as cluster:
        writing, recovering = cluster.connect(), cluster.connect()
        with monkeypatch.context() as short:
            for name in "pybk-metadata", "pybk-bookie-lookup", "pybk-bookie-move":
                no_more_threads(short, name)
            writers = [writing.create_ledger(password=PASSWORD, ensemble_size=2, write_quorum=2) for _ in range(8)]
            for writer in writers:
                writer.append(b"an entry")
            for writer in writers:  # a bookie that is fenced asks the metadata store for the ledger
                with recovering.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
                    assert reader.last_add_confirmed == 0
            moved = writers[0].ledger_id
            recovering.move_ledger(moved, StorageHint.HDD, password=PASSWORD)
            assert recovering.ledger_metadata(moved).tier is StorageHint.HDD
            assert [bookie.health().state for bookie in cluster.bookies] == ["ok", "ok"]


def test_a_client_says_how_it_is_while_other_threads_open_ledgers(tmp_path: Path) -> None:
    with inside(tmp_path, count=1) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        with client.create_ledger(password=PASSWORD, ensemble_size=1, write_quorum=1, ack_quorum=1) as writer:
            metadata = writer.metadata
        ended = threading.Event()

        def hold() -> None:
            held = []
            while not ended.is_set():
                held.append(backend.hold(metadata, 1))
                if len(held) > 500:
                    held.clear()

        threads = [threading.Thread(target=hold) for _ in range(2)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for _ in range(1000):
                assert client.health().outstanding_bytes == 0
        finally:
            ended.set()
            sys.setswitchinterval(interval)
            for thread in threads:
                thread.join()
