"""What a bookie lets a member of the cluster do without a ledger's password, and what not."""

from __future__ import annotations

import gc
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import NotEnoughBookiesError, OwnerNeededError
from pybk.flags import StorageHint
from pybk.ledger.ledger_metadata import Bookie, LedgerState
from pybk.manager.ledger_writer import LedgerWriter
from pybk.metadata.settings import ClusterSettings
from pybk.metrics import MEMBER_RECOVERIES
from pybk.replication.bookie import BookieEffect
from pybk.replication.messages import (
    Add,
    AskWriter,
    ChooseBookies,
    Effect,
    Event,
    Force,
    Move,
    Read,
    ReadLac,
    Reply,
    Status,
)
from pybk.replication.writer import WriterMachine
from pybk.transport.client_links import Links
from pybk.transport.cluster_keys import ClusterKeys, MemberKey, RightsKey
from pybk.transport.codec import Answer, AuthorizeMember, LacPacket, WireRequest
from pybk.transport.frames import FrameError
from tests.bookie.test_hostile import Member, one
from tests.client.test_limbo_repair import PASSWORD
from tests.cluster.inside import Inside, inside
from tests.internals import cluster_backend_of, descriptor_of, service_of
from tests.waiting import WAIT_S, wait_until

NO = Reply(Status.UNAUTHORIZED)


def status_of(member: Member, request: WireRequest) -> Status:
    """Return the status of the answer to a request."""
    reply = member.say(request)
    assert isinstance(reply, Reply | Answer)
    return reply.status


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


def let(cluster: Inside, member: Member, allowed: bool) -> None:
    """Let members recover, or not any more, and wait until all bookies know it."""

    def change(settings: ClusterSettings) -> ClusterSettings:
        return replace(settings, repair=replace(settings.repair, recover_abandoned=allowed))

    cluster_backend_of(member.manager).membership.metadata.change_settings(change)
    known = [cluster_backend_of(manager).membership.metadata for manager in cluster.bookies]
    wait_until(lambda: all(metadata.current_settings().repair.recover_abandoned is allowed for metadata in known))


@contextmanager
def without_password(cluster: Inside, *, allowed: bool = True) -> Iterator[Member]:
    """Return a member whose links have the cluster's key, and not the ledger's."""
    with ExitStack() as stack:
        member = Member(cluster, stack)
        let(cluster, member, allowed)
        metadata = cluster_backend_of(member.manager).membership.metadata
        key = member.links.member_key
        assert key is not None
        member.links.grant(member.ledger_id, metadata.describe(member.writer.metadata), key)
        yield member


def test_a_member_may_fence_read_with_a_fence_and_add_as_a_recovery_and_nothing_else(cluster: Inside) -> None:
    with without_password(cluster) as member:
        ledger_id = member.ledger_id
        refused = (
            Add(ledger_id, (one(1, member.entry(1)),), -1),
            Add(ledger_id, (one(1, member.entry(1)),), -1, recovery=True, deferred=True),
            Force(ledger_id),
            LacPacket(ledger_id, bytes(32)),
            Move(ledger_id, StorageHint.HDD),
        )
        assert [status_of(member, request) for request in refused] == [Status.UNAUTHORIZED] * len(refused)
        state = member.service.replicas.state(ledger_id)
        assert state is not None
        assert not state.fenced, "the right alone fences nothing"
        assert status_of(member, Read(ledger_id, 0, 0, 1, 1000, fence=True, checked=True)) is Status.OK
        assert status_of(member, ReadLac(ledger_id, fence=True)) is Status.OK
        assert status_of(member, Add(ledger_id, (one(1, member.entry(1)),), -1, recovery=True)) is Status.OK
        assert status_of(member, Read(ledger_id, 1, 1, 1, 1000)) is Status.OK
        counters = member.service.replicas.store.metrics.snapshot().counters
        assert [value for key, value in counters.items() if key.name == MEMBER_RECOVERIES] == [1]


def test_a_members_right_is_for_one_ledger(cluster: Inside) -> None:
    with without_password(cluster) as member:
        assert status_of(member, ReadLac(member.ledger_id, fence=True)) is Status.OK
        other = member.manager.create_ledger(password=b"another password")
        other.append(b"first")
        assert member.say(ReadLac(other.ledger_id, fence=True)) == NO
        assert member.say(Add(other.ledger_id, (one(1, member.entry(1)),), -1, recovery=True)) == NO
        assert other.append(b"second") == 1


