"""ZooKeeper as a metadata store: a server that stops, dies, forgets, and sessions that end."""

from __future__ import annotations

import itertools
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from urllib.parse import urlsplit

import pytest

from pybk.errors import (
    ForkedProcessError,
    LedgerDeletedError,
    LedgerExistsError,
    MetadataError,
    MetadataUnreachableError,
    MetadataVersionError,
)
from pybk.metadata.locks import Election
from pybk.metadata.store import MetadataStore, Node
from pybk.metadata.url import open_metadata
from tests.internals import receive_event, set_call_time
from tests.metadata.harness import Mirror, end_zookeeper_session, versions_below, wait_for
from tests.metadata.records import bookie, cluster_on, ledger, registration
from tests.ports import free_port
from tests.waiting import WAIT_S
from tests.zookeeper_server import LONG_SESSION_S, SHORT_SESSION_S, ZooKeeperServer, missing

if missing() is None:
    from kazoo.protocol.serialization import int_struct, write_string

    from pybk.metadata import zookeeper_feed, zookeeper_store
    from pybk.metadata.zookeeper_known import KNOWN_MAX, KnownValues
    from pybk.metadata.zookeeper_store import ZooKeeperMetadataStore

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.sampled(one_in=4, using="zookeeper_server"),
]

CALL_S = 1.5


class Proxy:
    """A proxy between a client and the server, which can lose the bytes of one direction.

    A connection that has lost bytes passes none after them, as TCP does: the client has to make another one.
    """

    def __init__(self, server: ZooKeeperServer) -> None:
        self._server = ("127.0.0.1", int(server.host.rpartition(":")[2]))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.lose_replies = False
        self.lose_requests = False
        self.lost = 0
        """How often bytes of a connection were lost."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._pairs.append((client, server))
            threading.Thread(target=self._pass_on, args=(client, server, "lose_requests"), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(server, client, "lose_replies"), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, lose: str) -> None:
        loses = False
        try:
            while data := source.recv(65536):
                loses = loses or getattr(self, lose)
                if loses:
                    self.lost += 1
                else:
                    target.sendall(data)
        except OSError:
            return
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)  # the other thread may wait for bytes of it, and so keep it open
                end.close()

    def cut(self) -> None:
        """Cut all connections; new ones work."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()
        self.cut()


class SilentClient:
    """A connection as ``KnownValues`` takes it, on which nothing happens by itself."""

    def __init__(self) -> None:
        self._connection = self

    def _read_watch_event(self, data: bytes, offset: int) -> None:
        """Take an event."""

    def exists_async(self, path: str, watch: object) -> None:
        """Ask for a watch."""

    def get_async(self, path: str) -> None:
        """Ask for a value."""


@pytest.fixture
def proxy(zookeeper_server: ZooKeeperServer) -> Iterator[Proxy]:
    """A way to the server that can be cut."""
    proxy = Proxy(zookeeper_server)
    yield proxy
    proxy.close()


@pytest.fixture
def session_s(request: pytest.FixtureRequest) -> float:
    """The lease time of the store through the proxy: longer than any break on a busy machine, or as a test says."""
    return float(getattr(request, "param", LONG_SESSION_S))


@pytest.fixture
def through(
    proxy: Proxy, zookeeper_server: ZooKeeperServer, session_s: float
) -> Iterator[tuple[MetadataStore, MetadataStore]]:
    """A store through the proxy, and one with the same path that bypasses it."""
    url = zookeeper_server.url()
    store = open_metadata(url.replace(zookeeper_server.host, proxy.host), lease_time_s=session_s, timeout_s=WAIT_S)
    local_reader = open_metadata(url, timeout_s=WAIT_S)
    yield store, local_reader
    proxy.lose_replies = proxy.lose_requests = False
    store.close()
    local_reader.close()


def lose_once(proxy: Proxy, lost: str) -> None:
    """Have a proxy lose bytes, and then work again on new connections, in another thread."""
    before = proxy.lost

    def heal() -> None:
        wait_for(lambda: proxy.lost > before)
        setattr(proxy, lost, False)
        proxy.cut()

    setattr(proxy, lost, True)
    threading.Thread(target=heal, daemon=True).start()


