"""A bookie registers an address that leads to it, or its error names the one that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybk.bookie import advertising
from pybk.bookie.advertising import advertised
from pybk.config import StoreConfig
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.transport.codec import Ping
from tests.cluster.inside import SECRET, make_cluster
from tests.internals import cluster_backend_of, service_of
from tests.storage.real_store import QUICK


def bookie(tmp_path: Path, listen: str, name: str = "one", **options: Any) -> LedgerManager:
    return LedgerManager.open(
        tmp_path / name,
        listen=listen,
        metadata=make_cluster(tmp_path / "cluster"),
        cluster_secret=SECRET,
        bookie_id=name,
        config=StoreConfig(**QUICK),
        **options,
    )


@pytest.mark.parametrize("listen", ["tcp://0.0.0.0:*", "tcp://*:*"])
def test_a_bookie_on_every_address_is_refused_without_an_advertised_one(tmp_path: Path, listen: str) -> None:
    with pytest.raises(UsageError, match=r"stands for every address .*advertise='tcp://HOST:[0-9]+'"):
        bookie(tmp_path, listen)
    with pytest.raises(UsageError, match="stands for every address"):
        bookie(tmp_path, "tcp://127.0.0.1:*", "other", advertise=listen)
    assert not (tmp_path / "other").exists(), "nothing was made"
    with bookie(tmp_path, listen, advertise="tcp://127.0.0.1:*") as manager:
        service = service_of(manager)
        (port,) = {address.rpartition(":")[2] for address in service.server.addresses}
        assert service.addresses == (f"tcp://127.0.0.1:{port}",)
        (found,) = cluster_backend_of(manager).membership.metadata.list_bookies()
        assert found.addresses == service.addresses
        writer = manager.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1, insecure=True)
        assert writer.append(b"reached") == 0
        writer.close()


def test_an_address_that_does_not_lead_to_the_bookie_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pings: list[Ping] = []

    def counted() -> Ping:
        pings.append(Ping())
        return pings[-1]

    with monkeypatch.context() as patch:
        patch.setattr(advertising, "REACH_SECONDS", 0.5)
        patch.setattr(advertising, "Ping", counted)
        with pytest.raises(UsageError, match=r"cannot be reached at tcp://127\.0\.0\.1:1, "):
            bookie(tmp_path, "tcp://127.0.0.1:*", advertise="tcp://127.0.0.1:1")
    assert 1 <= len(pings) <= 10, "it waits before it tries again"
    with bookie(tmp_path, "tcp://127.0.0.1:*") as manager:
        registered = cluster_backend_of(manager).membership.metadata.list_bookies()
        assert [found.bookie.bookie_id for found in registered] == ["one"]


def test_addresses_that_other_hosts_cannot_use_are_refused() -> None:
    bound = ("tcp://127.0.1.1:4000",)
    with pytest.raises(UsageError, match="no other host can connect"):
        advertised(("tcp://myhost:*",), bound, ())
    assert advertised(("tcp://localhost:*",), bound, ()) == bound
    assert advertised(("tcp://127.0.1.1:*",), bound, ()) == bound
    assert advertised(("tcp://myhost:*",), bound, ("tcp://other:*", "tcp://other:5")) == (
        "tcp://other:4000",
        "tcp://other:5",
    )
    assert advertised(("ipc:///tmp/x",), ("ipc:///tmp/x",), ()) == ("ipc:///tmp/x",)
    for wrong in ("tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://*:5"):
        with pytest.raises(UsageError, match=r"stands for every address .*advertise='tcp://HOST:5'"):
            advertised(("tcp://127.0.0.1:*",), bound, (wrong,))
    with pytest.raises(UsageError, match="is not an address"):
        advertised(("tcp://127.0.0.1:*",), bound, ("other:5",))
