"""Sinks without Spark: what is decided on a commit, and what becomes of ledgers in a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pybk.credentials import Secret
from pybk.manager import LedgerManager
from pybk.spark.connection import Connection, Where, close_connections, connection
from pybk.spark.manifest import SINK_KEY, Sink, Written, committed
from pybk.spark.record import Attempt
from tests.cluster.inside import SECRET, Inside, inside


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("sinks")) as cluster:
        yield cluster
        close_connections()


@pytest.fixture
def place(cluster: Inside) -> Connection:
    return connection(Where(metadata_uri=cluster.url, secret=Secret(SECRET)))


def sink_of(place: Connection, app: str) -> Sink:
    assert place.metadata is not None
    return Sink(place.manager, place.metadata, app)


def write(manager: LedgerManager, app: str, *payloads: bytes) -> Written:
    """Write a ledger as a task does."""
    with manager.create_ledger(custom_metadata={SINK_KEY: app.encode()}) as writer:
        writer.append_many(payloads)
    return Written(writer.ledger_id, len(payloads), writer.length, writer.metadata.creation_time_ns)


def test_ledgers_count_once_they_are_committed(place: Connection) -> None:
    sink = sink_of(place, "one")
    written = write(place.manager, "one", b"a", b"b")
    assert committed(place, "one") == set()
    assert sink.commit(Attempt(0, written.created_ns, "q", "r"), [written])
    assert committed(place, "one") == {written.ledger_id}