@pytest.mark.parametrize("lost", ["lose_replies", "lose_requests"])
def test_a_lost_answer_is_unknown_and_settled(
    lost: str, proxy: Proxy, through: tuple[MetadataStore, MetadataStore]
) -> None:
    store, local_reader = through
    store.create("there", b"v")
    lose_once(proxy, lost)
    with pytest.raises(MetadataUnreachableError) as unknown:
        store.create("key", b"v")
    assert unknown.value.outcome_unknown
    assert (store.get("key", latest=True) is not None) == (lost == "lose_replies")
    cluster, other = cluster_on(store), cluster_on(local_reader)
    lose_once(proxy, lost)
    version = cluster.create_ledger(ledger(1))
    assert other.read_ledger(1) == (ledger(1), version)
    lose_once(proxy, lost)
    version = cluster.write_ledger(ledger(1, length=5, version=1), version)
    assert other.read_ledger(1) == (ledger(1, length=5, version=1), version)
    lose_once(proxy, lost)
    with pytest.raises(LedgerExistsError):
        cluster.create_ledger(ledger(1, key_salt=b"z" * 16))
    lose_once(proxy, lost)
    cluster.delete_ledger(1, version)
    with pytest.raises(LedgerDeletedError):
        other.read_ledger(1)


def test_reads_continue_after_a_lost_connection(proxy: Proxy, through: tuple[MetadataStore, MetadataStore]) -> None:
    store, _ = through
    version = store.create("dir/key", b"v")
    for _ in range(3):
        proxy.cut()
        assert store.get("dir/key") == (b"v", version)
        proxy.cut()
        assert store.children("dir") == ["key"]
        proxy.cut()
        assert store.get_many(["dir/key", "no"]) == [(b"v", version), None]


def test_a_value_that_does_not_change_is_recalled_without_a_request(
    proxy: Proxy, through: tuple[MetadataStore, MetadataStore]
) -> None:
    store, _ = through
    version = store.create("key", b"value")
    assert [store.recall("key"), store.recall("none")] == [(b"value", version), None]
    proxy.lose_requests = True
    assert [store.recall("key"), store.recall("none")] == [(b"value", version), None]


def test_a_recalled_value_is_read_again_after_a_lost_connection(
    proxy: Proxy, through: tuple[MetadataStore, MetadataStore]
) -> None:
    store, local_reader = through
    version = local_reader.create("key", b"0")
    assert [store.recall("key"), store.recall("none")] == [(b"0", version), None]
    for number in range(3):
        proxy.cut()
        version = local_reader.put("key", b"%d" % (number + 1), version)
        assert store.get("key", latest=True) == (b"%d" % (number + 1), version)
        assert store.recall("key") == (b"%d" % (number + 1), version)
    proxy.cut()
    version = local_reader.create("none", b"some")
    assert store.get("none", latest=True) == (b"some", version)
    assert store.recall("none") == (b"some", version)


def test_a_value_that_changes_while_it_is_read_is_not_known() -> None:
    client = SilentClient()
    known = KnownValues(client)
    path = "/root/key"

    def change() -> None:
        changed, connected = int_struct.pack(3), int_struct.pack(3)
        receive_event(client, changed + connected + write_string(path))

    def read_late(_: object) -> Node:
        change()
        return Node(b"old", 1)

    assert known.read(path, lambda _: None, read_late) == (b"old", 1)
    assert known.find(path) is None
    assert known.read(path, lambda _: None, lambda _: Node(b"new", 2)) == (b"new", 2)
    found = known.find(path)
    assert found is not None
    assert found.node == (b"new", 2)
    change()
    assert known.find(path) is None


def test_values_that_are_known_do_not_pile_up() -> None:
    known = KnownValues(SilentClient())
    for number in range(3 * KNOWN_MAX):
        known.read(f"/root/{number}", lambda _: None, lambda _: None)
        assert known.find(f"/root/{number}") is not None
    assert sum(known.find(f"/root/{number}") is not None for number in range(3 * KNOWN_MAX)) <= KNOWN_MAX


def test_a_lost_connection_ends_no_session_and_misses_no_change(
    proxy: Proxy, through: tuple[MetadataStore, MetadataStore]
) -> None:
    store, local_reader = through
    ended: list[bool] = []
    store.on_session_end(lambda: ended.append(True))
    session = store.session()
    store.create("leased", b"v", leased=True)
    seen: list[object] = []
    store.watch("key", lambda: seen.append(store.get("key", latest=True)))
    lose_once(proxy, "lose_replies")
    version = local_reader.create("key", b"v")
    assert wait_for(lambda: seen[-1:] == [(b"v", version)])
    assert store.session() == session
    assert store.alive(session)
    assert not ended
    version = local_reader.put("key", b"w", version)
    assert wait_for(lambda: seen[-1:] == [(b"w", version)])
    assert local_reader.get("leased", latest=True) is not None


