"""Bookies by name and by what they say of themselves: which are asked for copies, and which get new ledgers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pybk.bookie.server import BookieServer
from pybk.client import membership
from pybk.client.backend import ClusterBackend
from pybk.errors import NotEnoughBookiesError, UsageError
from pybk.metadata.registration import BookieRegistration
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of
from tests.waiting import WAIT_S


def service_of(cluster: Inside, place: int) -> BookieServer:
    """Return a bookie of the cluster."""
    backend = cluster_backend_of(cluster.bookies[place])
    assert isinstance(backend, ClusterBackend)
    assert isinstance(backend.bookie, BookieServer)
    return backend.bookie


def test_a_bookie_that_is_not_known_cannot_be_replicated(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        with client.create_ledger(ensemble_size=2, write_quorum=2, insecure=True) as writer:
            writer.append(b"x")
        with pytest.raises(UsageError, match=r"called 'nosuch'; there are bookie-0, bookie-1, bookie-2$"):
            client.replicate("nosuch")
        assert client.replicate("bookie-0").left == ()
        cluster.bookies[1].close()
        assert client.replicate("bookie-1").ledgers >= 0, "a bookie that is away is known by its cookie"


def test_no_new_ledger_goes_to_a_bookie_that_became_read_only_a_second_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        client.create_ledger(insecure=True).close()
        full = service_of(cluster, 2)
        registration = full.registration

        def read_only() -> BookieRegistration:
            return replace(registration(), read_only=True)

        monkeypatch.setattr(full, "registration", read_only)
        assert full.registered is not None
        full.registered.update(read_only())  # no watch reports it
        backend.membership.seen_ns -= membership.FRESH_NS
        for _ in range(5):
            with client.create_ledger(insecure=True) as writer:
                ensemble = writer.metadata.fragments[0].ensemble
            assert full.bookie not in ensemble


def test_ledgers_that_are_created_within_a_second_read_the_registrations_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        monkeypatch.setattr(membership, "FRESH_NS", int(WAIT_S * 1e9))
        client.create_ledger(insecure=True).close()
        reads: list[None] = []
        refresh = backend.membership.refresh

        def read() -> None:
            reads.append(None)
            refresh()

        monkeypatch.setattr(backend.membership, "refresh", read)
        for _ in range(3):
            client.create_ledger(insecure=True).close()
        assert reads == []
        with pytest.raises(NotEnoughBookiesError):
            client.create_ledger(insecure=True, ensemble_size=4, write_quorum=2)
        assert len(reads) == 1, "who may have come meanwhile is looked for"
