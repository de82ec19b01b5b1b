"""Ledgers of a cluster: copied as far as they are confirmed, and restored to the same or another cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.backup import back_up, restore_backup, verify_backup
from pybk.credentials import Passwords
from pybk.errors import CorruptError, LedgerExistsError, MetadataUnreachableError, UsageError
from pybk.flags import WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from tests.backup.backup_harness import KNOWN, PASSWORD, backed_up, files
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of
from tests.storage.real_store import contents, numbered

COUNT = 60


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "one") as cluster:
        yield cluster


def ledger(client: LedgerManager, count: int = COUNT, **options: object) -> LedgerWriter:
    writer = client.create_ledger(password=PASSWORD, **options)  # type: ignore[arg-type]
    writer.append_many(numbered(count))
    return writer


def of(writer: LedgerWriter) -> int:
    return writer.metadata.ledger_id


def test_ledgers_are_restored_to_another_cluster_under_their_ids(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    closed = ledger(client, custom_metadata={"name": b"value"}, ledger_type="orders")
    closed.close()
    open_one = ledger(client, digest_type=DigestType.CRC32C)
    deferred = ledger(client, write_flags=WriteFlag.DEFERRED_FORCE)
    deferred.force()
    deferred.append_many(numbered(5, COUNT))  # is not confirmed
    advanced = client.create_ledger(password=PASSWORD, ledger_id=10**6)
    for number, payload in enumerate(numbered(3)):
        advanced.append(payload, entry_id=number)
    report = backed_up(client, tmp_path / "backup")
    assert (report.ledgers, report.entries, report.left_out) == (4, 3 * COUNT + 3, ())
    open_one.append_many(numbered(5, COUNT))  # the backup has fenced nothing
    again = backed_up(client, tmp_path / "backup")
    assert (again.entries, again.changed, again.unauthenticated) == (5, 1, 0)
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).complete
    with inside(tmp_path / "two") as two:
        other = two.connect()
        made = restore_backup(tmp_path / "backup", other, passwords=KNOWN)
        assert made.ids == {of(each): of(each) for each in (closed, open_one, deferred, advanced)}
        assert made.left_out == ()
        for writer, count in ((closed, COUNT), (open_one, COUNT + 5), (deferred, COUNT), (advanced, 3)):
            assert contents(other, of(writer), PASSWORD) == numbered(count)
            assert other.check_seal(of(writer), password=PASSWORD, require=True)
        metadata = other.ledger_metadata(of(closed))
        assert (metadata.custom_metadata, str(metadata.ledger_type)) == ({"name": b"value"}, "orders")
        # Repeating it keeps what is whole.
        assert restore_backup(tmp_path / "backup", other, passwords=KNOWN) == made
        with other.create_ledger(password=PASSWORD) as writer:
            assert of(writer) not in made.ids


def test_a_ledger_that_was_deleted_comes_back_under_a_new_id(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    writer = ledger(client)
    writer.close()
    backed_up(client, tmp_path / "backup")
    client.delete_ledger(of(writer), password=PASSWORD)
    with pytest.raises(LedgerExistsError, match="ids are given once"):
        restore_backup(tmp_path / "backup", client, passwords=KNOWN)
    assert restore_backup(tmp_path / "backup", client, passwords=KNOWN, new_ids=True, dry_run=True).entries == COUNT
    made = restore_backup(tmp_path / "backup", client, passwords=KNOWN, new_ids=True)
    assert made.ids.keys() == {of(writer)}
    assert contents(client, made.ids[of(writer)], PASSWORD) == numbered(COUNT)
    assert list(client.list_ledgers()) == [*made.ids.values()]


def test_only_the_ledgers_that_are_named_are_restored(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    first, second = ledger(client), ledger(client, 5)
    for writer in (first, second):
        writer.close()
    backed_up(client, tmp_path / "backup")
    options = {"passwords": KNOWN, "new_ids": True, "ledgers": [of(second)]}
    planned = restore_backup(tmp_path / "backup", client, **options, dry_run=True)  # type: ignore[arg-type]
    assert (planned.ledgers, planned.entries, planned.ids) == (1, 5, {})
    made = restore_backup(tmp_path / "backup", client, **options)  # type: ignore[arg-type]
    assert (made.ledgers, made.entries, list(made.ids)) == (1, 5, [of(second)])
    assert made.payload_bytes == planned.payload_bytes
    assert contents(client, made.ids[of(second)], PASSWORD) == numbered(5)
    assert len(list(client.list_ledgers())) == 3
    with pytest.raises(UsageError, match="has no ledger 999: name another run or backup; nothing was restored"):
        restore_backup(tmp_path / "backup", client, passwords=KNOWN, new_ids=True, ledgers=[of(first), 999])
    assert len(list(client.list_ledgers())) == 3
    with pytest.raises(UsageError, match="ledgers is for ledgers of a cluster; a store is restored whole"):
        restore_backup(tmp_path / "backup", tmp_path / "new", ledgers=[of(first)])


def test_what_takes_a_password_that_is_not_given_is_named(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    closed, open_one = ledger(client), ledger(client)
    closed.close()
    report = back_up(client, tmp_path / "backup")
    assert (report.entries, report.unauthenticated) == (COUNT, 1)
    assert [text.partition(",")[0] for text in report.left_out] == [f"ledger {of(open_one)} is not closed"]
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).complete  # what was copied is what the writer made
    with inside(tmp_path / "two") as two:
        other = two.connect()
        made = restore_backup(tmp_path / "backup", other, passwords=Passwords(b"another"))
        assert (made.ids, made.left_out[:1]) == ({}, report.left_out)
        assert "its password was not given" in made.left_out[1]
        assert list(other.list_ledgers()) == []
    assert backed_up(client, tmp_path / "backup").left_out == ()


def test_a_damaged_entry_is_not_copied_without_the_password_either(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    writer = ledger(client, 0)
    writer.append_many([b"to be damaged on every bookie"] * 3)
    writer.close()
    for path in three.directory.rglob("*.log"):
        data = path.read_bytes()
        with open(path, "r+b") as file:  # in place: bookies have mapped it
            file.write(data.replace(b"to be damaged", b"to be Damaged"))
    report = back_up(client, tmp_path / "backup")
    assert report.entries == 0
    assert [text.partition(":")[0] for text in report.left_out] == [
        f"entries 0 to 2 of ledger {of(writer)} are left out"
    ]


def test_a_ledger_that_no_bookie_has_is_left_out_and_kept_as_it_was(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    kept = ledger(client, ensemble_size=1)
    backed_up(client, tmp_path / "backup")
    kept.append_many(numbered(5, COUNT))
    kept.close()
    (name,) = (bookie.bookie_id for bookie in client.ledger_metadata(of(kept)).fragments[0].ensemble)
    lost = int(name[-1])
    whole = ledger(client, ensemble_size=1)
    while client.ledger_metadata(of(whole)).fragments[0].ensemble[0].bookie_id == name:
        whole.close()
        whole = ledger(client, ensemble_size=1)
    three.bookies[lost].close()
    report = backed_up(client, tmp_path / "backup")
    text = f"entries {COUNT} to {COUNT + 4} of ledger {of(kept)} are left out: "
    assert any(each.startswith(text) for each in report.left_out)
    assert not any(f"of ledger {of(whole)} " in each for each in report.left_out)
    found = verify_backup(tmp_path / "backup", passwords=KNOWN)
    assert not found.problems
    with inside(tmp_path / "two") as two:
        other = two.connect()
        restore_backup(tmp_path / "backup", other, passwords=KNOWN)
        assert contents(other, of(kept), PASSWORD) == numbered(COUNT)


def test_a_backup_is_restored_to_what_it_is_of(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    ledger(client).close()
    backed_up(client, tmp_path / "backup")
    before = files(tmp_path / "backup")
    with pytest.raises(UsageError, match="is the backup of a cluster's ledgers"):
        restore_backup(tmp_path / "backup", tmp_path / "new")
    with pytest.raises(UsageError, match="new_ids is for ledgers of a cluster"):
        restore_backup(tmp_path / "backup", tmp_path / "new", new_ids=True)
    back_up(three.directory / "bookie-0", tmp_path / "of a bookie")
    with pytest.raises(UsageError, match="is the backup of a store"):
        restore_backup(tmp_path / "of a bookie", client)
    assert files(tmp_path / "backup") == before


def test_a_ledger_that_cannot_be_restored_whole_is_deleted_again(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    first, second = ledger(client), ledger(client, 1)
    first.close()
    backed_up(client, tmp_path / "backup")
    first_pack = tmp_path / "backup" / "pack-00000001"
    second.append_many(numbered(COUNT, 1))
    second.close()
    backed_up(client, tmp_path / "backup")
    pack = tmp_path / "backup" / "pack-00000002"
    pack.write_bytes(pack.read_bytes()[:-1])
    assert first_pack.exists()
    with inside(tmp_path / "two") as two:
        other = two.connect()
        with pytest.raises(CorruptError, match="pack-00000002"):
            restore_backup(tmp_path / "backup", other, passwords=KNOWN)
        assert list(other.list_ledgers()) == [of(first)]
        assert contents(other, of(first), PASSWORD) == numbered(COUNT)


def test_what_a_restore_that_was_cut_off_left_is_named(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    with ledger(client) as writer:
        pass
    backed_up(client, tmp_path / "backup")
    with inside(tmp_path / "two") as two:
        other = cluster_backend_of(two.connect())
        left = replace(client.ledger_metadata(of(writer)), state=LedgerState.OPEN, last_entry_id=-1, length=0)
        other.create(left.with_seal(b"", b""))
        made = restore_backup(tmp_path / "backup", two.connect(), passwords=KNOWN)
        assert made.ids == {}
        assert "it exists with another end, as after an interrupted restore" in made.left_out[0]


def test_metadata_that_cannot_be_read_are_not_taken_for_a_free_id(
    three: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = three.connect()
    with ledger(client) as writer:
        pass
    backed_up(client, tmp_path / "backup")
    backend = cluster_backend_of(client)

    def unreachable(ledger_id: int) -> LedgerMetadata:
        raise MetadataUnreachableError(f"of ledger {ledger_id}")

    monkeypatch.setattr(backend, "metadata", unreachable)
    with pytest.raises(MetadataUnreachableError, match=f"of ledger {of(writer)}"):
        restore_backup(tmp_path / "backup", client, passwords=KNOWN)


def test_the_progress_of_a_restore_shows_within_a_ledger(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    with ledger(client, 0) as writer:
        writer.append_many([bytes(1 << 19)] * 10)
    backed_up(client, tmp_path / "backup")
    seen: list[tuple[int, int]] = []
    restore_backup(
        tmp_path / "backup",
        client,
        passwords=KNOWN,
        new_ids=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (10 << 19, 10 << 19)
    assert len(seen) > 2


def test_a_ledger_that_is_left_out_stays_named_in_the_backup(three: Inside, tmp_path: Path) -> None:
    client = three.connect()
    with ledger(client) as closed:
        pass
    ledger(client)
    report = back_up(client, tmp_path / "backup")
    assert (report.ledgers, len(report.left_out)) == (1, 1)
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).left_out == report.left_out
    made = restore_backup(tmp_path / "backup", client, passwords=KNOWN, new_ids=True)
    assert ({*made.ids}, made.left_out) == ({of(closed)}, report.left_out)
    assert backed_up(client, tmp_path / "backup").left_out == ()
    assert verify_backup(tmp_path / "backup", passwords=KNOWN).left_out == ()
