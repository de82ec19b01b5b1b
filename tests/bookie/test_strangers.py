"""Strangers who hold or flood connections take no descriptor that a bookie's store needs."""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import sys
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from pybk.config import StoreConfig
from pybk.errors import PybkError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.processes import Child
from tests.internals import service_of
from tests.storage.real_store import QUICK
from tests.waiting import PROCESS_S, wait_until

_ONE: Final[dict[str, Any]] = {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}
_PAYLOAD_BYTES: Final = 100_000
_ENTRIES: Final = 120
_PASSWORD: Final = b"pw"
_GARBAGE: Final = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"garbage" * 20)


class _Strangers:
    """Keeps a number of connections to an address open, and makes a new one for each that is ended."""

    def __init__(self, host: str, port: int, count: int) -> None:
        self._address = (host, port)
        self._count = count
        self._ends = threading.Event()
        self.made = 0
        """How many connections were made."""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        """End all connections."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        try:
            while not self._ends.is_set():
                for _ in range(self._count - len(selector.get_map())):
                    self._connect(selector)
                for key, _ in selector.select(0.01):
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(selector, key.fileobj)
        finally:
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
            selector.close()

    def _connect(self, selector: selectors.BaseSelector) -> None:
        stranger = socket.socket()
        stranger.settimeout(1.0)
        try:
            stranger.connect(self._address)
            stranger.sendall(_GARBAGE[self.made % len(_GARBAGE)])
        except OSError:
            stranger.close()
            return
        self.made += 1
        selector.register(stranger, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, stranger: socket.socket) -> None:
        with suppress(OSError):
            if stranger.recv(1 << 10):
                return
        selector.unregister(stranger)
        stranger.close()


def _serve(limit: int, path: str) -> None:
    """Run a bookie that may have few descriptors, and write and read a ledger of its own until it has many files."""
    logging.basicConfig()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    root = Path(path)
    with (
        LedgerManager.open(
            root / "bookie", listen="tcp://127.0.0.1:*", metadata=_metadata(root), config=StoreConfig(**QUICK)
        ) as manager,
        manager.create_ledger(password=_PASSWORD, storage_hints={StorageHint.HDD}, **_ONE) as writer,
    ):
        writer.append(b"first")
        _say("address", service_of(manager).server.addresses[0])
        sys.stdin.readline()
        for number in range(1, _ENTRIES):
            assert writer.append(b"%09d" % number + bytes(_PAYLOAD_BYTES)) == number
            if number % 25 == 0:
                _read_last(manager, writer.ledger_id)
        _say("appended", writer.ledger_id)
        sys.stdin.readline()
        _say("ended", service_of(manager).server.refusals()["ended"])


def _say(word: str, what: object) -> None:
    sys.stdout.write(f"{word} {what}\n")
    sys.stdout.flush()


def _metadata(root: Path) -> str:
    return f"lmdb://{root}/metadata"


def _read_last(manager: LedgerManager, ledger_id: int) -> None:
    with manager.open_ledger(ledger_id, password=_PASSWORD, recover=False) as reader:
        last = reader.last_add_confirmed
        assert next(iter(reader.read(last, last))).payload == b"%09d" % last + bytes(_PAYLOAD_BYTES)


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.parametrize("limit", [512, 128])
def test_strangers_take_no_descriptor_that_the_store_needs(limit: int, tmp_path: Path) -> None:
    """Hundreds that hold a connection, send garbage and come back at once; log files are made, and readers opened."""
    with ExitStack() as stack:
        bookie = Child([str(limit), str(tmp_path)], None, tmp_path / "log", module="tests.bookie.test_strangers")
        stack.enter_context(bookie)
        stack.callback(bookie.join)
        stack.callback(bookie.finish)
        bookie.wait_for(lambda: bookie.said("address"))
        host, port = bookie.said("address")[0].removeprefix("tcp://").split(":")
        with closing(_Strangers(host, int(port), 600)) as strangers:
            wait_until(lambda: strangers.made > limit)
            bookie.order("append")
            bookie.wait_for(lambda: bookie.said("appended"), seconds=PROCESS_S)
            client = stack.enter_context(LedgerManager.connect(_metadata(tmp_path)))
            wait_until(lambda: _reads(client, int(bookie.said("appended")[0])), "a client is let in", pause_s=0.1)
        bookie.order("end")
        bookie.wait_for(lambda: bookie.said("ended"))
    assert int(bookie.said("ended")[0]) > 0
    assert "a connection was ended that had sent no message" in (tmp_path / "log").read_text()


def _reads(client: LedgerManager, ledger_id: int) -> bool:
    with suppress(PybkError):
        _read_last(client, ledger_id)
        return True
    return False


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
