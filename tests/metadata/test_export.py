"""Exports of metadata, and the check of a store or an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pybk import CorruptError, MetadataForgedError, UsageError, check_metadata, export_metadata, restore_metadata
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.manager.connect import open_cluster
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.url import open_metadata
from tests.cluster.inside import SECRET, make_cluster
from tests.metadata.records import bookie, ledger


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A cluster with a bookie, a closed ledger, a tombstone, a mark and a pointer."""
    url = make_cluster(tmp_path)
    with metadata_of(url) as metadata:
        metadata.claim_cookie(bookie(1))
        made = replace(ledger(metadata.new_ledger_id()), state=LedgerState.OPEN)
        metadata.create_ledger(made)
        deleted = replace(made, ledger_id=metadata.new_ledger_id())
        metadata.delete_ledger(deleted.ledger_id, metadata.create_ledger(deleted), b"proof")
        metadata.mark_under_replicated(made.ledger_id, bookie(1), 0)
        metadata.write_pointer("logs", "a", b"value", None)
        metadata.grow_epoch()
    return url


def metadata_of(url: str) -> ClusterMetadata:
    return open_cluster(url, SECRET, create=False, mending=True)[0]


def contents(url: str) -> dict[str, bytes]:
    store = open_metadata(url)
    found = {key: node.value for key, node in store.walk()}
    store.close()
    return found


def test_an_export_is_restored_byte_by_byte(url: str, tmp_path: Path) -> None:
    made = export_metadata(url, tmp_path / "export", cluster_secret=SECRET)
    assert (made.values, made.ledgers) == (len(contents(url)), 2)
    assert SECRET not in (tmp_path / "export").read_bytes()
    assert (tmp_path / "export").stat().st_mode & 0o777 == 0o600
    other = f"lmdb://{tmp_path}/other"
    options: dict[str, Any] = {"cluster_secret": SECRET, "new_epoch": False}
    assert not restore_metadata(other, tmp_path / "export", **options).written
    assert not (tmp_path / "other").exists()
    assert restore_metadata(other, tmp_path / "export", write=True, **options).values == made.values
    assert contents(other) == contents(url)
    with pytest.raises(UsageError, match="is not empty"):
        restore_metadata(other, tmp_path / "export", write=True, **options)


def test_an_export_overwrites_nothing_and_leaves_nothing_behind(url: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is not overwritten"):
        export_metadata(url, tmp_path / "there", cluster_secret=SECRET)
    with pytest.raises(MetadataForgedError):
        export_metadata(url, tmp_path / "new", cluster_secret=b"another secret of the same length")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("how", ["cut", "bit", "more", "line", "other"])
def test_an_export_that_was_changed_is_refused(url: str, tmp_path: Path, how: str) -> None:
    path = tmp_path / "export"
    export_metadata(url, path, cluster_secret=SECRET)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    path.write_bytes(
        {
            "cut": b"".join(lines[:-1]),
            "bit": data.replace(b'"key":"ids"', b'"key":"idx"'),
            "more": data + b"{}\n",
            "line": b"".join(lines[:2] + lines[3:]),
            "other": b"{}\n",
        }[how]
    )
    for call in (check_metadata, lambda path, **secret: restore_metadata(f"lmdb://{tmp_path}/new", path, **secret)):
        with pytest.raises(CorruptError):
            call(path, cluster_secret=SECRET)


def test_a_restore_that_was_stopped_is_repeated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_metadata(url, tmp_path / "export", cluster_secret=SECRET)
    other = f"lmdb://{tmp_path}/other"

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ClusterMetadata, "raise_ids", stop)
        with pytest.raises(KeyboardInterrupt):
            restore_metadata(other, tmp_path / "export", cluster_secret=SECRET, write=True)
    assert "outdated" in contents(other)
    assert restore_metadata(other, tmp_path / "export", cluster_secret=SECRET, write=True).epoch
    assert "outdated" not in contents(other)
    assert contents(other).keys() == contents(url).keys()


def test_a_sound_store_has_no_problems_and_its_export_neither(url: str, tmp_path: Path) -> None:
    export_metadata(url, tmp_path / "export", cluster_secret=SECRET)
    found = check_metadata(url, cluster_secret=SECRET)
    assert found == check_metadata(tmp_path / "export", cluster_secret=SECRET)
    assert (found.ledgers, found.not_closed, found.tombstones, found.bookies, found.unknown) == (1, 1, 1, 1, 0)
    assert (found.epoch, found.next_id) == ("0/1", 1000)
    assert found.problems == ()
    with pytest.raises(MetadataForgedError):
        check_metadata(url, cluster_secret=b"another secret of the same length")


def test_what_is_wrong_or_refers_to_nothing_is_named(url: str) -> None:
    with metadata_of(url) as metadata:
        metadata.mark_under_replicated(77, bookie(1), 0)
        metadata.create_ledger(replace(ledger(5000), state=LedgerState.OPEN))
        metadata.note_outdated("a reason")
    store = open_metadata(url)
    (cookie,) = (each for each in store.walk() if each[0].startswith("cookies/"))
    store.delete(cookie[0], cookie[1].version)
    key = next(key for key, _ in store.walk() if key.startswith("pointers/"))
    node = store.get(key)
    assert node is not None
    store.put(key, node.value[:-1] + b"!", node.version)
    store.create("ledgers/000/0000/0000/0000/0077", node.value)
    store.create("future/value", b"anything")
    store.close()
    found = check_metadata(url, cluster_secret=SECRET)
    assert found.unknown == 1
    problems = {problem.key.partition("/")[0]: problem.problem for problem in found.problems}
    assert problems.keys() == {"pointers", "ledgers", "underreplicated", "outdated"}
    assert "ledger 77 does not exist" in problems["underreplicated"]
    assert "not written with the cluster secret" in problems["pointers"]
    assert "a reason" in problems["outdated"]
    text = " ".join(found.notes)
    assert "there is a ledger 5000" in text
    assert f"{Bookie(*bookie(1))}, which does not belong" in text
