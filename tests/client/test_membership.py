"""Bookies by name and by what they say of themselves: which are asked for copies, and which get new ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pybk.client import membership
from pybk.client.backend import ClusterBackend
from pybk.client.membership import Membership
from pybk.client.remote_ledger import RemoteLedger
from pybk.errors import MetadataUnreachableError, NotEnoughBookiesError, UsageError
from pybk.feature_level import NEWEST_LEVEL
from pybk.ledger.ledger_metadata import Bookie, Fragment
from pybk.metadata.cluster import ClusterMetadata
from pybk.metadata.registration import BOOKIES_KEY, COOKIES_KEY, BookieRegistration, BookieState, RegisteredBookie
from pybk.metadata.settings import PlacementSettings, RepairSettings
from pybk.metadata.store import MetadataStore
from pybk.metadata.underreplication import RepairReason
from pybk.metadata.url import open_metadata
from pybk.metrics import AWAY_MEMBERS, MISPLACED_CHOICES
from pybk.replication.messages import (
    BookiesChosen,
    BookiesLeave,
    ChooseBookies,
    Event,
    MetadataWritten,
    UnderReplicated,
    WriteMetadata,
)
from tests.cluster.inside import inside
from tests.internals import cluster_backend_of, service_of
from tests.replication.driving import bookie, metadata
from tests.waiting import WAIT_S, wait_until

_, _, DRAINING, DRAINED, REMOVED = BookieState


def test_a_bookie_that_is_not_known_cannot_be_replicated(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        with client.create_ledger(ensemble_size=2, write_quorum=2, insecure=True) as writer:
            writer.append(b"x")
        with pytest.raises(UsageError, match=r"called 'nosuch'; there are bookie-0, bookie-1, bookie-2$"):
            client.replicate("nosuch")
        assert client.replicate("bookie-0").left == ()
        cluster.bookies[1].close()
        assert client.replicate("bookie-1").ledgers >= 0, "a bookie that is away is known by its cookie"


def test_no_new_ledger_goes_to_a_bookie_that_became_read_only_a_second_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        client.create_ledger(insecure=True).close()
        full = service_of(cluster.bookies[2])
        registration = full.keeper.registration

        def read_only() -> BookieRegistration:
            return replace(registration(), read_only=True)

        monkeypatch.setattr(full.keeper, "registration", read_only)
        assert full.keeper.registered is not None
        full.keeper.registered.update(read_only())  # no watch reports it
        backend.membership.seen_ns -= membership.FRESH_NS
        for _ in range(5):
            with client.create_ledger(insecure=True) as writer:
                ensemble = writer.metadata.fragments[0].ensemble
            assert full.bookie not in ensemble


def test_ledgers_that_are_created_within_a_second_read_the_registrations_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        monkeypatch.setattr(membership, "FRESH_NS", int(WAIT_S * 1e9))
        client.create_ledger(insecure=True).close()
        reads: list[None] = []
        refresh = backend.membership.refresh

        def read() -> None:
            reads.append(None)
            refresh()

        monkeypatch.setattr(backend.membership, "refresh", read)
        for _ in range(3):
            client.create_ledger(insecure=True).close()
        assert reads == []
        with pytest.raises(NotEnoughBookiesError):
            client.create_ledger(insecure=True, ensemble_size=4, write_quorum=2)
        assert len(reads) == 1, "who may have come meanwhile is looked for"


def test_where_bookies_lack_it_is_said_whose_registrations_cannot_be_used(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        with closing(open_metadata(cluster.url)) as store:
            store.create(f"{BOOKIES_KEY}/bookie-9", b"nobody's")
        text = r"there are 3 \(.*\), and 1 whose registrations cannot be used: metadata key 'bookies/bookie-9'"
        with pytest.raises(NotEnoughBookiesError, match=text):
            cluster.connect().create_ledger(insecure=True, ensemble_size=4, write_quorum=2)


def test_ledgers_in_too_few_zones_are_counted_or_refused(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        metadata_of = cluster_backend_of(client).membership.metadata
        for strict in (False, True):
            placement = PlacementSettings(min_zones=2, strict=strict)
            metadata_of.change_settings(partial(replace, placement=placement))
            if strict:
                with pytest.raises(NotEnoughBookiesError, match="bookie-0, bookie-1, bookie-2 without a label"):
                    client.create_ledger(insecure=True)
            else:
                client.create_ledger(insecure=True).close()
        counters = client.metrics().counters
        assert [value for key, value in counters.items() if key.name == MISPLACED_CHOICES] == [1]


# ---- placement -------------------------------------------------------------------------------------------------------


class Racks:
    """A cluster of which there are only registrations, and a client's membership.

    Attributes:
        store: The metadata store.
        cluster: The metadata in it.
        membership: The client's.
        registered: The registrations, by number.
    """

    def __init__(self, store: MetadataStore, cluster: ClusterMetadata, labels: tuple[str, ...]) -> None:
        self.store = store
        self.cluster = cluster
        self.registered: list[RegisteredBookie] = []
        for number, label in enumerate(labels):
            cluster.claim_cookie(bookie(number))
            registration = BookieRegistration(
                bookie=bookie(number), addresses=("tcp://127.0.0.1:1",), rack=label, level_max=NEWEST_LEVEL
            )
            self.registered.append(cluster.register(registration))
        self.membership = Membership(cluster)

    def ask(self, min_zones: int, strict: bool = False) -> None:
        """Set the policy."""
        placement = PlacementSettings(min_zones=min_zones, strict=strict)
        self.cluster.change_settings(lambda settings: replace(settings, placement=placement))

    def change_state(self, bookie: Bookie, state: BookieState) -> None:
        """Give a bookie another state."""
        self.cluster.change_cookie(bookie.bookie_id, lambda found: replace(found, state=state))

    def damage_cookie(self, bookie: Bookie) -> None:
        """Have the cookie of a bookie be none."""
        key = f"{COOKIES_KEY}/{bookie.bookie_id}"
        found = self.store.get(key)
        assert found is not None
        self.store.put(key, b"no cookie", found.version)

    def misplaced(self) -> int:
        """Return how many choices the client counted as misplaced."""
        counters = self.membership.metrics.snapshot().counters
        return sum(value for key, value in counters.items() if key.name == MISPLACED_CHOICES)

    def ensemble(self) -> tuple[Bookie, ...]:
        """Choose an ensemble of three, which are all of its write sets."""
        choice = self.membership.ensemble(metadata())
        return tuple(choice.bookies[place] for place in range(3))

    def replace(self, place: int, ensemble: tuple[Bookie, ...], *, copies: bool = False) -> BookiesChosen:
        """Choose a bookie for a place of an ensemble, whose present one has failed."""
        ledger = RemoteLedger(metadata(), 0, b"")
        effect = ChooseBookies((place,), ensemble, frozenset([ensemble[place]]), copies)
        found = self.membership.choose(ledger, effect)
        assert isinstance(found, BookiesChosen)
        return found


@contextmanager
def racks(directory: Path, *labels: str) -> Iterator[Racks]:
    """Register bookies that have labels."""
    store = open_metadata(f"lmdb://{directory}/metadata")
    with ClusterMetadata(store, cost=2) as cluster:
        made = Racks(store, cluster, labels)
        yield made
        made.membership.close()


def test_a_ledger_spans_zones_also_where_the_policy_does_not_ask_for_it(tmp_path: Path) -> None:
    with racks(tmp_path, "/a/r1", "/a/r2", "/a/r3", "/b/r1", "/c/r1") as cluster:
        for _ in range(20):
            found = cluster.ensemble()
            assert {bookie(3), bookie(4)} < set(found)


def test_a_strict_policy_refuses_ledgers_and_names_who_lacks_what(tmp_path: Path) -> None:
    with racks(tmp_path, "/a/r1", "/b/r1", "", "/a") as cluster:
        assert len(cluster.ensemble()) == 3
        cluster.ask(3)
        assert len(cluster.ensemble()) == 3
        assert cluster.misplaced() == 1
        cluster.ask(3, strict=True)
        with pytest.raises(NotEnoughBookiesError, match=r"placement\.strict") as refused:
            cluster.ensemble()
        assert "in 3 zones" in str(refused.value)
        assert "there are b0, b3 in zone a; b1 in zone b; b2 without a label" in str(refused.value)
        cluster.ask(2, strict=True)
        assert set(cluster.ensemble()) == {bookie(0), bookie(1), bookie(3)}
        assert cluster.misplaced() == 1


def test_a_strict_policy_that_is_not_the_reason_is_not_blamed(tmp_path: Path) -> None:
    with racks(tmp_path, "/a", "/b") as cluster:
        cluster.ask(2, strict=True)
        with pytest.raises(NotEnoughBookiesError, match=r"needs 3 writable bookies; there are 2 \(b0, b1\)"):
            cluster.ensemble()


def test_a_bookie_that_left_counts_where_it_stood(tmp_path: Path) -> None:
    with racks(tmp_path, "/a", "/b", "/c", "/a", "/b", "/c") as cluster:
        cluster.ask(3, strict=True)
        ensemble = (bookie(0), bookie(1), bookie(2))
        cluster.registered[1].close()
        cluster.membership.refresh()
        assert cluster.replace(2, ensemble) == BookiesChosen({2: bookie(5)})
        cluster.registered[5].close()
        found = cluster.replace(2, ensemble)
        assert found.bookies == {}
        assert "b0 in a, b1 in b stay, and there are b0, b3 in zone a; b4 in zone b; b2 in zone c" in found.why
        cluster.ask(3)
        assert set(cluster.replace(2, ensemble).bookies.values()) <= {bookie(3), bookie(4)}
        assert cluster.misplaced() == 1


def test_a_bookie_may_take_a_place_unless_another_would_spread_the_copies_more(tmp_path: Path) -> None:
    with racks(tmp_path, "/a", "/b", "/c", "/a", "/c") as cluster:
        fragment = Fragment(0, (bookie(0), bookie(1), bookie(2)))

        def may(number: int, place: int, *, among_best: bool = True) -> bool:
            return cluster.membership.may_take(bookie(number), metadata(), fragment, place, among_best=among_best)

        assert may(4, 2)
        assert not may(3, 2), "bookie 4 stands where no other copy is"
        assert may(3, 2, among_best=False), "no zones are asked for"
        assert not may(1, 2, among_best=False), "it has a place"
        assert not may(9, 2), "it is not registered"
        cluster.ask(3)
        assert not may(3, 2), "bookie 4 stands in the zone that is needed"
        assert may(4, 2)
        cluster.registered[4].close()
        cluster.membership.refresh()
        assert may(3, 2), "nobody does better"
        cluster.ask(3, strict=True)
        assert not may(3, 2)


def test_a_bookie_that_is_full_takes_no_place(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "", "") as cluster:
        fragment = Fragment(0, (bookie(0), bookie(1), bookie(2)))
        full = cluster.registered[3].written
        cluster.registered[3].update(replace(full, read_only=True))
        cluster.membership.refresh()
        assert not cluster.membership.may_take(bookie(3), metadata(), fragment, 0)


def test_bookies_join_a_ledger_unless_they_leave_by_their_cookies(tmp_path: Path) -> None:
    """H14. A cookie that cannot be read proves nothing, so no bookie was removed with a proof because of it."""
    with racks(tmp_path, "/a", "/b", "/c", "/d") as cluster:
        states = {0: (), 1: (DRAINING,), 2: (DRAINING, DRAINED), 3: (DRAINING, DRAINED, REMOVED)}
        for number, changes in states.items():
            for state in changes:
                cluster.change_state(bookie(number), state)
        replaced = Bookie(bookie(0).bookie_id, b"another instance")
        unknown, damaged = bookie(8), bookie(9)
        cluster.cluster.claim_cookie(damaged)
        cluster.damage_cookie(damaged)
        made = replace(metadata(), key_salt=b"s" * 16)
        version = cluster.cluster.create_ledger(made)
        ledger = RemoteLedger(made, version, b"")

        def write(*joining: Bookie) -> Event:
            wanted = replace(made, version=made.version + 1)
            return cluster.membership.write(ledger, WriteMetadata(wanted, version, frozenset(joining)))

        everyone = (*map(bookie, states), replaced, unknown, damaged)
        leaving = tuple(sorted((bookie(1), bookie(2), bookie(3), replaced)))
        assert write(*everyone) == BookiesLeave(leaving)
        assert cluster.cluster.read_ledger(made.ledger_id) == (made, version), "nothing was written"
        assert isinstance(write(bookie(0), unknown, damaged), MetadataWritten)


def test_a_bookie_that_was_never_seen_counts_where_its_cookie_says(tmp_path: Path) -> None:
    """BookKeeper 2642, 4439: bookies that left fall into the default rack."""
    with racks(tmp_path, "/a", "/b", "/c") as cluster:
        cluster.ask(3, strict=True)
        away, replaced = bookie(8), bookie(9)
        cluster.cluster.claim_cookie(away)
        cluster.cluster.record_boot(away, 1, location="c/r1")
        another = Bookie(replaced.bookie_id, b"another instance")
        cluster.cluster.claim_cookie(another)
        cluster.cluster.record_boot(another, 1, location="b")
        found = cluster.replace(1, (bookie(0), bookie(1), away))
        assert found.bookies == {}
        assert "b0 in a, b8 in c stay" in found.why
        assert cluster.replace(1, (bookie(0), bookie(7), away)) == BookiesChosen({1: bookie(1)})
        found = cluster.replace(2, (bookie(0), replaced, bookie(2)))
        assert found == BookiesChosen({2: bookie(1)}), "what another instance's cookie says is not known of this one"


# ---- members that are away -------------------------------------------------------------------------------------------


def leave(cluster: Racks, *numbers: int) -> None:
    """Have bookies end, and the client know it."""
    for number in numbers:
        cluster.registered[number].close()
    cluster.membership.refresh()


def test_a_bookie_that_is_away_is_a_member_of_a_new_ledger_and_counted(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        leave(cluster, 1)
        assert cluster.membership.ensemble(metadata()).away == {bookie(1)}
        counters = cluster.membership.metrics.snapshot().counters
        assert [value for key, value in counters.items() if key.name == AWAY_MEMBERS] == [1]
        assert cluster.membership.seen_before == {"b1"}


def test_a_bookie_that_leaves_is_no_member_while_it_is_away(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        leave(cluster, 1)
        for state in (DRAINING, DRAINED, REMOVED):
            cluster.change_state(bookie(1), state)
            with pytest.raises(NotEnoughBookiesError, match=r"writable bookies; there are 2 \(b0, b2\): start more"):
                cluster.ensemble()


def test_a_bookie_whose_loss_was_accepted_is_no_member_while_it_is_away(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        leave(cluster, 1)
        accepted = RepairSettings(accepted_losses=("b1",))
        cluster.cluster.change_settings(lambda settings: replace(settings, repair=accepted))
        with pytest.raises(NotEnoughBookiesError):
            cluster.ensemble()


def test_the_error_says_which_bookies_are_away_and_why_they_are_not_taken(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        leave(cluster, 1)
        with pytest.raises(NotEnoughBookiesError, match=r"1 that are away \(b1\)") as refused:
            cluster.membership.ensemble(metadata((3, 3, 3)))
        assert "each write set has its ack_quorum (3 of 3) without them" in str(refused.value)
        smaller = "ensemble_size=2, write_quorum=2, ack_quorum=2 of a ledger, quorums=(2, 2, 2) of a log"
        assert f"start more, or ask for fewer: {smaller}" in str(refused.value)
        assert cluster.membership.ensemble(metadata((2, 2, 2)))
        leave(cluster, 2)
        with pytest.raises(NotEnoughBookiesError, match=r"there are 1 \(b0\), and 2 that are away \(b1, b2\)"):
            cluster.ensemble()


def test_what_a_writer_reports_is_marked_as_what_the_bookie_has_not_acknowledged(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        made = metadata()
        ledger = RemoteLedger(made, 0, cluster.cluster.describe(made))
        cluster.membership.report_missing(ledger, UnderReplicated(bookie(1), 3))
        (mark,) = cluster.cluster.marks()
        assert (mark.ledger_id, mark.bookie, mark.causes) == (made.ledger_id, bookie(1), ((RepairReason.MISSED, 3),))


def test_a_read_only_bookie_is_a_member_of_a_new_ledger_as_one_that_is_away(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "") as cluster:
        refuse(cluster, 1, "store_full")
        choice = cluster.membership.ensemble(metadata())
        assert choice.away == {bookie(1)}
        assert choice.missed == (UnderReplicated(bookie(1), 0),)
        assert not cluster.membership.keeps(bookie(1))
        assert cluster.membership.not_writable == {"b1"}


def test_the_error_says_which_bookies_are_read_only_and_why_and_what_to_do(tmp_path: Path) -> None:
    with racks(tmp_path, "", "", "", "", "") as cluster:
        for number, why in ((1, "store_full"), (2, "retired"), (3, "")):
            refuse(cluster, number, why)
        cluster.change_state(bookie(4), DRAINING)
        refuse(cluster, 4, "draining")
        with pytest.raises(NotEnoughBookiesError) as refused:
            cluster.ensemble()
    text = str(refused.value)
    assert "an ensemble of 3 needs 3 writable bookies; there are 1 (b0, b1 read-only: too little free space, " in text
    assert "b2 read-only: it ends, or was retired until its next start, b3 read-only: its log says why, " in text
    assert "b4 read-only: it is drained)" in text
    assert "away or read-only may be members only while each write set has its ack_quorum (2 of 3) without them" in text
    assert (
        "start more, free space on b1, b3, restart b2, end the drain (`pybk bookie cancel-drain URL NAME`) of b4, or"
        in text
    )
    assert "`pybk cluster status URL`" in text


def refuse(cluster: Racks, number: int, why: str) -> None:
    """Have a bookie register as read-only, and the client know it."""
    cluster.registered[number].update(replace(cluster.registered[number].written, read_only=True, why_read_only=why))
    cluster.membership.refresh()


def test_a_strict_policy_takes_a_bookie_that_is_away_where_its_cookie_says_that_it_stands(tmp_path: Path) -> None:
    with racks(tmp_path, "/a/r1", "/b/r1", "/c/r1", "/a/r2") as cluster:
        for number, zone in enumerate("abca"):
            cluster.cluster.record_boot(bookie(number), 1, location=f"{zone}/r{number}")
        cluster.ask(3, strict=True)
        leave(cluster, 2)
        choice = cluster.membership.ensemble(metadata())
        assert choice.away == {bookie(2)}
        assert bookie(1) in choice.bookies.values()


def test_what_a_bookie_misses_that_is_away_is_recorded_before_there_is_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        backend = cluster_backend_of(client)
        assert isinstance(backend, ClusterBackend)
        cluster.bookies[1].close()
        wait_until(lambda: len(backend.membership.bookies) == 2)
        monkeypatch.setattr(backend.membership.metadata, "mark_under_replicated", unreachable)
        with pytest.raises(MetadataUnreachableError):
            client.create_ledger(insecure=True)
        monkeypatch.undo()
        with client.create_ledger(insecure=True) as writer:
            (mark,) = backend.membership.metadata.marks_of(writer.ledger_id)
            assert (mark.bookie.bookie_id, mark.first_entry_id) == ("bookie-1", 0)
            writer.append(b"x")
            cluster.open_bookie(1)
            wait_until(lambda: len(client.ledger_metadata(writer.ledger_id).fragments) == 2)


def unreachable(*_: object, **__: object) -> None:
    raise MetadataUnreachableError("cut off by the test")