@pytest.mark.parametrize("session_s", [SHORT_SESSION_S], indirect=True)
def test_a_silent_connection_ends_the_session_and_the_bookie_comes_back(
    proxy: Proxy, through: tuple[MetadataStore, MetadataStore], caplog: pytest.LogCaptureFixture
) -> None:
    store, local_reader = through
    cluster, other = cluster_on(store), cluster_on(local_reader)
    cluster.claim_cookie(bookie(1))
    registered = cluster.register(registration(bookie(1)))
    session = store.session()
    proxy.lose_replies = proxy.lose_requests = True
    assert wait_for(lambda: other.list_bookies() == [])
    assert not store.alive(session), "known here no later than there"
    proxy.lose_replies = proxy.lose_requests = False
    proxy.cut()
    assert wait_for(lambda: [found.bookie for found in other.list_bookies()] == [bookie(1)])
    assert wait_for(lambda: registered.registered)
    assert sum("the registration is gone" in line for line in caplog.messages) == 1
    assert store.session() != session


def test_calls_end_at_their_deadline_while_the_server_is_stopped(zookeeper_server: ZooKeeperServer) -> None:
    # The session is long: after a third of it without an answer the connection would be ended, and the put be lost.
    store = open_metadata(zookeeper_server.url(), lease_time_s=LONG_SESSION_S, timeout_s=WAIT_S)
    version = store.create("key", b"v")
    set_call_time(store, CALL_S)  # only now: the first calls of a busy machine take longer
    zookeeper_server.pause()
    try:
        for unknown, call in (
            (False, lambda: store.get("key")),
            (True, lambda: store.put("key", b"w", version)),
        ):
            began = time.monotonic()
            with pytest.raises(MetadataUnreachableError) as refused:
                call()
            assert time.monotonic() - began < WAIT_S
            assert refused.value.outcome_unknown is unknown
    finally:
        zookeeper_server.resume()
    set_call_time(store, WAIT_S)
    assert wait_for(lambda: store.get("key", latest=True) == (b"w", version + 1)), "it was under way"
    store.close()


def test_the_error_without_a_server_names_its_address() -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(MetadataUnreachableError, match=f"127.0.0.1:{port}") as refused:
        open_metadata(f"zk://127.0.0.1:{port}/pybk", timeout_s=0.5)
    assert time.monotonic() - began < WAIT_S
    assert not refused.value.outcome_unknown


@pytest.mark.long
def test_requests_that_were_not_sent_are_known_to_have_failed() -> None:
    server = ZooKeeperServer()
    try:
        server.start()
        store = open_metadata(server.url(), timeout_s=WAIT_S, lease_time_s=SHORT_SESSION_S)
        assert isinstance(store, ZooKeeperMetadataStore)
        connected = store.connected
        version = store.create("key", b"v")
        server.kill()
        assert wait_for(lambda: not connected.is_set())
        set_call_time(store, CALL_S)
        with pytest.raises(MetadataUnreachableError) as refused:
            store.put("key", b"w", version)
        assert not refused.value.outcome_unknown
        server.start()
        assert wait_for(connected.is_set)
        set_call_time(store, WAIT_S)
        assert store.get("key", latest=True) == (b"v", version), "acknowledged means on disk"
        store.close()
    finally:
        server.close()


def put(store: MetadataStore, version: int) -> None:
    store.put("logs/old", b"late", version, reused=True)


def delete(store: MetadataStore, version: int) -> None:
    store.delete("logs/old", version, reused=True)


def rename(store: MetadataStore, version: int) -> None:
    store.rename("logs/old", "logs/new", b"late", version)


