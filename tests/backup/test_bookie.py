"""A bookie's directory that was restored: in limbo, and the only one of its name in the cluster from then on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.backup import verify_backup
from pybk.bookie.replicas import Replicas
from pybk.client import limbo_repair
from pybk.client.limbo_repair import LimboRepair
from pybk.config import StoreConfig
from pybk.errors import CookieError
from pybk.manager.ledger_manager import LedgerManager
from tests.backup.backup_harness import backed_up, restored
from tests.client.test_limbo_repair import PASSWORD, payload
from tests.cluster.inside import Inside, inside
from tests.internals import service_of
from tests.storage.real_store import QUICK
from tests.waiting import wait_until

COUNT = 60


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster


@pytest.fixture
def no_repair(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether limbo is not repaired."""
    held = [True]
    repair = LimboRepair.repair
    monkeypatch.setattr(LimboRepair, "repair", lambda self, each: not held[0] and repair(self, each))
    monkeypatch.setattr(limbo_repair, "RETRY_SECONDS", 0.1)
    return held


def filled(client: LedgerManager, count: int = COUNT) -> int:
    with client.create_ledger(password=PASSWORD) as writer:
        writer.append_many([payload(number) for number in range(count)])
        return writer.metadata.ledger_id


def put_in_place(three: Inside, path: Path) -> None:
    """Put a restored directory in the place of that of the first bookie, which is kept."""
    (three.directory / "bookie-0").rename(three.directory / "before")
    path.rename(three.directory / "bookie-0")


def test_a_restored_bookie_starts_in_limbo_and_is_filled_up(
    three: Inside, tmp_path: Path, no_repair: list[bool]
) -> None:
    client = three.connect()
    first = filled(client)
    three.wait_for_copies(first, COUNT)
    report = backed_up(three.directory / "bookie-0", tmp_path / "backup")  # the bookie serves meanwhile
    assert report.entries >= COUNT
    assert verify_backup(tmp_path / "backup").problems == ()
    later = filled(client)
    three.bookies[0].close()
    put_in_place(three, restored(tmp_path / "backup", tmp_path / "new"))
    bookie = three.open_bookie(0)
    replicas = service_of(bookie).replicas
    assert {first, later} <= set(replicas.in_limbo())
    no_repair[0] = False
    wait_until(lambda: not replicas.in_limbo())
    for ledger_id in (first, later):
        with client.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert [each.payload for each in reader] == [payload(number) for number in range(COUNT)]
    # A later start is an ordinary one: its directory is known, and nothing is in limbo.
    bookie.close()
    assert not service_of(three.open_bookie(0)).replicas.in_limbo()


def test_a_start_that_stops_before_the_limbo_marks_finds_the_restore_again(three: Inside, tmp_path: Path) -> None:
    """The directory names the incarnation from the start on; ``accepted-loss`` stays until the marks are durable."""
    first = filled(three.connect())
    three.wait_for_copies(first, COUNT)
    backed_up(three.directory / "bookie-0", tmp_path / "backup")
    three.bookies[0].close()
    new = restored(tmp_path / "backup", tmp_path / "new")
    replicas = Replicas.open(str(new), config=StoreConfig(**QUICK))
    before = replicas.restored
    identity = replicas.identity
    assert identity is not None
    boots = replicas.record_start(identity.cluster_id, identity.bookie_id, identity.instance, identity.boots + 3)
    assert boots == identity.boots + 4
    assert (before, replicas.restored) == (True, False)
    replicas.close()
    again = Replicas.open(str(new), config=StoreConfig(**QUICK))
    assert again.store.has_accepted_loss()
    assert first in again.ledgers()
    again.close()
    put_in_place(three, new)
    service = service_of(three.open_bookie(0, moved=True))
    assert not service.replicas.store.has_accepted_loss()


def test_two_incarnations_of_a_bookie_are_refused(three: Inside, tmp_path: Path, no_repair: list[bool]) -> None:
    filled(three.connect())
    backed_up(three.directory / "bookie-0", tmp_path / "backup")
    new, other = (restored(tmp_path / "backup", tmp_path / name) for name in ("new", "other"))

    def start(path: Path) -> LedgerManager:
        return LedgerManager.open(
            path,
            listen="tcp://127.0.0.1:*",
            metadata=three.url,
            cluster_secret=three.given,
            bookie_id="bookie-0",
            autorecovery=False,
            config=StoreConfig(**QUICK),
        )

    with pytest.raises(CookieError, match="serves at"):
        start(new)  # the bookie serves from the directory that was backed up
    three.bookies[0].close()
    with start(new):
        for path in (three.directory / "bookie-0", other):
            with pytest.raises(CookieError):
                start(path)
    with pytest.raises(CookieError, match="from an older backup"):
        start(three.directory / "bookie-0")
    start(new).close()


def test_a_copy_of_a_restored_directory_is_a_copy(three: Inside, tmp_path: Path, no_repair: list[bool]) -> None:
    """What a restore excuses, it excuses once: afterwards inode and starts are compared as ever."""
    backed_up(three.directory / "bookie-0", tmp_path / "backup")
    three.bookies[0].close()
    put_in_place(three, restored(tmp_path / "backup", tmp_path / "new"))
    three.open_bookie(0).close()
    shutil.copytree(three.directory / "bookie-0", tmp_path / "copy")
    shutil.rmtree(three.directory / "bookie-0")
    (tmp_path / "copy").rename(three.directory / "bookie-0")
    with pytest.raises(CookieError, match="is a copy of the directory of"):
        three.open_bookie(0)
