"""The background checks of an embedded store: damage is found, shown, remembered, and forgotten once it is gone."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pybk.errors import ClosedError, DigestMismatchError
from pybk.flags import LedgerType, StorageHint
from pybk.healing import scrub
from pybk.healing.scrub import EmbeddedScrub, ScrubTerms, StoreScrub
from pybk.healing.scrub_schedule import PARTS, ScrubKind
from pybk.manager import local_backend
from pybk.manager.ledger_manager import LedgerManager, backend_of
from pybk.manager.local_backend import StoreBackend
from pybk.metrics import SCRUB_BYTES, SCRUB_DAMAGED_RECORDS
from pybk.storage.repair.scrub_notes import NOTES_NAME
from pybk.storage.store import Store
from tests.internals import store_of
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

SECRET = b"the bytes that nobody reads"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_backend, "FIRST_SCRUB_S", 0.0)
    monkeypatch.setattr(scrub, "REST_S", 0.05)
    monkeypatch.setattr(scrub, "RECHECK_S", 0.05)


def fill(manager: LedgerManager, hint: StorageHint, count: int = 200) -> int:
    with manager.create_ledger(storage_hints=[hint], insecure=True) as writer:
        writer.append_many([b"entry %d %s" % (number, SECRET) for number in range(count)])
    return writer.ledger_id


def flip(root: Path, found: bytes) -> None:
    """Flip the lowest bit of some bytes in each file that has them; the store is open, so files may go meanwhile."""
    files = []
    for path in root.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):
            data = path.read_bytes()
            at = data.find(found)
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([data[at] ^ 1]))
                files.append(path)
    assert files, "what is to be damaged lies in no file"


def counted(manager: LedgerManager, name: str) -> int:
    return sum(value for key, value in manager.metrics().counters.items() if key.name == name)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("hint", list(StorageHint))
def test_a_bit_that_flips_where_nobody_reads_is_found_and_shown_until_it_is_right_again(
    tmp_path: Path, hint: StorageHint
) -> None:
    with open_quick(tmp_path) as manager:
        sound, damaged = fill(manager, hint, 3), fill(manager, hint)
        manager.move_ledger(sound, hint)
        manager.move_ledger(damaged, hint)
        manager.checkpoint()
    with open_quick(tmp_path, scrub_seconds=1.0) as manager:
        wait_until(lambda: counted(manager, SCRUB_BYTES) > 200 * len(SECRET), "everything was checked once")
        assert manager.health().state == "ok"
        flip(tmp_path, b"entry 150 " + SECRET)
        wait_until(lambda: manager.health().state == "degraded")
        assert f"1 damaged record in ledger {damaged}" in manager.health().reason
        assert counted(manager, SCRUB_DAMAGED_RECORDS) > 0
        gauges = {key.name: value for key, value in manager.metrics().gauges.items()}
        assert 0 < time.time_ns() - gauges["scrub_oldest_timestamp_ns"] < 60e9
        assert gauges["scrub_period_ns"] == 1e9
        with manager.open_ledger(damaged) as reader, pytest.raises(DigestMismatchError):
            list(reader.read(150, 150))
        with manager.open_ledger(sound) as reader:
            assert len(list(reader)) == 3
        flip(tmp_path, b"dntry 150 " + SECRET)  # the bit as it was
        wait_until(lambda: manager.health().state == "ok", "the damage is forgotten")


def test_damage_is_remembered_by_the_next_open_and_ends_with_its_ledger(tmp_path: Path) -> None:
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        ledger_id = fill(manager, StorageHint.NVME)
        manager.checkpoint()
        flip(tmp_path, b"7 " + SECRET)
        said: list[tuple[int, int]] = []
        report = manager.scrub(progress=lambda done, total: said.append((done, total)))
        assert [(each.ledger_id, each.first_entry_id) for each in report.damaged] == [(ledger_id, 0)]
        assert said[-1][0] == said[-1][1] > 0
        assert report.ledgers == 1
        assert "damaged" in manager.health().reason
    with open_quick(tmp_path, read_only=True) as manager:
        assert manager.scrub().damaged == report.damaged
    with open_quick(tmp_path) as manager:
        wait_until(lambda: manager.health().state == "degraded")
        manager.delete_ledger(ledger_id)
        wait_until(lambda: manager.health().state == "ok")
        assert not manager.scrub().damaged
    with pytest.raises(ClosedError):
        manager.scrub()


def test_a_check_continues_after_a_restart_and_begins_anew_with_damaged_notes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_quick(tmp_path) as manager:
        fill(manager, StorageHint.NVME)
        manager.scrub()
    notes = json.loads((tmp_path / NOTES_NAME).read_text().partition("\n")[0])
    checked = notes["kinds"]["deep"]["checked_ns"]
    assert len(checked) == PARTS
    assert all(checked)
    with open_quick(tmp_path) as manager:
        pass
    assert json.loads((tmp_path / NOTES_NAME).read_text().partition("\n")[0])["kinds"]["deep"]["checked_ns"] == checked
    (tmp_path / NOTES_NAME).write_bytes(b"{}")
    with open_quick(tmp_path) as manager:
        wait_until(lambda: "begin anew" in caplog.text)
        assert manager.health().state == "ok"


def test_without_background_jobs_nothing_is_checked(tmp_path: Path) -> None:
    with open_quick(tmp_path, background=False) as manager:
        fill(manager, StorageHint.NVME)
        assert not manager.scrub().damaged
    assert not (tmp_path / NOTES_NAME).exists()


def test_checks_are_slower_while_appends_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "SAMPLE_NS", 0)
    with open_quick(tmp_path, background=False) as manager:
        owner = EmbeddedScrub(store_of(manager))

        def share(slow: int) -> float:
            meter = owner.metrics.scope(LedgerType(""), StorageHint.NVME)
            meter.appended(100 - slow, 0, 10**6)
            meter.appended(slow, 0, 10**9)
            terms = owner.terms()
            assert terms is not None
            return terms.share

        assert [share(1), share(0), share(1), share(1)] == [1.0] * 4
        assert share(2) == 0.5, "the 99th percentile of those since the last look"


class _Owner(EmbeddedScrub):
    """A store whose checks go by terms that the test sets."""

    now: ScrubTerms | None = None

    def terms(self) -> ScrubTerms | None:
        return self.now


def test_nothing_is_checked_while_the_cluster_is_not_quiet_but_what_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "FIRST_SCRUB_S", 1e6)  # the test takes the steps itself
    monkeypatch.setattr(scrub, "TERMS_S", 0.0)
    with open_quick(tmp_path, scrub_seconds=0) as manager:
        fill(manager, StorageHint.NVME)
        backend = backend_of(manager)
        assert isinstance(backend, StoreBackend)
        assert isinstance(backend.store, Store)
        owner = _Owner(backend.store)
        checks = StoreScrub(owner)
        terms = ScrubTerms({ScrubKind.DEEP: 1e6, ScrubKind.LIGHT: 1e6}, 1 << 30, {})

        def busy(now: ScrubTerms | None) -> bool:
            owner.now = now
            return checks.step() is not None

        assert not busy(None)
        assert not busy(terms._replace(quiet=False))
        assert busy(terms), "the first part is due at once"
        assert not busy(terms._replace(quiet=False)), "not even the part under way continues"
        before = counted(manager, SCRUB_BYTES)
        asked = terms._replace(quiet=False, asked_ns={ScrubKind.DEEP: 1})
        while busy(asked):
            pass
        assert counted(manager, SCRUB_BYTES) > before + 200 * len(SECRET)
        assert checks.oldest_ns(ScrubKind.DEEP) > checks.oldest_ns(ScrubKind.LIGHT)