def test_the_setting_holds_at_each_request(cluster: Inside) -> None:
    with without_password(cluster, allowed=False) as member:
        assert member.say(ReadLac(member.ledger_id, fence=True)) == NO
        let(cluster, member, True)
        assert status_of(member, Read(member.ledger_id, 0, 0, 1, 1000, fence=True)) is Status.OK
        let(cluster, member, False)
        assert member.say(Read(member.ledger_id, 0, 0, 1, 1000, fence=True)) == NO
        assert member.say(Add(member.ledger_id, (one(1, member.entry(1)),), -1, recovery=True)) == NO


def test_a_proof_of_another_key_or_with_another_description_is_refused(cluster: Inside) -> None:
    with without_password(cluster) as member:
        metadata = cluster_backend_of(member.manager).membership.metadata
        right = metadata.describe(member.writer.metadata)
        forged = replace(member.writer.metadata, verifier=os.urandom(32))
        other = MemberKey(ClusterKeys.derive(b"a secret of another cluster ----", metadata.cluster_id))
        key = member.links.member_key
        assert key is not None
        for description, by in ((right, other), (metadata.describe(forged), key)):
            member.links.grant(member.ledger_id, description, by)
            assert member.say(ReadLac(member.ledger_id, fence=True)) == NO
        member.links.grant(member.ledger_id, right, key)
        assert status_of(member, ReadLac(member.ledger_id, fence=True)) is Status.OK


def test_a_forged_description_of_a_ledger_that_is_new_to_the_bookie_fences_nothing(cluster: Inside) -> None:
    with without_password(cluster) as member:
        metadata = cluster_backend_of(member.manager).membership.metadata
        key = member.links.member_key
        assert key is not None
        writer = member.manager.create_ledger(password=b"another password")
        forged = replace(writer.metadata, verifier=os.urandom(32))
        member.links.grant(writer.ledger_id, metadata.describe(forged), key)
        assert member.say(ReadLac(writer.ledger_id, fence=True)) == NO
        assert member.service.replicas.state(writer.ledger_id) is None
        assert writer.append(b"first") == 0


def test_copies_that_differ_are_left_to_the_owner(cluster: Inside) -> None:
    """Nobody but the owner can say which bookie has the entry as it was written."""
    with without_password(cluster) as member:
        ledger_id, ensemble = member.ledger_id, member.writer.metadata.fragments[0].ensemble
        for bookie, last in zip(ensemble, (b"x", b"y", b"z"), strict=True):  # any two that a recovery hears differ
            service = service_of(cluster.bookies[int(bookie.bookie_id[-1])])
            member.link = member.links.connect(bookie, service.addresses[0], service.server.public_key)
            entry = member.entry(1)[:-1] + last
            assert status_of(member, Add(ledger_id, (one(1, entry),), -1, recovery=True)) is Status.OK
        with pytest.raises(OwnerNeededError, match=r"different copies of entry 1; .*open it with its password"):
            cluster_backend_of(cluster.connect()).recover_abandoned(ledger_id)
        assert member.manager.ledger_metadata(ledger_id).state is LedgerState.IN_RECOVERY


def test_a_lac_that_nothing_confirms_is_left_to_the_owner(cluster: Inside) -> None:
    """A member cannot verify a LAC packet, and does not close before what it names."""
    with ExitStack() as stack:
        member = Member(cluster, stack)
        let(cluster, member, True)
        forged = struct.pack(">qq", member.ledger_id, 50) + bytes(16)
        for bookie in member.writer.metadata.fragments[0].ensemble[:2]:  # one of any two that a recovery hears
            service = service_of(cluster.bookies[int(bookie.bookie_id[-1])])
            member.link = member.links.connect(bookie, service.addresses[0], service.server.public_key)
            assert status_of(member, LacPacket(member.ledger_id, forged)) is Status.OK
        with pytest.raises(OwnerNeededError, match="up to 0, but a bookie says that 50 was confirmed"):
            cluster_backend_of(cluster.connect()).recover_abandoned(member.ledger_id)
        with cluster.connect().open_ledger(member.ledger_id, password=PASSWORD, recover=True) as reader:
            assert reader.metadata.last_entry_id == 0


