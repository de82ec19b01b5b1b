"""What a bookie's directory keeps for the loss of the metadata store, and how a bookie judges the store's age."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pybk import CorruptError, FeatureLevel, MetadataOutdatedError
from pybk.bookie import metadata_age
from pybk.bookie.directory_identity import (
    DELETED_KEY,
    DELETIONS_MAX,
    SEEN_KEY,
    SeenEpoch,
    decode_deletions,
    encode_deletions,
)
from pybk.bookie.metadata_age import AgeWatch
from pybk.bookie.replicas import Replicas
from pybk.config import StoreConfig
from pybk.manager.connect import open_cluster
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.epochs import MetadataEpoch
from pybk.metadata.url import open_metadata
from tests.cluster.inside import SECRET, inside, make_cluster
from tests.metadata.records import ledger
from tests.storage.real_store import QUICK

SEEN = SeenEpoch(MetadataEpoch(1_700_000_000_000, 9, limbo=True), 17, liftable=True)


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[ClusterMetadata]:
    with open_cluster(make_cluster(tmp_path), SECRET, create=False)[0] as metadata:
        yield metadata


def directory(path: Path) -> Replicas:
    return Replicas.open(str(path / "bookie"), config=StoreConfig(**QUICK))


def test_a_directory_keeps_what_was_seen_and_deleted_over_restarts(tmp_path: Path) -> None:
    replicas = directory(tmp_path)
    replicas.record_start(b"c" * 16, "one", b"i" * 16, about=b"about")
    assert (replicas.seen, replicas.deleted) == (None, {})
    replicas.note_seen(SEEN)
    replicas.remember_deleted({3: b"proof of 3", 4: b""})
    replicas.remember_deleted({3: b"another"})
    replicas.close()
    for boots in (2, 3):
        replicas = directory(tmp_path)
        assert (replicas.seen, replicas.about) == (SEEN, b"about")
        assert list(replicas.deleted.items()) == [(4, b""), (3, b"another")]
        assert replicas.record_start(b"c" * 16, "one", b"i" * 16, about=b"about") == boots
        replicas.close()


def test_the_newest_deletions_are_remembered(tmp_path: Path) -> None:
    replicas = directory(tmp_path)
    replicas.record_start(b"c" * 16, "one", b"i" * 16)
    replicas.remember_deleted({number: bytes(64) for number in range(DELETIONS_MAX)})
    replicas.remember_deleted({DELETIONS_MAX: bytes(64)})
    assert list(replicas.deleted) == list(range(1, DELETIONS_MAX + 1))
    replicas.close()


def test_damaged_records_of_a_directory_are_refused() -> None:
    whole = {SEEN_KEY: SEEN.encode(), DELETED_KEY: encode_deletions({5: b"proof"})}
    metadata = replace(ledger(1), custom_metadata=whole)
    assert (SeenEpoch.of(metadata), decode_deletions(metadata)) == (SEEN, {5: b"proof"})
    for damaged in (b"{}", b"[]", SEEN.encode() + b" ", b"\xff"):
        with pytest.raises(CorruptError):
            SeenEpoch.of(replace(ledger(1), custom_metadata={SEEN_KEY: damaged}))
    with pytest.raises(CorruptError):
        decode_deletions(replace(ledger(1), custom_metadata={DELETED_KEY: b"no deletions"}))
    older = replace(ledger(1), custom_metadata={})
    assert (SeenEpoch.of(older), decode_deletions(older)) == (None, {})


def test_ticks_grow_while_bookies_run_and_by_one_of_them(
    metadata: ClusterMetadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata_age, "GROW_SECONDS", 0.0)
    replicas = directory(tmp_path)
    replicas.seen = SeenEpoch(metadata.grow_epoch())
    kept: list[SeenEpoch] = []
    watches = [AgeWatch(metadata, replicas, kept.append) for _ in range(2)]
    assert not watches[0].look()
    assert metadata.read_epoch() == MetadataEpoch(0, 2)
    assert not watches[1].look()
    assert [seen.epoch.ticks for seen in kept] == [2, 2]
    metadata.begin_epoch(limbo=False)  # restored by choice: that is for the next start
    assert not watches[0].look()
    assert len(kept) == 2
    replicas.close()


def test_an_older_epoch_is_recorded_in_the_store_and_refused(metadata: ClusterMetadata, tmp_path: Path) -> None:
    replicas = directory(tmp_path)
    replicas.seen = SeenEpoch(MetadataEpoch(0, 5))
    metadata.grow_epoch()
    watch = AgeWatch(metadata, replicas, lambda seen: None)
    assert watch.look()
    assert isinstance(watch.error, MetadataOutdatedError)
    with pytest.raises(MetadataOutdatedError, match=r"its epoch is 0/1.*has seen 0/5"):
        metadata.check_not_outdated()
    metadata.clear_outdated()
    metadata.check_not_outdated()
    replicas.close()


def test_numbers_of_epochs_grow_even_if_the_clock_does_not(metadata: ClusterMetadata) -> None:
    far = 1 << 50
    first = metadata.begin_epoch(limbo=True, above=far)
    assert (first.number, first.ticks, first.limbo) == (far + 1, 1, True)
    assert metadata.begin_epoch(limbo=False).number == far + 2
    assert metadata.grow_epoch() == MetadataEpoch(far + 2, 2)


def test_a_directory_of_another_cluster_marks_nothing(tmp_path: Path) -> None:
    with inside(tmp_path / "one", count=1), inside(tmp_path / "two", count=1) as two:
        pass
    store = open_metadata(two.url)
    replicas = Replicas.open(str(tmp_path / "one" / "bookie-0"), config=StoreConfig(**QUICK))
    with open_cluster(two.url, SECRET, create=False)[0] as metadata:
        assert metadata_age.check_age(replicas, metadata) is None
        metadata.check_not_outdated()
    replicas.close()
    store.close()


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("level", [FeatureLevel.BASE, FeatureLevel.SEALS])
def test_a_cluster_without_an_epoch_gets_one_and_goes_on(tmp_path: Path, level: FeatureLevel) -> None:
    with inside(tmp_path, level=level) as cluster, cluster.connect().create_ledger(password=b"p") as writer:
        writer.append(b"entry")
    store = open_metadata(cluster.url)
    node = store.get("epoch")
    assert node is not None
    store.close()
    for place in range(3):  # as a pybk left them that knows no epochs
        replicas = Replicas.open(str(tmp_path / f"bookie-{place}"), config=StoreConfig(**QUICK))
        identity = replicas.identity
        assert identity is not None
        replicas.seen = None
        replicas.record_start(identity.cluster_id, identity.bookie_id, identity.instance, about=replicas.about)
        replicas.close()
    store = open_metadata(cluster.url)
    store.delete("epoch", node.version)
    store.close()
    with inside(tmp_path, level=level) as cluster, cluster.connect() as client:
        assert cluster.bookies[0].health().state != "in_limbo"
        with client.open_ledger(writer.ledger_id, password=b"p") as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
    with open_cluster(cluster.url, SECRET, create=False)[0] as metadata:
        assert metadata.read_epoch() == MetadataEpoch(0, 3)
