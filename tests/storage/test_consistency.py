"""An older part that is restored next to newer ones loses nothing silently: see `docs/admin/restoring.md`.

A store is written in steps and copied whole after each of them. A test puts one part of an earlier copy into a later
copy, or the other way round, and opens the result.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from pybk import DigestType, LedgerManager, PybkError, StorageHint, StoreConfig
from tests.paths import ROOT
from tests.storage.real_store import QUICK

CONFIG = StoreConfig(**{**QUICK, "background": False})
TABLES = ROOT / "docs" / "admin" / "restoring.md"

Entries = dict[int, list[bytes]]


class Moment(NamedTuple):
    """A copy of the store and what was acknowledged by then."""

    path: Path
    entries: Entries


class Story:
    """A store that is written step by step, and copied after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: Entries = {}
        self.moments: list[Moment] = []
        self._manager = LedgerManager.open(path / "live", config=CONFIG)
        self._writers: dict[int, object] = {}

    def create(self, hint: StorageHint) -> int:
        """Create a ledger."""
        writer = self._manager.create_ledger(digest_type=DigestType.CRC32C, storage_hints={hint})
        self.entries[writer.ledger_id] = []
        self._writers[writer.ledger_id] = writer
        return writer.ledger_id

    def append(self, ledger_ids: Iterable[int], count: int) -> None:
        """Append to ledgers."""
        for ledger_id in ledger_ids:
            given = self.entries[ledger_id]
            batch = [b"%d of %d " % (number, ledger_id) * 40 for number in range(len(given), len(given) + count)]
            self._writers[ledger_id].append_many(batch)  # type: ignore[attr-defined]  # a writer
            given += batch

    def copy(self) -> None:
        """Copy the store as a process leaves it that is killed now, or as it is after ``close``."""
        target = self.path / f"moment-{len(self.moments)}"
        shutil.copytree(self.path / "live", target)
        (target / "LOCK").unlink(missing_ok=True)
        entries = {ledger_id: list(found) for ledger_id, found in self.entries.items()}
        self.moments.append(Moment(target, entries))

    def write(self) -> list[Moment]:
        """Write the store: append, checkpoint, append, move and delete, append, close."""
        nvme, ssd, hdd, moved, doomed = (
            self.create(hint)
            for hint in (StorageHint.NVME, StorageHint.SSD, StorageHint.HDD, StorageHint.SSD, StorageHint.HDD)
        )
        every = [nvme, ssd, hdd, moved, doomed]
        self.append(every, 10)
        self.copy()
        self._manager.checkpoint()
        self.copy()
        self.append(every, 10)
        self._manager.move_ledger(moved, StorageHint.HDD)
        self.append([nvme, ssd], 5)
        self._manager.delete_ledger(doomed)
        del self.entries[doomed]
        self._manager.checkpoint()
        self.copy()
        self.append([nvme, ssd, hdd], 5)
        self.copy()
        self._manager.close()
        self.copy()
        return self.moments


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[Moment]:
    return Story(tmp_path_factory.mktemp("story")).write()


# ---- parts -----------------------------------------------------------------------------------------------------------


def matching(*patterns: str) -> Callable[[Path], list[Path]]:
    """Return what finds a part: the files that match one of the patterns."""
    return lambda root: sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file())


PARTS: dict[str, Callable[[Path], list[Path]]] = {
    "index": matching("ssd/index/data.mdb"),
    "SSD entries": matching("ssd/entries/data.mdb"),
    "catalog": matching("catalog-*"),
    "main cookie": matching("cookie"),
    "tier cookies": matching("*/cookie"),
    "watermark": matching("watermark"),
    "log files": matching("nvme/*.log"),
    "cold segments": matching("*/*.cold"),
    "list of directories": matching("directories"),
    "files of the main directory": matching("*"),
    "NVMe directory": matching("nvme/**/*"),
    "SSD directory": matching("ssd/**/*"),
    "HDD directory": matching("hdd/**/*"),
    "whole store": matching("**/*"),
}


