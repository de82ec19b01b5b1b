"""What every metadata store does alike: the one in memory, LMDB, ZooKeeper."""

from __future__ import annotations

import threading

import pytest

from pybk.errors import (
    ClosedError,
    MetadataExistsError,
    MetadataUnreachableError,
    MetadataVersionError,
    UsageError,
)
from pybk.metadata.store import VALUE_BYTES_MAX, MetadataStore
from tests.metadata.harness import World
from tests.waiting import WAIT_S


def test_a_key_is_made_read_replaced_removed(world: World) -> None:
    store, other = world.open(), world.open()
    assert store.get("a/b/c") is None
    first = store.create("a/b/c", b"one")
    assert other.get("a/b/c", latest=True) == (b"one", first)
    second = other.put("a/b/c", b"two", first)
    assert second > first
    assert store.get("a/b/c", latest=True) == (b"two", second)
    store.delete("a/b/c", second)
    assert other.get("a/b/c", latest=True) is None
    assert store.get("a/b/c", latest=True) is None


def test_only_the_present_version_is_replaced_or_removed(world: World) -> None:
    store, other = world.open(), world.open()
    with pytest.raises(MetadataVersionError):
        store.put("key", b"x", 1)
    with pytest.raises(MetadataVersionError):
        store.delete("key", 1)
    first = store.create("key", b"one")
    with pytest.raises(MetadataExistsError):
        other.create("key", b"other")
    second = other.put("key", b"two", first)
    with pytest.raises(MetadataVersionError):
        store.put("key", b"three", first)
    with pytest.raises(MetadataVersionError):
        store.delete("key", first)
    assert store.get("key", latest=True) == (b"two", second)


def test_a_key_is_renamed_as_one_change(world: World) -> None:
    store, other = world.open(), world.open()
    first = store.create("logs/old", b"one")
    taken = store.create("logs/taken", b"taken")
    with pytest.raises(MetadataVersionError):
        other.rename("logs/old", "logs/new", b"two", first + 1)
    with pytest.raises(MetadataVersionError):
        other.rename("logs/absent", "logs/new", b"two", first)
    with pytest.raises(MetadataExistsError):
        other.rename("logs/old", "logs/taken", b"two", first)
    assert store.get_many(["logs/old", "logs/taken"]) == [(b"one", first), (b"taken", taken)]
    assert store.get("logs/new", latest=True) is None
    other.rename("logs/old", "logs/new", b"two", first)
    assert store.get("logs/old", latest=True) is None
    found = store.get("logs/new", latest=True)
    assert found is not None
    assert found.value == b"two"
    assert store.children("logs") == ["new", "taken"]
    second = store.create("logs/old", b"three")
    assert second != first
    store.put("logs/new", b"four", found.version)
    with pytest.raises(MetadataVersionError):
        other.rename("logs/old", "logs/again", b"five", first)
    store.delete("logs/old", second)


def test_a_version_is_never_that_of_a_key_made_again(world: World) -> None:
    store, other = world.open(), world.open()
    first = store.create("key", b"one", leased=True)
    other.delete("key", first)
    second = other.create("key", b"two")
    assert second != first
    with pytest.raises(MetadataVersionError):
        store.put("key", b"three", first)
    with pytest.raises(MetadataVersionError):
        store.delete("key", first)
    assert store.get("key", latest=True) == (b"two", second)


def test_one_of_many_threads_wins_each_version(world: World) -> None:
    stores = [world.open(), world.open()]
    stores[0].create("counter", b"0")
    wins: list[int] = []

    def count(number: int) -> None:
        store = stores[number % 2]
        for _ in range(10):
            while True:
                node = store.get("counter", latest=True)
                assert node is not None
                try:
                    store.put("counter", str(int(node.value) + 1).encode(), node.version)
                except MetadataVersionError:
                    continue
                wins.append(number)
                break

    threads = [threading.Thread(target=count, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    node = stores[0].get("counter", latest=True)
    assert node is not None
    assert node.value == b"40"
    assert len(wins) == 40


def test_many_keys_are_read_at_once(world: World) -> None:
    store = world.open()
    versions = {number: store.create(f"many/{number:03d}", b"v%d" % number) for number in range(0, 100, 2)}
    found = store.get_many([f"many/{number:03d}" for number in range(100)])
    expected = [(b"v%d" % number, versions[number]) if number % 2 == 0 else None for number in range(100)]
    assert found == expected
    assert store.get_many([]) == []


def test_a_recalled_value_is_the_one_before_the_last_own_change(world: World) -> None:
    store, other = world.open(), world.open()
    assert store.recall("recalled") is None
    version = other.create("recalled", b"0")
    for number in range(50):
        store.create(f"own/{number}", b"v")
        assert store.recall("recalled") == (b"%d" % number, version)
        version = other.put("recalled", b"%d" % (number + 1), version)
    other.delete("recalled", version)
    store.create("own/last", b"v")
    assert store.recall("recalled") is None


def test_children_are_the_names_right_below(world: World) -> None:
    store = world.open()
    assert store.children("top") == []
    for key in ("top/b", "top/a-b/x", "top/a/y", "top/a/z", "top/a.c", "top/é", "topper/q", "top-x"):
        store.create(key, b"v")
    assert store.children("top") == ["a", "a-b", "a.c", "b", "é"]
    assert store.children("top/a") == ["y", "z"]
    assert store.children("top/b") == []
    assert store.get("top") is None
    assert store.get("top/a") is None


def test_values_of_any_size_and_bytes(world: World) -> None:
    store = world.open()
    for number, value in enumerate((b"\0", bytes(range(256)), b"x" * VALUE_BYTES_MAX)):
        store.create(f"size/{number}", value)
        node = store.get(f"size/{number}")
        assert node is not None
        assert node.value == value


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "a\0b", "x" * 481])
def test_invalid_keys_are_refused(world: World, key: str) -> None:
    store = world.open()
    reads = store.get, store.recall, store.children
    for call in (*reads, lambda key: store.create(key, b"v"), lambda key: store.delete(key, 1)):
        with pytest.raises(UsageError):
            call(key)