def test_the_password_gives_the_whole_right_after_the_members(cluster: Inside) -> None:
    with without_password(cluster) as member:
        assert status_of(member, Read(member.ledger_id, 0, 0, 1, 1000, fence=True)) is Status.OK
        ledger = descriptor_of(member.writer)
        assert isinstance(ledger, RemoteLedger)
        member.links.grant(member.ledger_id, ledger.description, RightsKey(ledger.keys.right_key))
        assert status_of(member, LacPacket(member.ledger_id, bytes(32))) is Status.OK
        key = member.links.member_key
        assert key is not None
        member.links.grant(member.ledger_id, ledger.description, key)
        assert status_of(member, LacPacket(member.ledger_id, bytes(32))) is Status.OK, "it is not taken back"


def test_a_bookie_that_does_not_know_the_message_refuses_it(cluster: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an earlier version, which knows no message of this kind, takes no harm and grants nothing."""
    with without_password(cluster) as member:
        real = member.service.server.authorize
        assert real is not None

        def earlier(session_id: bytes, proof: object) -> bool:
            if isinstance(proof, AuthorizeMember):
                raise FrameError("a message of kind 10 is not a request")
            return real(session_id, proof)  # type: ignore[arg-type]

        monkeypatch.setattr(member.service.server, "authorize", earlier)
        assert member.say(ReadLac(member.ledger_id, fence=True)) == NO
        assert member.writer.append(b"second") == 1


def test_links_without_a_secret_have_no_key() -> None:
    with Links() as links:
        assert links.member_key is None


def test_a_bookie_knows_the_session_of_a_writer_from_those_of_readers(cluster: Inside) -> None:
    with ExitStack() as stack:
        member = Member(cluster, stack)
        assert status_of(member, AskWriter(member.ledger_id)) is Status.OK
        assert status_of(member, AskWriter(member.ledger_id + 1)) is Status.NO_WRITER
        reading = cluster.connect()
        with reading.open_ledger(member.ledger_id, password=PASSWORD, recover=False) as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"first"]
            member.manager.close()
            wait_until(lambda: status_of(member, AskWriter(member.ledger_id)) is Status.NO_WRITER, "its link to end")


def test_a_writer_that_has_failed_is_gone_although_its_client_lives(tmp_path: Path) -> None:
    """It says so to the bookies of its last ensemble, also those that were not in the first one."""
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect(bookie_patience_seconds=2.0)
        writer = client.create_ledger(password=PASSWORD)
        writer.append(b"first")
        metadata = cluster_backend_of(client).membership.metadata

        def ensemble() -> tuple[Bookie, ...]:
            return metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble

        first = ensemble()
        managers = {service_of(each).bookie: each for each in cluster.bookies}
        managers[first[0]].close()

        def others() -> set[Bookie]:
            """Append once more, because the writer may not have noticed yet, and return the bookies that it took."""
            writer.append(b"more")
            return set(ensemble()) - set(first)

        (new,) = wait_until(others)
        service = service_of(managers[new])
        found: list[bool] = []

        def ask() -> list[BookieEffect]:
            found.append(service.server.has_writer(writer.ledger_id))
            return []

        def is_known() -> bool:
            service.post(ask)
            return any(found)

        wait_until(is_known)
        for each in first[1:]:
            managers[each].close()
        with pytest.raises(NotEnoughBookiesError):
            writer.append(b"too many")

        def is_gone() -> bool:
            service.post(ask)
            return not found[-1]

        wait_until(is_gone)


def test_a_bookie_that_comes_in_knows_of_a_writer_that_appends_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bookies are sent the last LAC while another one is chosen, when it is not known yet who has to know it."""
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        membership = cluster_backend_of(client).membership
        writer = client.create_ledger(password=PASSWORD)
        writer.append(b"first")
        first = membership.metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble
        choose, send_lac = membership.choose, WriterMachine.send_lac
        chooses, may_choose = threading.Event(), threading.Event()
        sent = list[int]()

        def choose_later(ledger: RemoteLedger, effect: ChooseBookies) -> Event:
            chooses.set()
            assert may_choose.wait(WAIT_S)
            return choose(ledger, effect)

        def send_noted(machine: WriterMachine) -> list[Effect]:
            effects = send_lac(machine)
            sent.append(machine.last_add_confirmed)
            return effects

        monkeypatch.setattr(membership, "choose", choose_later)
        monkeypatch.setattr(WriterMachine, "send_lac", send_noted)
        managers = {service_of(each).bookie: each for each in cluster.bookies}
        managers[first[0]].close()
        wait_until(lambda: writer.append(b"more") and chooses.is_set())
        last = writer.last_add_confirmed
        wait_until(lambda: last in sent, "the driver to have asked once for the last LAC to be sent")
        may_choose.set()
        wait_until(lambda: len(membership.metadata.read_ledger(writer.ledger_id).metadata.fragments) == 2)
        (new,) = set(membership.metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble) - set(first)
        service = service_of(managers[new])
        found = [False]

        def ask() -> list[BookieEffect]:
            found.append(service.server.has_writer(writer.ledger_id))
            return []

        def is_known() -> bool:
            service.post(ask)
            return found[-1]

        wait_until(is_known)
        with cluster.connect().open_ledger(writer.ledger_id, password=PASSWORD, recover=False) as reader:
            wait_until(lambda: reader.last_add_confirmed == last, "readers see the last entry")


def test_an_idle_writer_shows_that_it_lives_while_a_later_bookie_of_its_ensemble_is_away(tmp_path: Path) -> None:
    """Bookies that have started again know none of its sessions until then; here they are made to forget them."""
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD)
        writer.append(b"first")
        metadata = cluster_backend_of(client).membership.metadata
        first = metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble
        managers = {service_of(each).bookie: each for each in cluster.bookies}
        managers[first[0]].close()
        writer.append(b"second")
        wait_until(lambda: len(metadata.read_ledger(writer.ledger_id).metadata.fragments) == 2)
        (new,) = set(metadata.read_ledger(writer.ledger_id).metadata.fragments[-1].ensemble) - set(first)
        cluster.open_bookie(cluster.bookies.index(managers[first[0]]))
        wait_until(lambda: all(map(cluster_backend_of(client).membership.keeps, first)))
        service = service_of(managers[first[1]])
        found: list[bool] = []

        def forget() -> list[BookieEffect]:
            for peer in service.server.peers.values():
                peer.writes.clear()
            found.append(service.server.has_writer(writer.ledger_id))
            return []

        def ask() -> list[BookieEffect]:
            found.append(service.server.has_writer(writer.ledger_id))
            return []

        service.post(forget)
        wait_until(lambda: found == [False])
        managers[new].close()

        def is_known() -> bool:
            service.post(ask)
            return found[-1]

        wait_until(is_known)


