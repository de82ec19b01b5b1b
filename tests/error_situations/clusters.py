"""Situations in a cluster."""

from __future__ import annotations

import struct
from collections.abc import Callable

from pybk.bookie.directory_identity import SeenEpoch
from pybk.bookie.metadata_age import AgeWatch
from pybk.bookie.replicas import Replicas
from pybk.config import StoreConfig
from pybk.errors import (
    EntryUnknownError,
    LedgerDeletedError,
    LedgerFencedError,
    LedgerRecoveryError,
    LogFencedError,
    MetadataError,
    MetadataExistsError,
    MetadataForgedError,
    MetadataOutdatedError,
    MetadataUnreachableError,
    MetadataVersionError,
    NoSuchBookieError,
    NotEnoughBookiesError,
    OwnerNeededError,
    SafetyCheckError,
)
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.epochs import MetadataEpoch
from pybk.metadata.url import open_metadata
from pybk.operations.cluster_admin import ClusterAdmin
from pybk.replication.messages import Reply, Status
from pybk.streams.log import Log
from pybk.transport.codec import LacPacket
from tests.bookie.test_hostile import Member
from tests.bookie.test_member_rights import let
from tests.client.test_limbo_repair import PASSWORD as OWNER
from tests.cluster.inside import SECRET, Inside, make_cluster
from tests.error_situations.situation import PASSWORD, Scene, Situation, entries_of, raises
from tests.internals import cluster_backend_of, service_of
from tests.metadata.records import cluster_on, ledger
from tests.metadata.simulated_store import Fault, SimServer
from tests.storage.real_store import QUICK
from tests.waiting import wait_until


def ids(manager: LedgerManager) -> int:
    return len(list(manager.list_ledgers()))


def taken_away(cluster: Inside, client: LedgerManager) -> Callable[[], None]:
    """End the only bookie; returns what starts it again. Both return when the client knows."""
    cluster.bookies[0].close()
    wait_until(lambda: not client.bookies())

    def start() -> None:
        cluster.open_bookie(0)
        wait_until(lambda: client.bookies())

    return start


# ---- bookies ---------------------------------------------------------------------------------------------------------


@raises(NoSuchBookieError)
def unknown_bookie(scene: Scene) -> Situation:
    admin = ClusterAdmin(scene.cluster().connect())
    return Situation(lambda: admin.drain("nobody"), admin.bookies)


@raises(SafetyCheckError)
def drain_without_spare(scene: Scene) -> Situation:
    cluster = scene.cluster(3)
    client = cluster.connect()
    admin = ClusterAdmin(client)
    client.create_ledger(password=PASSWORD).close()

    def add_bookie() -> None:
        cluster.open_bookie(3)
        wait_until(lambda: len(client.bookies()) == 4)
        admin.drain("bookie-0")

    return Situation(lambda: admin.drain("bookie-0"), add_bookie)


@raises(SafetyCheckError, retryable=True)
def drain_while_the_session_of_the_auditor_is_young(scene: Scene) -> Situation:
    admin = ClusterAdmin(scene.cluster(2).connect())
    holds = [{"reason": "session_young", "text": "wait"}]
    scene.monkeypatch.setattr(ClusterMetadata, "read_auditor_report", lambda metadata: {"holds": holds})
    return Situation(lambda: admin.drain("bookie-0"), holds.clear)