@pytest.mark.parametrize("value", [b"", b"x" * (VALUE_BYTES_MAX + 1)])
def test_invalid_values_are_refused(world: World, value: bytes) -> None:
    store = world.open()
    with pytest.raises(UsageError):
        store.create("key", value)
    version = store.create("key", b"v")
    with pytest.raises(UsageError):
        store.put("key", value, version)


def test_leases_end_with_their_tree_and_nothing_else_does(world: World) -> None:
    store, other = world.open(), world.open()
    store.create("leased", b"v", leased=True)
    store.create("kept", b"v")
    other.create("others", b"v", leased=True)
    assert other.get("leased", latest=True) is not None
    store.close()
    assert world.wait_for(lambda: other.get("leased", latest=True) is None)
    assert other.get("kept", latest=True) is not None
    assert other.get("others", latest=True) is not None
    other.create("leased", b"w", leased=True)


def test_leases_end_with_their_session_and_watches_are_notified(world: World) -> None:
    store, other = world.open(), world.open()
    told: list[bool] = []
    store.on_session_end(lambda: told.append(True))
    other.on_session_end(lambda: pytest.fail("the other store's session lives on"))
    session = store.session()
    assert session == store.session()
    store.create("leased", b"v", leased=True)
    assert store.alive(session)
    world.end_session(store)
    assert world.wait_for(lambda: bool(told))
    assert other.get("leased", latest=True) is None
    assert not store.alive(session)
    fresh = store.session()
    assert fresh != session
    store.create("leased", b"w", leased=True)
    assert store.alive(fresh)
    assert other.get("leased", latest=True) is not None


def test_a_lease_that_is_replaced_stays_a_lease(world: World) -> None:
    store, other = world.open(), world.open()
    version = store.create("leased", b"v", leased=True)
    other.put("leased", b"w", version)
    store.close()
    assert world.wait_for(lambda: other.get("leased", latest=True) is None)


def test_watches_report_changes_again_and_again(world: World) -> None:
    store, other = world.open(), world.open()
    calls: list[object] = []
    watch = store.watch("dir/key", lambda: calls.append(store.get("dir/key", latest=True)))

    def told(expected: object) -> bool:
        return world.wait_for(lambda: bool(calls) and calls[-1] == expected)

    version = other.create("dir/key", b"one")
    assert told((b"one", version))
    version = other.put("dir/key", b"two", version)
    assert told((b"two", version))
    other.delete("dir/key", version)
    assert told(None)
    version = other.create("dir/key", b"three")
    assert told((b"three", version))
    watch.cancel()
    watch.cancel()
    seen = list(calls)
    rest: list[bool] = []
    store.watch("dir/key", lambda: rest.append(True))
    other.put("dir/key", b"four", version)
    assert world.wait_for(lambda: bool(rest))
    assert calls == seen


def test_watches_report_keys_that_are_created_and_deleted_below(world: World) -> None:
    store, other = world.open(), world.open()
    calls: list[list[str]] = []
    store.watch("dir", lambda: calls.append(store.children("dir")))
    for names in (["a"], ["a", "b"], ["a", "b", "c"]):
        other.create(f"dir/{names[-1]}", b"v", leased=True)
        assert world.wait_for(lambda names=names: bool(calls) and calls[-1] == names)  # type: ignore[misc]
    other.close()
    assert world.wait_for(lambda: calls[-1] == [])


def test_a_watch_may_use_the_tree_and_one_that_fails_harms_no_other(world: World) -> None:
    if hasattr(world, "server"):
        pytest.skip("the store in memory has no thread to protect")
    store, other = world.open(), world.open()
    done = threading.Event()

    def work() -> None:
        if store.get("copy") is None and (node := store.get("key", latest=True)) is not None:
            store.create("copy", node.value)
            done.set()

    store.watch("key", lambda: 1 / 0)  # type: ignore[arg-type]
    store.watch("key", work)
    other.create("key", b"v")
    assert done.wait(WAIT_S)
    assert other.get("copy", latest=True) is not None


