"""What a network does: nothing passes, one way or both, or it passes late, broken or damaged."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pybk.errors import LedgerFencedError, NotEnoughBookiesError
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.ledger_writer import LedgerWriter
from tests.cluster.checker import check_ledger, check_writer, last_acked
from tests.cluster.child import PASSWORD, PATIENCE, payload, route
from tests.cluster.processes import BookieProcess, Cluster, running
from tests.cluster.proxy import Proxy
from tests.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.sampled(one_in=6, using="cluster")


@pytest.fixture(scope="module", params=["secret", pytest.param("no secret", marks=pytest.mark.long)])
def three_bookies(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    arguments = {} if request.param == "secret" else {"secret": None}
    with running(tmp_path_factory.mktemp("three"), 3, **arguments) as cluster:
        yield cluster


@pytest.fixture
def cluster(three_bookies: Cluster) -> Iterator[Cluster]:
    yield three_bookies
    for bookie in three_bookies.bookies.values():
        bookie.proxy.heal()


class Damage:
    """Flips a bit in the first payload that passes and says so, some times."""

    def __init__(self, mark: bytes, times: int) -> None:
        self._mark = mark
        self.left = times

    def __call__(self, data: bytes) -> bytes:
        at = data.find(self._mark)
        if at < 0 or not self.left:
            return data
        self.left -= 1
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


class DamageAnything:
    """Flips a bit in every so many bytes."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._passed = 0
        self.times = 0

    def __call__(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for at in range(self._every - self._passed % self._every - 1, len(data), self._every):
            changed[at] ^= 16
            self.times += 1
        self._passed += len(data)
        return bytes(changed)


def _write(writer: LedgerWriter, count: int) -> None:
    for _ in range(count):
        writer.append(payload(writer.ledger_id, writer.last_add_pushed + 1))


def _created(cluster: Cluster, client: LedgerManager) -> tuple[LedgerWriter, list[BookieProcess]]:
    writer = client.create_ledger(password=PASSWORD)
    _write(writer, 20)
    return writer, [cluster.bookie(bookie) for bookie in writer.metadata.fragments[0].ensemble]


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_a_bookie_that_is_cut_off_delays_no_append_and_catches_up(
    cluster: Cluster, ways: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name, value in PATIENCE:
        monkeypatch.setattr(owner, name, value)
    writer, bookies = _created(cluster, cluster.connect(routed=True))
    bookies[1].proxy.hold(requests=ways[0], replies=ways[1])
    began = time.monotonic()
    _write(writer, 200)
    assert time.monotonic() - began < WAIT_S, "appends wait until the bookie is given up"
    bookies[1].proxy.heal()
    _write(writer, 20)
    writer.close()
    metadata = check_ledger(cluster, writer.ledger_id, 239, 239)
    assert len(metadata.fragments) == 1


def test_a_writer_that_is_cut_off_from_all_bookies_is_fenced_by_a_recovery(cluster: Cluster) -> None:
    writer, bookies = _created(cluster, cluster.connect(routed=True))
    for bookie in bookies:
        bookie.proxy.hold()
    futures = [writer.append_async(payload(writer.ledger_id, 20 + number)) for number in range(50)]
    reader = cluster.connect().open_ledger(writer.ledger_id, password=PASSWORD)
    assert reader.metadata.state is LedgerState.CLOSED
    assert reader.last_add_confirmed == 19, "nothing of what was held back can have arrived"
    for bookie in bookies:
        bookie.proxy.heal()
    assert {type(future.exception(WAIT_S)) for future in futures} == {LedgerFencedError}
    with pytest.raises(LedgerFencedError):
        writer.append(b"this must not be in the ledger")
    check_ledger(cluster, writer.ledger_id, 19, 19)


def test_connections_that_break_while_entries_are_on_their_way(cluster: Cluster) -> None:
    writer, bookies = _created(cluster, cluster.connect(routed=True))
    for number in range(9):
        futures = [writer.append_async(payload(writer.ledger_id, writer.last_add_pushed + 1)) for _ in range(50)]
        bookies[number % 2].proxy.cut()
        errors = {type(error) for future in futures if (error := future.exception(WAIT_S)) is not None}
        # With two bookies given up and nobody to take their places, the writer may end; nothing may be lost.
        assert errors <= {NotEnoughBookiesError}
        if errors:
            break
    check_ledger(cluster, writer.ledger_id, writer.last_add_confirmed, writer.last_add_pushed)


@pytest.mark.parametrize("damage", [lambda: Damage(b"/25 ", 1), lambda: DamageAnything(5_000)])
@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_messages_damaged_on_the_way_are_noticed_and_sent_again(
    cluster: Cluster, direction: str, damage: Callable[[], Callable[[bytes], bytes]]
) -> None:
    writer, bookies = _created(cluster, cluster.connect(routed=True))
    change = damage()
    getattr(bookies[0].proxy, direction).change = change
    _write(writer, 60)
    reading = cluster.connect(routed=True).open_ledger(writer.ledger_id, password=PASSWORD, recover=False)
    for _ in range(3):
        found = [entry.payload for entry in reading.read(0, reading.last_add_confirmed)]
        assert found == [payload(writer.ledger_id, entry_id) for entry_id in range(len(found))]
    if isinstance(change, DamageAnything):
        damaging = change

        def has_damaged() -> bool:
            """Append once more, because a bookie that lags gets and answers many entries as one message."""
            _write(writer, 1)
            return damaging.times > 0

        wait_until(has_damaged)
    elif direction == "requests" and cluster.secret is None:
        assert isinstance(change, Damage)
        assert change.left == 0
        assert len(writer.metadata.fragments) == 1
    bookies[0].proxy.heal()
    writer.close()
    last = writer.last_add_confirmed
    assert last >= 79
    check_ledger(cluster, writer.ledger_id, last, last)


def test_a_slow_network_delays_and_nothing_else(cluster: Cluster, tmp_path: Path) -> None:
    writer, bookies = _created(cluster, cluster.connect(routed=True))
    for bookie in bookies:
        bookie.proxy.replies.delay_s = 0.02
    began = time.monotonic()
    _write(writer, 20)
    assert time.monotonic() - began > 0.4
    writer.close()
    check_ledger(cluster, writer.ledger_id, 39, 39)


def test_entries_that_a_recovery_could_not_write_back_are_recorded(cluster: Cluster) -> None:
    writer = cluster.writer(routed=True, window=20, pause_s=0.02)
    ledger_id = int(writer.said("ledger")[0])
    first, second, third = map(cluster.bookie, cluster.connect().ledger_metadata(ledger_id).fragments[0].ensemble)
    writer.wait_for(lambda: last_acked(writer) > 5)
    writer.stop()
    time.sleep(0.1)  # everything that was sent has arrived
    for bookie in (second, third):
        bookie.proxy.hold()
    passed, answered = first.proxy.requests.passed, first.proxy.replies.passed
    writer.signal(signal.SIGCONT)
    # Only the first bookie gets what is written now, and the writer cannot know it.
    wait_until(lambda: first.proxy.requests.passed > passed + 1000)
    wait_until(lambda: first.proxy.replies.passed > answered, "the first bookie to have it")
    writer.kill()
    other = Proxy(third.proxy.target)
    other.hold()
    client = cluster.connect()
    route(client, {third.name: other.address})
    client.open_ledger(ledger_id, password=PASSWORD)
    other.close()
    metadata = check_writer(cluster, writer)
    assert metadata.last_entry_id > last_acked(writer)


def test_entries_that_a_killed_writer_had_not_sent_to_a_slow_bookie_are_recorded(cluster: Cluster) -> None:
    writer = cluster.writer(routed=True, window=20, pause_s=0.001)
    ledger_id = int(writer.said("ledger")[0])
    slow = cluster.bookie(cluster.connect().ledger_metadata(ledger_id).fragments[0].ensemble[2])
    writer.wait_for(lambda: last_acked(writer) > 20)
    slow.proxy.hold()
    behind = last_acked(writer)
    writer.wait_for(lambda: last_acked(writer) > behind + 100)
    writer.kill()
    slow.proxy.cut()
    check_writer(cluster, writer)


def test_a_bookie_that_is_silent_in_a_recovery_is_recorded_when_the_client_has_closed(cluster: Cluster) -> None:
    writer = cluster.writer(routed=True, window=20, pause_s=0.001)
    ledger_id = int(writer.said("ledger")[0])
    silent = cluster.bookie(cluster.connect().ledger_metadata(ledger_id).fragments[0].ensemble[2])
    writer.wait_for(lambda: last_acked(writer) > 20)
    silent.proxy.hold()
    behind = last_acked(writer)
    writer.wait_for(lambda: last_acked(writer) > behind + 100)
    writer.kill()
    other = Proxy(silent.proxy.target)
    other.hold()
    with cluster.connect() as client:
        route(client, {silent.name: other.address})
        client.open_ledger(ledger_id, password=PASSWORD)
    other.close()
    silent.proxy.cut()
    check_writer(cluster, writer)
