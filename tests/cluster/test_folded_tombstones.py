"""A deleted ledger whose tombstone was folded, and directories of bookies that still have its entries."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest

from pybk import LedgerDeletedError, LedgerManager, MetadataForgedError, check_metadata, rebuild_metadata
from pybk.admin.cli import main
from pybk.manager.connect import open_cluster
from pybk.metadata.deletions import DELETED_IDS
from pybk.metadata.ledgers import LEDGERS_KEY, deleted_ids_key, ledger_path
from pybk.metadata.url import open_metadata
from tests.cluster.inside import SECRET, inside

BOOKIES = 3


def write(client: LedgerManager) -> int:
    with client.create_ledger(password=b"p") as writer:
        writer.append(b"entry")
        return writer.ledger_id


def fold(url: str, *ledger_ids: int) -> None:
    """Delete ledgers, and fold their tombstones, as if all bookies had dropped them."""
    with open_cluster(url, SECRET, create=False)[0] as metadata:
        for ledger_id in ledger_ids:
            metadata.delete_ledger(ledger_id, metadata.read_ledger(ledger_id).version)
        page = metadata.append_deletions(ledger_ids)
        for cookie in metadata.list_cookies():
            metadata.record_deletion_position(cookie.bookie, page)
        assert metadata.trim_deletions() == 1


def damage(url: str, key: str) -> None:
    """Change a byte of a value."""
    with closing(open_metadata(url, create=False)) as store:
        node = store.get(key, latest=True)
        assert node is not None
        store.put(key, node.value[:-1] + bytes([node.value[-1] ^ 1]), node.version)


@pytest.mark.sampled(one_in=8, group="processes")
def test_the_command_that_the_error_of_damaged_deleted_ids_names_lets_ledgers_be_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bookies and clients run meanwhile; so it does where it is printed by the check."""
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        deleted, kept = write(client), write(client)
        fold(cluster.url, deleted)
        damage(cluster.url, deleted_ids_key(deleted))
        with pytest.raises(MetadataForgedError) as raised:
            write(client)
        assert main(["metadata", "check", cluster.url, "--json"]) == 1
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        for text in (str(raised.value), problem["problem"]):
            (command,) = re.findall(r"`pybk ([^`]+)`", text)
            assert main([cluster.url if word == "URL" else word for word in shlex.split(command)]) == 0
        out = capsys.readouterr().out
        assert out.count(f"{deleted_ids_key(deleted)} is made again") == 1, "the second run finds it sound"
        assert out.count("0 problems") == 2
        new = write(client)
        assert new == DELETED_IDS
        with client.open_ledger(kept, password=b"p") as reader, client.open_ledger(new, password=b"p") as other:
            assert [entry.payload for each in (reader, other) for entry in each.read(0, 0)] == [b"entry"] * 2
        with pytest.raises(LedgerDeletedError):
            client.open_ledger(deleted, password=b"p")


def test_metadata_with_damaged_deleted_ids_are_rebuilt(tmp_path: Path) -> None:
    """What bookies hold, and the metadata lack, comes back nevertheless."""
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        deleted, lost, kept = write(client), write(client), write(client)
    # The bookies have all three; those of the second were not deleted, but its metadata are lost with the deleted ids.
    fold(cluster.url, deleted)
    with closing(open_metadata(cluster.url, create=False)) as store:
        key = f"{LEDGERS_KEY}/{ledger_path(lost)}"
        node = store.get(key, latest=True)
        assert node is not None
        store.delete(key, node.version)
    damage(cluster.url, deleted_ids_key(deleted))
    directories = [tmp_path / f"bookie-{place}" for place in range(BOOKIES)]
    report = rebuild_metadata(cluster.url, directories, cluster_secret=SECRET, all_directories=True, write=True)
    assert lost in report.made
    assert any("it is made again" in note for note in report.notes)
    assert check_metadata(cluster.url, cluster_secret=SECRET).problems == ()
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        for ledger_id in (lost, kept):
            with client.open_ledger(ledger_id, password=b"p") as reader:
                assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
        assert write(client) > kept


def test_directories_that_were_put_back_do_not_bring_a_deleted_ledger_back(tmp_path: Path) -> None:
    """Nor do their bookies take the metadata for outdated, because no key is left of the ledger."""
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        deleted, kept = write(client), write(client)
    fold(cluster.url, deleted)
    with open_cluster(cluster.url, SECRET, create=False)[0] as metadata:
        assert metadata.is_folded(deleted)
    directories = [tmp_path / f"bookie-{place}" for place in range(BOOKIES)]
    report = rebuild_metadata(cluster.url, directories, cluster_secret=SECRET, all_directories=True)
    assert (report.made, report.deleted) == ((), ())
    with inside(tmp_path, count=BOOKIES) as cluster:
        client = cluster.connect()
        with pytest.raises(LedgerDeletedError):
            client.open_ledger(deleted, password=b"p")
        with client.open_ledger(kept, password=b"p") as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
        assert list(client.list_ledgers()) == [kept]