def combine(rest: Path, part: Path, find: Callable[[Path], list[Path]], target: Path) -> None:
    """Copy ``rest`` to ``target``, and have a part of it be as it is in ``part``."""
    shutil.copytree(rest, target)
    for path in find(target):
        path.unlink()
    for path in find(part):
        there = target / path.relative_to(part)
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, there)


def tree(root: Path) -> dict[str, str]:
    """Return a hash of each file, without the lock files, which an open may make and change."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
        for path in sorted(root.rglob("*"))
        if path.name not in ("LOCK", "lock.mdb")
    }


def entries_of(manager: LedgerManager) -> Entries:
    """Return all that is read from a store."""
    found = {}
    for ledger_id in manager.list_ledgers():
        with manager.open_ledger(ledger_id, recover=False) as reader:
            found[ledger_id] = [entry.payload for entry in reader.read(0, reader.last_add_confirmed)]
    return found


def outcome(root: Path, newer: Entries, older: Entries, caplog: pytest.LogCaptureFixture) -> str:
    """Open a store; return what came of it in the words of the table."""
    before = tree(root)
    caplog.clear()
    try:
        manager = LedgerManager.open(root, config=CONFIG)
    except PybkError:
        assert tree(root) == before, "an open that refused changed something"
        return "refused"
    with manager:
        found = entries_of(manager)
        made_again = "made again" in caplog.text
        manager.checkpoint()
        assert entries_of(manager) == found
    if made_again:
        with LedgerManager.open(root, config=CONFIG) as manager:
            assert entries_of(manager) == found
    if found != newer:
        assert found == older, "entries are lost"
        return "cannot be detected"
    return "rebuilt" if made_again else "opens"


def table(heading: str) -> dict[str, set[str]]:
    """Return the outcomes that a table of the document allows, by part."""
    text = TABLES.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {part: {word.strip() for word in words.split(",")} for part, words, _ in rows[2:]}


# ---- tests -----------------------------------------------------------------------------------------------------------


def hold_to_table(
    heading: str,
    part: str,
    moments: list[Moment],
    work: Path,
    caplog: pytest.LogCaptureFixture,
    choose: Callable[[Moment, Moment], tuple[Path, Path]],
) -> None:
    """Try a part of each pair of moments; assert that what happens is what the table says, and all of that happens."""
    caplog.set_level(logging.WARNING)
    allowed = table(heading)[part]
    seen = set()
    for number, newer in enumerate(moments):
        for older in moments[:number]:
            rest, taken = choose(older, newer)
            target = work / "store"
            combine(rest, taken, PARTS[part], target)
            came = outcome(target, newer.entries, older.entries, caplog)
            where = f"{part} of {taken.name} in {rest.name}"
            assert came in allowed, f"{where}: {came}; the table says {allowed}: {caplog.text}"
            seen.add(came)
            shutil.rmtree(target)
    assert seen == allowed


def test_the_tables_name_every_part() -> None:
    assert set(table("An older part in a newer store")) == set(table("A newer part in an older store")) == set(PARTS)


@pytest.mark.sampled(one_in=7)
@pytest.mark.parametrize("part", PARTS)
def test_an_older_part_in_a_newer_store_does_what_the_table_says(
    part: str, moments: list[Moment], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heading = "An older part in a newer store"
    hold_to_table(heading, part, moments, tmp_path, caplog, lambda old, new: (new.path, old.path))


@pytest.mark.sampled(one_in=7)
@pytest.mark.parametrize("part", PARTS)
def test_a_newer_part_in_an_older_store_does_what_the_table_says(
    part: str, moments: list[Moment], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heading = "A newer part in an older store"
    hold_to_table(heading, part, moments, tmp_path, caplog, lambda old, new: (old.path, new.path))
