"""Bookies that come back at another address are asked there, from the first request on."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk.client.wire import BookieWire
from pybk.ledger.ledger_metadata import Bookie
from pybk.manager.ledger_manager import LedgerManager
from pybk.replication.messages import ReadLac
from pybk.transport.client_links import Links
from tests.cluster.processes import BookieProcess, running
from tests.internals import cluster_backend_of
from tests.waiting import WAIT_S, wait_until

PASSWORD = b"correct horse"


def _move(client: LedgerManager, bookie: BookieProcess) -> None:
    """Have a bookie start again elsewhere, and wait until a client has heard where."""
    bookie.kill()
    address = bookie.start()

    def heard() -> bool:
        found = membership.bookies.get(bookie.name)
        return found is not None and found.addresses[0] == address

    membership = cluster_backend_of(client).membership
    wait_until(heard)


@pytest.mark.sampled(one_in=8, group="processes")
def test_the_first_request_after_a_bookie_moved_is_answered(tmp_path: Path) -> None:
    with running(tmp_path, 3) as cluster:
        client = cluster.connect()
        with client.create_ledger(password=PASSWORD, ensemble_size=1) as writer:
            for number in range(10):
                writer.append(b"entry %d" % number)
        bookie = cluster.bookie(writer.metadata.fragments[0].ensemble[0])
        all_three = client.create_ledger(password=PASSWORD, ensemble_size=3, ack_quorum=3)
        all_three.append(b"before")
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert len(list(reader.read(0, 9))) == 10
            _move(client, bookie)
            assert [entry.payload for entry in reader.read(0, 9)] == [b"entry %d" % number for number in range(10)]
        _move(client, bookie)
        all_three.append(b"after")
        all_three.close()
        assert len(client.ledger_metadata(all_three.ledger_id).fragments) == 1


class _Addresses:
    """Where the one bookie is, if it is there."""

    def __init__(self) -> None:
        self.place: tuple[str, bytes | None] | None = None

    def find(self, bookie: Bookie) -> tuple[str, bytes | None] | None:
        return self.place


def _listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _place(listening: socket.socket) -> tuple[str, None]:
    return f"tcp://127.0.0.1:{listening.getsockname()[1]}", None


def test_requests_to_the_old_address_end_with_the_first_request_to_the_new_one() -> None:
    with _listen() as old, _listen() as new:  # neither says a word
        addresses = _Addresses()
        ledger: Any = SimpleNamespace(unlocked=False, as_member=False, ledger_id=7)
        bookie = Bookie("moved", b"instance")
        with closing(BookieWire(lambda: Links(None), addresses)) as wire:
            assert not wire.send(1, bookie, ledger, ReadLac(7))
            addresses.place = _place(old)
            assert wire.send(2, bookie, ledger, ReadLac(7))
            addresses.place = None  # gone from the metadata store for a moment, and asked where it was
            assert wire.send(3, bookie, ledger, ReadLac(7))
            assert wire.poll(0) == []
            addresses.place = _place(new)
            assert wire.send(4, bookie, ledger, ReadLac(7))
            assert sorted(wire.poll(0)) == [(2, None), (3, None)]
            new.settimeout(WAIT_S)
            new.accept()[0].close()
