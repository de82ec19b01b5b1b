"""Stores on the real disk that are quick to make, and what several tests do with them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pybk.config import StoreConfig
from pybk.ledger import keys
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_reader import LedgerReader
from pybk.storage.io.filesystem import OsFile
from tests.internals import store_of
from tests.paths import ROOT
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    import pytest

QUICK: dict[str, Any] = {
    "log_file_bytes": 1 << 20,
    "unchecked_tail_bytes": 4 << 20,
    "cold_block_bytes": 4 << 10,
    "ssd_block_bytes": 4 << 10,
    "free_bytes_low": 0,
    "free_bytes_ok": 0,
}

_STARTED: Final[list[subprocess.Popen[str]]] = []
"""The processes of ``python``, until the end of the test."""


def apply_policy(manager: LedgerManager) -> None:
    """Run the jobs of a store without a background until its tier policy has examined all ledgers; it moves the due."""
    store = store_of(manager)
    while True:
        store.scheduler.policy_due = 0.0
        store.scheduler.tick()
        if store.tier_queue is None or not store.tier_queue.looking:
            return


def open_quick(path: Path, *, read_only: bool = False, tiers: Any = None, **settings: Any) -> LedgerManager:
    """Open a store with small files; one that is made here costs no scrypt."""
    keys.SCRYPT_COST = 2  # type: ignore[misc]  # final for everybody but tests
    return LedgerManager.open(path, tiers=tiers, read_only=read_only, config=StoreConfig(**{**QUICK, **settings}))


def payloads(reader: LedgerReader) -> list[bytes]:
    """Return all payloads that a reader may read."""
    return [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]


def contents(manager: LedgerManager, ledger_id: int, password: bytes = b"", *, recover: bool = False) -> list[bytes]:
    """Return all payloads of a ledger."""
    with manager.open_ledger(ledger_id, password=password, recover=recover) as reader:
        return payloads(reader)


def numbered(count: int, start: int = 0) -> list[bytes]:
    """Return payloads that contain their own entry ids."""
    return [b"entry %d" % number for number in range(start, start + count)]


def python_path() -> str:
    """Return the ``PYTHONPATH`` of processes that a test starts: this checkout, after the value that the test got.

    That value has the path of the mutant, if there is one (``tests.mutation``).
    """
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*([given] if given else []), str(ROOT / "src"), str(ROOT)])


def python(program: str, *arguments: Iterable[str] | str | Path) -> subprocess.Popen[str]:
    """Start a Python process on a program; its standard input and output are text pipes. It ends with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    _STARTED.append(process)
    return process


def end_started() -> None:
    """Kill the processes that ``python`` started and a test that failed has left, and close their pipes."""
    while _STARTED:
        with suppress(BrokenPipeError), _STARTED.pop() as process:
            process.kill()


def stop_syncing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have synced writes wait until the event is set."""
    go = threading.Event()
    write_durable = OsFile.write_durable

    def wait_and_write(self: OsFile, buffers: Any, offset: int) -> None:
        assert go.wait(WAIT_S)
        write_durable(self, buffers, offset)

    monkeypatch.setattr(OsFile, "write_durable", wait_and_write)
    return go