@pytest.mark.parametrize("change", [put, delete, rename])
def test_a_late_change_spares_a_key_that_was_made_again(
    zookeeper_server: ZooKeeperServer, change: Callable[[MetadataStore, int], None]
) -> None:
    url = zookeeper_server.url()
    store, other = open_metadata(url, timeout_s=WAIT_S), open_metadata(url, timeout_s=WAIT_S)
    assert isinstance(store, ZooKeeperMetadataStore)
    version = store.create("logs/old", b"first")
    transaction = store.client.transaction
    made_again: list[int] = []

    def late() -> object:
        """Begin the transaction after another process removed the key and made it again, with the same data version."""
        other.delete("logs/old", version, reused=True)
        made_again.append(other.create("logs/old", b"second"))
        return transaction()

    store.client.transaction = late
    with pytest.raises(MetadataVersionError):
        change(store, version)
    assert other.get("logs/old", latest=True) == (b"second", made_again[0])
    assert other.get("logs/new", latest=True) is None
    store.client.transaction = transaction
    change(store, made_again[0])
    assert other.get("logs/old", latest=True) != (b"second", made_again[0])
    store.close()
    other.close()


def test_a_rename_whose_answer_is_lost_is_found_out(proxy: Proxy, through: tuple[MetadataStore, MetadataStore]) -> None:
    store, local_reader = through
    version = store.create("logs/old", b"value")
    lose_once(proxy, "lose_replies")
    with pytest.raises(MetadataUnreachableError) as lost:
        store.rename("logs/old", "logs/new", b"value", version)
    assert lost.value.outcome_unknown
    assert wait_for(lambda: [local_reader.get(f"logs/{name}") is None for name in ("old", "new")].count(True) == 1)


def test_a_feed_misses_no_change_when_connections_and_sessions_are_lost(
    proxy: Proxy, through: tuple[MetadataStore, MetadataStore]
) -> None:
    store, local_reader = through
    mirror = Mirror(store, "dir")
    store.watch("dir", lambda: None)
    made = 0

    def create(count: int) -> None:
        nonlocal made
        for _ in range(count):
            made += 1
            local_reader.create(f"dir/{made % 7}/{made}", b"v")

    def equal() -> bool:
        return mirror.versions == versions_below(local_reader, "dir") and len(mirror.versions) == made

    create(20)
    assert wait_for(equal)
    assert mirror.nones == 1, "nothing was lost so far"
    for _ in range(3):
        proxy.cut()
        create(20)
        assert wait_for(equal)
    assert mirror.nones > 1
    proxy.lose_replies = True
    create(20)
    proxy.lose_replies = False
    proxy.cut()
    assert wait_for(equal)
    nones = mirror.nones
    end_zookeeper_session(store)
    create(20)
    assert wait_for(equal)
    assert mirror.nones > nones
    nones, reported = mirror.nones, mirror.reported
    create(20)
    assert wait_for(equal)
    assert (mirror.nones, mirror.reported >= reported + 20) == (nones, True), "the watch was set again"


@pytest.mark.long
def test_a_feed_goes_on_after_the_server_died_and_came_back() -> None:
    server = ZooKeeperServer()
    try:
        server.start()
        url = server.url()
        store, other = (open_metadata(url, timeout_s=WAIT_S, lease_time_s=SHORT_SESSION_S) for _ in range(2))
        mirror = Mirror(store, "dir")
        other.create("dir/a", b"v")
        other.create("dir/leased", b"v", leased=True)
        assert wait_for(lambda: len(mirror.versions) == 2)
        server.kill()
        server.start()
        other.create("dir/b", b"v")
        assert wait_for(lambda: {"dir/a", "dir/b"} <= mirror.versions.keys())
        nones = mirror.nones
        assert nones > 1
        other.create("dir/c/d", b"v")
        assert wait_for(lambda: "dir/c/d" in mirror.versions)
        assert mirror.versions == versions_below(other, "dir")
        other.close()
        store.close()
    finally:
        server.close()


def test_a_server_without_recursive_watches_is_read_again_now_and_then(
    zookeeper_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zookeeper_feed.AddWatch, "type", 999)  # as unknown as the right number is to an old server
    monkeypatch.setattr(zookeeper_store, "UNSUPPORTED_S", 0.2)
    store = open_metadata(zookeeper_server.url(), timeout_s=WAIT_S)
    mirror = Mirror(store, "dir")
    assert wait_for(lambda: mirror.nones >= 2)
    store.create("dir/a", b"v")
    assert wait_for(lambda: "dir/a" in mirror.versions)
    assert mirror.reported == 0
    mirror.watch.cancel()
    later = Mirror(store, "dir")
    assert wait_for(lambda: later.nones >= 2)
    told = [record for record in caplog.records if "recursive watches" in record.getMessage()]
    assert len(told) == 1
    assert "use ZooKeeper 3.6 or newer" in told[0].getMessage()
    store.close()