@raises(NotEnoughBookiesError, retryable=True)
def ledger_without_bookies(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client = cluster.connect()

    def add_bookie() -> None:
        cluster.open_bookie(1)
        wait_until(lambda: len(client.bookies()) == 2)

    return Situation(
        lambda: client.create_ledger(password=PASSWORD, ensemble_size=2).close(), add_bookie, lambda: ids(client)
    )


def ended_for_want_of_bookies(scene: Scene, *, earlier: bool) -> Situation:
    cluster = scene.cluster()
    client = cluster.connect(bookie_patience_seconds=0.2)
    writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
    writer.append(b"before")
    start = taken_away(cluster, client)
    failed = writer.append_async(b"failed").exception() if earlier else None
    assert earlier is isinstance(failed, NotEnoughBookiesError)

    def go_on() -> None:
        start()
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 0
        client.create_ledger(password=PASSWORD, ensemble_size=1).append(b"x")

    def effects() -> int:
        return 0 if not client.bookies() else entries_of(client, writer.ledger_id, b"x", PASSWORD)

    return Situation(lambda: writer.append(b"x"), go_on, effects)


@raises(NotEnoughBookiesError, unknown=True)
def append_without_bookies(scene: Scene) -> Situation:
    return ended_for_want_of_bookies(scene, earlier=False)


@raises(NotEnoughBookiesError)
def append_after_one_without_bookies(scene: Scene) -> Situation:
    return ended_for_want_of_bookies(scene, earlier=True)


# ---- ledgers ---------------------------------------------------------------------------------------------------------


@raises(LedgerFencedError, unknown=True)
def append_beside_a_recovery(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client, other = cluster.connect(), cluster.connect()
    writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
    writer.append(b"before")
    other.open_ledger(writer.ledger_id, password=PASSWORD, recover=True).close()

    def look() -> None:
        with client.open_ledger(writer.ledger_id, password=PASSWORD) as reader:
            assert reader.last_add_confirmed == 0

    return Situation(lambda: writer.append(b"x"), look, lambda: entries_of(client, writer.ledger_id, b"x", PASSWORD))


@raises(LedgerRecoveryError, retryable=True)
def recovery_without_bookies(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client, other = cluster.connect(), cluster.connect()
    writer = client.create_ledger(password=PASSWORD, ensemble_size=1)
    writer.append(b"x")
    return Situation(
        lambda: other.open_ledger(writer.ledger_id, password=PASSWORD, recover=True),
        taken_away(cluster, other),
        lambda: int(other.ledger_metadata(writer.ledger_id).state is LedgerState.CLOSED),
    )


@raises(OwnerNeededError)
def recovery_that_only_the_owner_can_decide(scene: Scene) -> Situation:
    cluster = scene.cluster(3)
    member = Member(cluster, scene.stack)
    let(cluster, member, True)
    forged = struct.pack(">qq", member.ledger_id, 50) + bytes(16)
    for bookie in member.writer.metadata.fragments[0].ensemble[:2]:
        service = service_of(cluster.bookies[int(bookie.bookie_id[-1])])
        member.link = member.links.connect(bookie, service.addresses[0], service.server.public_key)
        reply = member.say(LacPacket(member.ledger_id, forged))
        assert isinstance(reply, Reply)
        assert reply.status is Status.OK
    client = cluster.connect()
    return Situation(
        lambda: cluster_backend_of(client).recover_abandoned(member.ledger_id),
        lambda: client.open_ledger(member.ledger_id, password=OWNER, recover=True).close(),
        lambda: int(client.ledger_metadata(member.ledger_id).state is LedgerState.CLOSED),
    )


@raises(LedgerDeletedError)
def ledger_that_was_deleted(scene: Scene) -> Situation:
    cluster = scene.cluster(2)
    client = cluster.connect()
    with client.create_ledger(password=PASSWORD, ensemble_size=2) as writer:
        writer.append(b"x")
    cluster.bookies[0].close()
    client.delete_ledger(writer.ledger_id, password=PASSWORD)
    return Situation(
        lambda: client.open_ledger(writer.ledger_id, password=PASSWORD),
        lambda: client.create_ledger(password=PASSWORD, ensemble_size=1),
    )


@raises(EntryUnknownError, retryable=True)
def entry_whose_bookie_is_away(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client = cluster.connect()
    with client.create_ledger(password=PASSWORD, ensemble_size=1) as writer:
        writer.append(b"x")
    reader = client.open_ledger(writer.ledger_id, password=PASSWORD)
    return Situation(lambda: list(reader.read(0, 0)), taken_away(cluster, client))


# ---- metadata --------------------------------------------------------------------------------------------------------


@raises(MetadataError)
def metadata_store_that_nobody_made(scene: Scene) -> Situation:
    def connect() -> LedgerManager:
        return scene.stack.enter_context(LedgerManager.connect(f"lmdb://{scene.path}/metadata", cluster_secret=SECRET))

    return Situation(connect, lambda: (make_cluster(scene.path), connect()))


@raises(MetadataUnreachableError, retryable=True)
def metadata_store_that_is_away(scene: Scene) -> Situation:
    store = SimServer().store()
    metadata, fault = cluster_on(store), Fault.REFUSED

    def come_back() -> None:
        store.faults = None

    store.faults = lambda operation, key: fault
    return Situation(
        lambda: metadata.create_ledger(ledger(1)),
        come_back,
        lambda: sum("ledgers/" in key for key in store.server.nodes),
    )


@raises(MetadataVersionError)
def value_that_another_changed(scene: Scene) -> Situation:
    store = open_metadata(f"lmdb://{scene.path}/metadata")
    scene.stack.callback(store.close)
    first = store.create("key", b"1")
    now = store.put("key", b"2", first)
    return Situation(
        lambda: store.put("key", b"x", first),
        lambda: store.put("key", b"x", now),
        lambda: int((found := store.get("key")) is not None and found.value == b"x"),
    )


@raises(MetadataExistsError)
def key_that_exists(scene: Scene) -> Situation:
    store = open_metadata(f"lmdb://{scene.path}/metadata")
    scene.stack.callback(store.close)
    store.create("key", b"1")
    return Situation(
        lambda: store.create("key", b"x"),
        lambda: store.create("other", b"x"),
        lambda: int((found := store.get("key")) is not None and found.value == b"x"),
    )


@raises(MetadataForgedError)
def wrong_secret(scene: Scene) -> Situation:
    cluster = scene.cluster()
    return Situation(
        lambda: LedgerManager.connect(cluster.url, cluster_secret=b"another secret -----------------"), cluster.connect
    )


@raises(MetadataOutdatedError)
def metadata_that_were_put_back(scene: Scene) -> Situation:
    metadata = cluster_backend_of(scene.cluster().connect()).membership.metadata
    replicas = Replicas.open(str(scene.path / "replicas"), config=StoreConfig(**QUICK))
    scene.stack.callback(replicas.close)
    replicas.seen = SeenEpoch(MetadataEpoch(0, 1000))
    assert AgeWatch(metadata, replicas, lambda seen: None).look()
    return Situation(metadata.check_not_outdated, metadata.clear_outdated)


# ---- logs ------------------------------------------------------------------------------------------------------------


@raises(LogFencedError, unknown=True)
def append_to_a_log_beside_a_take_over(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client, other = cluster.connect(), cluster.connect()
    log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
    writer = log.writer()
    stolen = Log.open(other, "log", password=PASSWORD, quorums=(1, 1, 1)).writer(steal=True)
    return Situation(
        lambda: writer.append(b"x"),
        lambda: stolen.append(b"of the new owner"),
        lambda: [each.data for each in log.reader()].count(b"x"),
    )


@raises(NotEnoughBookiesError, unknown=True, retryable=True)
def append_to_a_log_without_bookies(scene: Scene) -> Situation:
    cluster = scene.cluster()
    client = cluster.connect(bookie_patience_seconds=0.2)
    log = Log.open(client, "log", password=PASSWORD, quorums=(1, 1, 1))
    writer = log.writer()
    return Situation(
        lambda: writer.append(b"x"),
        taken_away(cluster, client),
        lambda: [each.data for each in log.reader()].count(b"x") if client.bookies() else 0,
    )