class Fed:
    """What a feed reported: the keys since the last None, and how often None."""

    def __init__(self, store: MetadataStore, key: str) -> None:
        self.keys: set[str] = set()
        self.nones = 0
        self.watch = store.watch_below(key, self._take)

    def _take(self, keys: frozenset[str] | None) -> None:
        if keys is None:
            self.nones += 1
            self.keys.clear()
        else:
            assert keys, "a call without news"
            self.keys |= keys


def test_a_feed_reports_the_keys_below_that_were_created_changed_and_removed(world: World) -> None:
    store, other = world.open(), world.open()
    other.create("top/before", b"v")
    fed = Fed(store, "top")
    assert world.wait_for(lambda: fed.nones == 1)
    version = other.create("top/a/b/c", b"one")
    other.create("topper/a", b"v")
    other.create("other", b"v")
    assert world.wait_for(lambda: "top/a/b/c" in fed.keys)
    fed.keys.clear()
    version = store.put("top/a/b/c", b"two", version)
    assert world.wait_for(lambda: "top/a/b/c" in fed.keys)
    fed.keys.clear()
    other.delete("top/a/b/c", version)
    assert world.wait_for(lambda: "top/a/b/c" in fed.keys)
    assert {key for key in fed.keys if not key.startswith("top/")} == set()
    assert fed.nones == 1


def test_a_feed_reports_both_keys_of_a_rename_and_leases_that_end(world: World) -> None:
    store, other = world.open(), world.open()
    fed = Fed(store, "logs")
    assert world.wait_for(lambda: fed.nones == 1)
    version = other.create("logs/old", b"one")
    other.rename("logs/old", "logs/new", b"two", version)
    assert world.wait_for(lambda: {"logs/old", "logs/new"} <= fed.keys)
    other.create("logs/leased", b"v", leased=True)
    assert world.wait_for(lambda: "logs/leased" in fed.keys)
    fed.keys.clear()
    other.close()
    assert world.wait_for(lambda: "logs/leased" in fed.keys)
    assert not any("~" in key for key in fed.keys), "a guard of ZooKeeper is no key"


def test_feeds_and_watches_of_one_key_do_not_disturb_each_other(world: World) -> None:
    store, other = world.open(), world.open()
    first = Fed(store, "dir")
    calls: list[bool] = []
    store.watch("dir", lambda: calls.append(True))
    second = Fed(store, "dir/deep")
    assert world.wait_for(lambda: first.nones == second.nones == 1)
    for number in range(3):
        calls.clear()
        other.create(f"dir/{number}", b"v")
        assert world.wait_for(lambda: bool(calls))
        other.create(f"dir/deep/{number}", b"v")
        key = f"dir/deep/{number}"
        assert world.wait_for(lambda key=key: key in first.keys and key in second.keys)  # type: ignore[misc]
    assert {"dir/0", "dir/1", "dir/2"} <= first.keys
    assert all(key.startswith("dir/deep/") for key in second.keys)


def test_a_cancelled_feed_reports_no_more_and_a_new_one_begins_with_everything(world: World) -> None:
    store, other = world.open(), world.open()
    fed = Fed(store, "dir")
    assert world.wait_for(lambda: fed.nones == 1)
    fed.watch.cancel()
    fed.watch.cancel()
    following = Fed(store, "dir")
    assert world.wait_for(lambda: following.nones == 1)
    other.create("dir/a", b"v")
    assert world.wait_for(lambda: "dir/a" in following.keys)
    assert (fed.nones, fed.keys) == (1, set())


def test_a_feed_that_could_not_be_handled_is_repeated(world: World) -> None:
    store, other = world.open(), world.open()
    calls: list[frozenset[str] | None] = []

    def fail_twice(keys: frozenset[str] | None) -> None:
        calls.append(keys)
        if len(calls) < 3:
            raise MetadataUnreachableError("not reached")

    store.watch_below("dir", fail_twice)
    assert world.wait_for(lambda: len(calls) == 3)
    assert calls == [None, None, None]
    other.create("dir/a", b"v")
    assert world.wait_for(lambda: calls[-1] is not None and "dir/a" in calls[-1])


@pytest.mark.parametrize("key", ["", "/a", "a/"])
def test_a_feed_of_an_invalid_key_is_refused(world: World, key: str) -> None:
    with pytest.raises(UsageError):
        world.open().watch_below(key, lambda keys: None)


def test_calls_of_a_closed_store_raise(world: World) -> None:
    store = world.open()
    store.create("key", b"v")
    store.close()
    store.close()
    for call in (
        lambda: store.get("key"),
        lambda: store.create("other", b"v"),
        lambda: store.put("key", b"v", 1),
        lambda: store.delete("key", 1),
        lambda: store.children("key"),
        lambda: store.watch_below("key", lambda keys: None),
    ):
        with pytest.raises(ClosedError):
            call()
    assert not store.alive(1)