def test_an_election_survives_a_lost_connection(proxy: Proxy, through: tuple[MetadataStore, MetadataStore]) -> None:
    store, local_reader = through
    log: list[bool] = []
    election = Election(cluster_on(store), "auditor", "one", log.append)
    rival = Election(cluster_on(local_reader), "auditor", "two", lambda leads: None)
    for _ in range(3):
        proxy.cut()
        time.sleep(0.1)
    assert wait_for(lambda: election.leads)
    assert not rival.leads
    end_zookeeper_session(store)
    assert wait_for(lambda: rival.leads or (len(log) >= 3 and election.leads))
    assert wait_for(lambda: False in log)
    assert election.leads is not rival.leads
    election.close()
    rival.close()


def test_calls_in_a_forked_child_raise(zookeeper_server: ZooKeeperServer) -> None:
    store = open_metadata(zookeeper_server.url(), timeout_s=WAIT_S)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def ask() -> None:
        try:
            store.get("key")
        except ForkedProcessError as error:
            results.put(str(error))
        store.close()

    process = context.Process(target=ask)
    process.start()
    assert "fork" in results.get()
    process.join()
    assert process.exitcode == 0
    assert store.create("key", b"v")
    store.close()


def test_a_refusal_of_the_server_raises(zookeeper_server: ZooKeeperServer) -> None:
    store = open_metadata(zookeeper_server.url(), timeout_s=WAIT_S)
    store.create("leaf", b"v", leased=True)
    with pytest.raises(MetadataError, match="NoChildrenForEphemerals") as refused:
        store.create("leaf/below", b"v")
    assert not isinstance(refused.value, MetadataUnreachableError)
    store.close()


def noting(calls: list[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    """Return a function that notes its name and does what another does."""

    def noted(*arguments: object) -> object:
        calls.append(name)
        return call(*arguments)

    return noted


def test_thousands_are_read_in_few_round_trips(
    zookeeper_server: ZooKeeperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_metadata(zookeeper_server.url(), timeout_s=WAIT_S)
    assert isinstance(store, ZooKeeperMetadataStore)
    many = f"{store.root}/many"
    store.client.ensure_path(many)
    # In pieces: a connection with thousands of open requests misses its session's end on a busy machine.
    for first in range(0, 2000, 100):
        transaction = store.client.transaction()
        for number in range(first, first + 100):
            transaction.create(f"{many}/{number:04d}", b"v")
        transaction.commit()
    calls: list[str] = []
    monkeypatch.setattr(store.client, "get_async", noting(calls, "ask", store.client.get_async))
    monkeypatch.setattr(store, "node", noting(calls, "look", store.node))
    assert sum(node is not None for node in store.get_many([f"many/{number:04d}" for number in range(2500)])) == 2000
    trips = [word for word, _ in itertools.groupby(calls)]
    assert trips == ["ask", "look"] * 5, "each answer was waited for before the next request was sent"
    assert len(store.children("many")) == 2000
    store.close()


@pytest.mark.parametrize("change", [put, delete])
def test_a_change_whose_guard_was_removed_by_another_one_is_made_nevertheless(
    zookeeper_server: ZooKeeperServer, change: Callable[[MetadataStore, int], None]
) -> None:
    """A removal removes the guards of others; a key that has the version is not said to have another one."""
    url = zookeeper_server.url()
    with ExitStack() as stack:
        store, other = (stack.enter_context(closing(open_metadata(url, timeout_s=WAIT_S))) for _ in range(2))
        assert isinstance(store, ZooKeeperMetadataStore)
        assert isinstance(other, ZooKeeperMetadataStore)
        version = store.create("logs/old", b"first")
        transaction = store.client.transaction
        path = f"{urlsplit(url).path}/logs/old"
        removed: list[str] = []

        def late() -> object:
            """Begin the transaction after its guard was removed, once."""
            for guard in () if removed else other.client.get_children(path):
                other.client.delete(f"{path}/{guard}")
                removed.append(guard)
            return transaction()

        store.client.transaction = late
        change(store, version)
        assert len(removed) == 1