@pytest.mark.parametrize("short", [False, True])
def test_a_writer_that_was_dropped_is_gone_although_its_client_lives(tmp_path: Path, *, short: bool) -> None:
    """Also one that would fill the place of a bookie some time later."""
    with inside(tmp_path, count=3) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD)
        ledger_id = writer.ledger_id
        writer.append(b"entry")
        service = service_of(cluster.bookies[0])
        if short:
            cluster.bookies[2].close()
            writer.append(b"another")
            marks = cluster_backend_of(client).membership.metadata
            wait_until(lambda: marks.marks_of(ledger_id), "the place to be given up")
        found = [False]

        def ask() -> list[BookieEffect]:
            found.append(service.server.has_writer(ledger_id))
            return []

        def is_there() -> bool:
            service.post(ask)
            return found[-1]

        wait_until(is_there)  # the append was maybe acknowledged by the two others
        del writer

        def is_gone() -> bool:
            gc.collect()  # more than once, as a request that is under way keeps the writer
            service.post(ask)
            return not found[-1]

        wait_until(is_gone)
        with client.open_ledger(ledger_id, password=PASSWORD) as reader:  # and its owner recovers it
            assert [entry.payload for entry in reader] == [b"entry", b"another"][: 1 + short]


def test_a_writer_that_was_dropped_is_gone_from_the_bookies_that_it_took_later(tmp_path: Path) -> None:
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD, ensemble_size=3)
        ledger_id = writer.ledger_id
        writer.append(b"entry")
        ensemble = writer.metadata.fragments[-1].ensemble
        later = next(own for each in cluster.bookies if (own := service_of(each)).bookie not in ensemble)
        cluster.bookies[int(ensemble[0].bookie_id[-1])].close()
        found = [False]

        def ask() -> list[BookieEffect]:
            found.append(later.server.has_writer(ledger_id))
            return []

        def is_there(written: LedgerWriter) -> bool:
            written.append(b"another")
            later.post(ask)
            return found[-1]

        wait_until(partial(is_there, writer))
        del writer

        def is_gone() -> bool:
            gc.collect()
            later.post(ask)
            return not found[-1]

        wait_until(is_gone)
