"""What a feed collects until it reports it, and the ring of recent changes of an LMDB store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pybk.errors import MetadataExistsError
from pybk.metadata import change_feed, lmdb_changes, lmdb_rows
from pybk.metadata.change_feed import ChangeFeed
from pybk.metadata.lmdb_changes import NotedWrites, changed_keys
from pybk.metadata.lmdb_rows import StoredValue
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.storage.io.lmdb_environment import LmdbEnvironment
from tests.metadata.harness import Mirror, versions_below, wait_for
from tests.metadata.test_lmdb_store import LONG_SESSION_S, child, line_of
from tests.waiting import WAIT_S

Calls = list[frozenset[str] | None]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbMetadataStore]:
    """A store."""
    store = LmdbMetadataStore(str(tmp_path / "metadata"), timeout_s=WAIT_S, lease_time_s=LONG_SESSION_S)
    yield store
    store.close()


def test_a_feed_collects_the_keys_below_and_reports_each_once() -> None:
    calls: Calls = []
    feed = ChangeFeed("a", calls.append)
    feed.report()
    assert calls == [None]
    assert not feed.note(["a", "ab/c", "b"])
    feed.report()
    assert feed.note(["a/b", "a/b/c", "a/b", "b"])
    feed.report()
    feed.report()
    assert calls == [None, {"a/b", "a/b/c"}]


def test_a_feed_of_too_many_keys_reports_none_and_keeps_none_of_them() -> None:
    calls: Calls = []
    feed = ChangeFeed("a", calls.append)
    feed.report()
    feed.note(f"a/{number}" for number in range(change_feed.KEYS_MAX))
    feed.report()
    assert calls[-1] is not None
    assert len(calls[-1]) == change_feed.KEYS_MAX
    for number in range(change_feed.KEYS_MAX + 1):
        feed.note((f"a/{number}",))
    assert feed.note(("b",)), "there is None to report"
    feed.report()
    assert calls[-1] is None


@pytest.mark.parametrize("later", [["a/2"], None])
def test_what_a_callback_could_not_handle_is_reported_again(later: list[str] | None) -> None:
    calls: Calls = []
    errors = [None, MetadataExistsError("no"), KeyboardInterrupt(), None]

    def take(keys: frozenset[str] | None) -> None:
        calls.append(keys)
        error = errors.pop(0)
        if error is not None:
            raise error

    feed = ChangeFeed("a", take)
    feed.report()
    feed.note(["a/1"])
    with pytest.raises(MetadataExistsError):
        feed.report()
    feed.note(later)
    with pytest.raises(KeyboardInterrupt):
        feed.report()
    feed.report()
    expected: Calls = [None, frozenset({"a/1"})]
    expected += 2 * [None if later is None else frozenset({"a/1", "a/2"})]
    assert calls == expected


def test_reading_everything_again_takes_half_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(change_feed, "time", SimpleNamespace(monotonic=lambda: now))
    takes_s = 0.1

    def read(keys: frozenset[str] | None) -> None:
        nonlocal now
        now += takes_s

    feed = ChangeFeed("a", read)
    assert feed.rest_s() == 0
    feed.report()
    feed.note(["a/1"])
    assert feed.rest_s() == 0, "known keys are reported at once"
    feed.note(None)
    assert feed.rest_s() == pytest.approx(change_feed.REST_S)
    now += 10
    assert feed.rest_s() == 0
    takes_s = 20.0
    feed.report()
    feed.note(None)
    now += 5
    assert feed.rest_s() == pytest.approx(15)


def keys_since(store: LmdbMetadataStore, path: Path, after: int) -> list[str] | None:
    """Return what the ring of a store says of the changes after one."""
    environment = LmdbEnvironment(str(path / "metadata"))
    with environment.read() as transaction:
        found = changed_keys(transaction, after, lmdb_rows.last_number(transaction))
    environment.close()
    return found


def test_the_ring_has_the_keys_of_the_last_changes_and_no_more(
    store: LmdbMetadataStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_changes, "BLOCKS", 2)
    versions: list[int] = []
    for made in range(100):
        versions.append(store.create(f"dir/{made}", b"v"))
        for newest in range(min(made, 40)):
            found = keys_since(store, tmp_path, versions[-1] - newest)
            # Two whole blocks, and what the tail has of the one that is not whole.
            if newest > 2 * lmdb_changes.BLOCK:
                assert found is None
            else:
                assert found == [f"dir/{number}" for number in range(made + 1 - newest, made + 1)]
    assert keys_since(store, tmp_path, versions[-1] + 1) is None, "the store was put back to an older state"
    store.session()
    assert keys_since(store, tmp_path, versions[-1]) == []
    with pytest.raises(MetadataExistsError):
        store.create("dir/1", b"v")
    assert keys_since(store, tmp_path, versions[-1]) == [], "no change"


def test_a_change_of_more_keys_than_fit_into_a_row_is_missed(store: LmdbMetadataStore, tmp_path: Path) -> None:
    last = store.create("last", b"v")

    def change(transaction: NotedWrites, number: int) -> None:
        for name in range(200):
            lmdb_rows.put_value(
                transaction, lmdb_rows.node_name(f"many/of/them/{name}"), StoredValue(number, number, 0, b"v")
            )

    for _ in range(20):
        last = store.create(f"last/{last}", b"v")
        store.change(change)  # type: ignore[arg-type]
        assert keys_since(store, tmp_path, last - 1) is None
        assert keys_since(store, tmp_path, last) is None
        assert keys_since(store, tmp_path, last + 1) == []
    for _ in range(20):
        key = f"last/{'long/' * 90}{last}"
        last = store.create(key, b"v")
        assert keys_since(store, tmp_path, last - 1) == [key]


def change_as_older_versions_do(path: Path, key: str) -> None:
    """Create a key as processes do whose version of pybk keeps no ring."""
    environment = LmdbEnvironment(str(path / "metadata"))
    with environment.write() as transaction:
        number = lmdb_rows.last_number(transaction) + 1
        lmdb_rows.put_value(transaction, lmdb_rows.node_name(key), StoredValue(number, number, 0, b"v"))
        lmdb_rows.put_last_number(transaction, number)
    environment.close()


def test_changes_of_older_versions_are_missed_and_noticed(store: LmdbMetadataStore, tmp_path: Path) -> None:
    mirror = Mirror(store, "dir")
    assert wait_for(lambda: mirror.nones == 1)
    store.create("dir/a", b"v")
    change_as_older_versions_do(tmp_path, "dir/b")
    store.create("dir/c", b"v")
    assert wait_for(lambda: set(mirror.versions) == {"dir/a", "dir/b", "dir/c"})
    assert mirror.nones == 2
    change_as_older_versions_do(tmp_path, "dir/d")
    assert wait_for(lambda: len(mirror.versions) == 4)
    nones = mirror.nones
    store.create("dir/e", b"v")
    assert wait_for(lambda: "dir/e" in mirror.versions)
    assert mirror.nones == nones, "the changes of this version are known again"


@pytest.mark.parametrize("name", [b"d", b"e"])
def test_a_damaged_row_of_recent_changes_is_a_missed_change(
    store: LmdbMetadataStore, tmp_path: Path, name: bytes
) -> None:
    last = store.create("dir/first", b"v")
    while last < 2 * lmdb_changes.BLOCK or last % lmdb_changes.BLOCK != 2:
        last = store.create(f"dir/{last}", b"v")
    if name == b"e":
        name += (last // lmdb_changes.BLOCK - 1).to_bytes(2, "big")
        last -= 6
    assert keys_since(store, tmp_path, last - 1) is not None
    environment = LmdbEnvironment(str(tmp_path / "metadata"))
    with environment.write() as transaction:
        data = transaction.get(name)
        assert data is not None
        transaction.put(name, data[:-1] + b"c")
    environment.close()
    assert keys_since(store, tmp_path, last - 1) is None
    last = store.create("dir/next", b"v")
    assert keys_since(store, tmp_path, last - 1) == ["dir/next"]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("blocks", [lmdb_changes.BLOCKS, 1], ids=["all", "few"])
def test_a_mirror_that_is_kept_by_a_feed_equals_what_processes_left(
    store: LmdbMetadataStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    monkeypatch.setattr(lmdb_changes, "BLOCKS", blocks)  # here alone: to this process the rows of others seem stale
    mirror = Mirror(store, "churn")
    assert wait_for(lambda: mirror.nones == 1)
    path = tmp_path / "metadata"
    with child(path, "churn") as one, child(path, "churn") as two, child(path, "churn") as killed:
        # With few blocks changes are missed, and reading all again is reported once a second at the most: once in all
        # where the disk is that quick.
        assert wait_for(lambda: mirror.reported > 50 if blocks > 1 else mirror.reported + mirror.nones > 1)
        killed.kill()
        assert line_of(one) == line_of(two) == "done"
        killed.wait()
        for each in (one, two):
            each.kill()
            each.wait()
    # Reading ends the leases of killed processes, which are changes, too.
    assert wait_for(lambda: mirror.versions == versions_below(store, "churn"))
    assert len(mirror.versions) > 50
    if blocks > 1:
        assert mirror.nones == 1, "no change was missed"
        assert mirror.reported > 100
