"""Readers of LMDB that were killed hold their place in its reader table, and with it old pages, until that is freed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from pybk.config import StoreConfig
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from tests.internals import store_of

_READER: Final = """
import sys
from pybk.storage.io.lmdb_environment import LmdbEnvironment
with LmdbEnvironment(sys.argv[1], read_only=True).read() as transaction:
    transaction.get(b"k")
    print("reading", flush=True)
    sys.stdin.read()
"""


def _killed_reader(path: Path) -> None:
    """Leave the place of a reader that was killed in the middle of a transaction."""
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.kill()


def test_places_of_killed_readers_are_counted_when_they_are_freed(tmp_path: Path) -> None:
    environment = LmdbEnvironment(str(tmp_path))
    assert environment.release_dead_readers() == 0
    for _ in range(2):
        _killed_reader(tmp_path)
    assert environment.release_dead_readers() == 2
    assert environment.release_dead_readers() == 0
    environment.close()


def test_a_store_frees_the_places_of_killed_readers_while_it_is_open(tmp_path: Path) -> None:
    with LedgerManager.open(str(tmp_path), config=StoreConfig(background=False)) as manager:
        scheduler = store_of(manager).scheduler
        for name in ("index", "entries"):
            _killed_reader(tmp_path / "ssd" / name)
        scheduler.tick()  # the store was just opened: not due
        scheduler.readers_due = 0.0
        scheduler.tick()
        for name in ("index", "entries"):
            environment = LmdbEnvironment(str(tmp_path / "ssd" / name))
            assert environment.release_dead_readers() == 0, name
            environment.close()


def test_a_metadata_store_frees_the_places_of_killed_readers_while_it_is_open(tmp_path: Path) -> None:
    tree = LmdbMetadataStore(str(tmp_path))
    environment = LmdbEnvironment(str(tmp_path))
    _killed_reader(tmp_path)
    tree.readers_due = 0.0
    tree.create("k", b"v")
    assert environment.release_dead_readers() == 0
    environment.close()
    tree.close()
