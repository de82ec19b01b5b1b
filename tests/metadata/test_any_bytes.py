"""Whatever bytes a metadata store or a checkpoint holds: a value of the project, or an error of the project."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from pybk.bookie.directory_identity import IDENTITY_KEY, DirectoryIdentity
from pybk.errors import CorruptError, MetadataForgedError, PybkError, UsageError
from pybk.feature_level import NEWEST_LEVEL
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.metadata.authenticated_values import ValueKind, encode_authenticated
from pybk.metadata.cluster import CLUSTER_KEY, ClusterMetadata
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metadata.ledgers import IDS_KEY, LEDGERS_KEY, ledger_path
from pybk.metadata.registration import BookieCookie, encode_cookie, encode_registration
from pybk.metadata.settings import SETTINGS_KEY, ClusterSettings, ScrubSettings, encode_settings
from pybk.metadata.store import MetadataStore
from pybk.metadata.underreplication import UnderReplicatedLedger, missing_key, record_json
from pybk.spark.consumers import Consumer, Selection
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.sink.sink_record import ManifestRow, SinkRecord, decode_rows, encode_rows
from pybk.spark.source.offsets import Offset
from pybk.storage.format.extent import EXTENT_KEY, Extent
from pybk.storage.format.log_file import entry_ends, location_dtype
from pybk.storage.store_reader import entry_span, locate_entries
from pybk.transport.curve import check_address
from pybk.values import encode_json
from tests.metadata.records import KEYS, bookie, cluster_on, ledger, registration
from tests.metadata.simulated_store import SimServer

patient = settings(suppress_health_check=list(HealthCheck))
TOKEN = bytes(16)
IDENTITY = DirectoryIdentity(b"c", "a", b"i" * 16, 1, 7)

numbers = st.sampled_from(
    ["1e999", "-1e999", "NaN", "1e400", "-1", "0", "1.5", str(1 << 63), str(1 << 70), "9" * 5000, "true", "null"]
)
texts = st.sampled_from(
    ['""', '"\\ud800"', '"x"', '"===="', '"AA=="', "[]", "{}", "[[]]", '[["a"]]', "[1e999]", '{"a":1e999}']
)
junk = numbers | texts | st.text(max_size=8).map(json.dumps)


@st.composite
def wrong_json(draw: st.DrawFn, sound: bytes) -> bytes:
    """Some JSON in which parts of what belongs there are replaced, or missing."""
    values = json.loads(sound)
    holes: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        places = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for place in places:
            holes.append((value, place))
            walk(value[place])

    walk(values)
    for number in range(draw(st.integers(1, 2))):
        where, place = draw(st.sampled_from(holes))
        where[place] = f"<hole {number}>"
    if draw(st.booleans()) and draw(st.booleans()):
        values.pop(draw(st.sampled_from(sorted(values))))
    text = json.dumps(values)
    for number in range(2):
        text = text.replace(f'"<hole {number}>"', draw(junk))
    return text.encode()


def anything(sound: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, and those that are nearly right."""
    return st.binary(max_size=80) | wrong_json(sound) | st.just(sound)


def sealed_world(kind: ValueKind, key: str, payload: bytes) -> tuple[ClusterMetadata, MetadataStore]:
    store = SimServer().store()
    cluster = cluster_on(store)
    value = encode_authenticated(kind, key, TOKEN, payload, KEYS, NEWEST_LEVEL)
    node = store.get(key)
    if node is None:
        store.create(key, value)
    else:
        store.put(key, value, node.version)
    return cluster, store


COOKIE_KEY = f"cookies/{bookie(1).bookie_id.replace(':', '%3A')}"
BOOKIE_KEY = f"bookies/{bookie(1).bookie_id.replace(':', '%3A')}"
LEDGER_KEY = f"{LEDGERS_KEY}/{ledger_path(7)}"
MISSING = UnderReplicatedLedger(7, bookie(1), 3)
SEALED: dict[str, tuple[ValueKind, str, bytes, Callable[[ClusterMetadata], Any]]] = {
    "ids": (ValueKind.IDS, IDS_KEY, encode_json({"next": 5}), lambda cluster: cluster.new_ledger_id()),
    "ledger": (ValueKind.LEDGER, LEDGER_KEY, ledger(7).encode(), lambda cluster: cluster.read_ledger(7)),
    "tombstone": (
        *(ValueKind.DELETED, LEDGER_KEY, encode_json({"ledger_id": 7, "proof": "AAAA"})),
        lambda cluster: cluster.deletion_proofs([7]),
    ),
    "lock": (
        *(ValueKind.LOCK, "locks/auditor", encode_json({"by": "me", "owner": "you"})),
        lambda cluster: cluster.lock_owner("auditor"),
    ),
    "missing": (
        *(ValueKind.UNDER_REPLICATED, missing_key(7, bookie(1)), record_json(MISSING)),
        lambda cluster: cluster.mark_under_replicated(7, bookie(1), 0),
    ),
    "cookie": (
        *(ValueKind.COOKIE, COOKIE_KEY, encode_cookie(BookieCookie(bookie(1), bytes(16), 3))),
        lambda cluster: cluster.read_cookie(bookie(1).bookie_id),
    ),
    "settings": (
        *(ValueKind.SETTINGS, SETTINGS_KEY, encode_settings(ClusterSettings(), {})),
        lambda cluster: cluster.change_settings(lambda now: replace(now, changed_by="", scrub=ScrubSettings(deep_s=9))),
    ),
    "registration": (
        *(ValueKind.BOOKIE, BOOKIE_KEY, encode_registration(registration(bookie(1)), "me")),
        lambda cluster: cluster.find_bookie(bookie(1).bookie_id),
    ),
}


def quietly(call: Callable[[], Any]) -> None:
    """Call something that may fail, but only in the project's own way."""
    with suppress(PybkError):
        call()


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", SEALED)
@patient
@given(data=st.data())
def test_a_sealed_value_of_any_bytes(name: str, data: st.DataObject) -> None:
    kind, key, sound, read = SEALED[name]
    cluster, _ = sealed_world(kind, key, data.draw(anything(sound)))
    quietly(lambda: read(cluster))


@patient
@given(data=st.data())
def test_a_cluster_of_any_bytes(data: st.DataObject) -> None:
    store = SimServer().store()
    cluster_on(store)
    node = store.get(CLUSTER_KEY)
    assert node is not None
    at = node.value.index(b'{"cluster_id"')
    payload = node.value[at:]
    value = (
        node.value[:19] + data.draw(anything(payload)) if data.draw(st.booleans()) else data.draw(st.binary(min_size=1))
    )
    store.put(CLUSTER_KEY, value, node.version)
    quietly(lambda: cluster_on(store))


def offset_of(text: bytes) -> Offset:
    """Decode an offset as Spark has it decoded: pyspark parses the JSON, and pybk gets the values."""
    try:
        values = json.loads(text)
    except ValueError:  # an integer of more digits than Python converts: pyspark fails before pybk is called
        reject()
    return Offset.from_json(values)


@patient
@given(data=st.data())
def test_plain_values_of_any_bytes(data: st.DataObject) -> None:
    sound = ledger(7)
    custom = {IDENTITY_KEY: data.draw(anything(IDENTITY.encode())), EXTENT_KEY: data.draw(st.binary(max_size=40))}
    described = LedgerDescription.of(sound).encode(None)
    calls: list[Callable[[], Any]] = [
        lambda: LedgerMetadata.decode(data.draw(anything(sound.encode())), where="here"),
        lambda: LedgerDescription.decode(described[:2] + data.draw(anything(described[2:])), None, where="here"),
        lambda: LedgerDescription.decode(data.draw(st.binary(max_size=60)), None, where="here"),
        lambda: DirectoryIdentity.of(ledger(7, custom_metadata=custom)),
        lambda: Extent.decode(custom, where="here"),
        lambda: SinkRecord.decode(
            data.draw(anything(SinkRecord(((3, 1),), 2, ("a",), 5, "q", 7, (9,), (ROW,), 8).encode())), where="here"
        ),
        lambda: decode_rows([data.draw(anything(encode_rows(3, [ROW])[0]))], where="here"),
        lambda: Consumer.decode("here", data.draw(anything(CONSUMER.encode()))),
        lambda: offset_of(data.draw(wrong_json(json.dumps(OFFSET.to_json()).encode()))),
    ]
    quietly(data.draw(st.sampled_from(calls)))


ROW = ManifestRow(1, 2, 3, 4)
CONSUMER = Consumer("here", Selection("t", ((1, 2),)), FinishedLedgers(((3, 4),), ((5, 6),), 7, 8), "run", 9)
OFFSET = Offset({1: 2}, {3: 4}, ((99, ((5, 6),)),), 7, 8, ((9, 9),), "of")


@patient
@given(
    st.text(max_size=40) | st.sampled_from(["tcp://[", "tcp://a:b", "tcp://h:99999", "tcp://h", "ipc://", "tcp://:1"])
)
def test_an_address_of_any_text(text: str) -> None:
    quietly(lambda: check_address(text, secret=True))
    quietly(lambda: check_address("tcp://" + text, secret=True))


@pytest.mark.parametrize("text", ["tcp://[", "tcp://a:b", "tcp://h:99999", "tcp://h", "ipc://", "tcp://:1", "tcp://"])
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address"):
        check_address(text, secret=True)


@patient
@given(st.binary(max_size=200), st.integers(0, 40), st.binary(min_size=64, max_size=64), st.integers(0, 60))
def test_tables_of_any_bytes(buffer: bytes, count: int, words: bytes, entry_id: int) -> None:
    import numpy as np

    view = memoryview(buffer)
    quietly(lambda: entry_ends(view, count, where="here"))
    runs = np.frombuffer(words, location_dtype()).copy()
    runs["count"] %= 50  # a table may be large; what it costs is bounded by the record that holds it
    starts = runs["offset"].astype(np.int64) % 64
    runs["body"] %= 200
    quietly(lambda: locate_entries(view, runs, starts, where="here"))
    numbers = np.frombuffer(words, "<i8").tolist()
    place = (numbers[2] & 0xFF) | 1 << 32
    quietly(
        lambda: entry_span(view, (numbers[0] % 50, numbers[1] & 0x7FFFFFFFFFFFFFFF, place, numbers[3] & 0xFF), entry_id)
    )


def test_one_junk_key_hides_no_ledger(caplog: pytest.LogCaptureFixture) -> None:
    store = SimServer().store()
    cluster = cluster_on(store)
    for ledger_id in (3, 7, 12_345_678):
        cluster.create_ledger(ledger(ledger_id))
    for junk_key in (
        "junk",
        "000/junk",
        "000/0000/0000/0000/00x3",
        "000/0000/0000/0000/٠٠٠٤",
        "000/0000/0000/0000/0006-x",
    ):
        store.create(f"{LEDGERS_KEY}/{junk_key}", b"x")
    damaged = f"{LEDGERS_KEY}/{ledger_path(5)}"
    store.create(damaged, b"nonsense")
    assert cluster.list_ledgers() == [3, 5, 7, 12_345_678]
    assert [found.metadata.ledger_id for found in cluster.read_sound_ledgers(cluster.list_ledgers())] == [
        *(3, 7),
        12_345_678,
    ]
    assert "junk" in caplog.text
    assert "ledger 5" in caplog.text
    with pytest.raises((CorruptError, MetadataForgedError)):
        cluster.read_ledgers([3, 5])
    cluster.mark_under_replicated(3, bookie(1), 0)
    store.create(missing_key(4, bookie(1)), b"nonsense")
    assert [record.ledger_id for record in cluster.marks()] == [3]
    cluster.claim_cookie(bookie(1))
    store.create("cookies/b", b"nonsense")
    assert [cookie.bookie for cookie in cluster.list_cookies()] == [bookie(1)]


def test_a_registration_without_end_is_an_error_of_the_project() -> None:
    sound = json.loads(encode_registration(registration(bookie(1)), "me"))
    for name in ("load", "tiers", "addresses"):
        text = json.dumps({**sound, name: "<hole>"}).replace('"<hole>"', "1e999")
        cluster, _ = sealed_world(ValueKind.BOOKIE, BOOKIE_KEY, text.encode())
        with pytest.raises(CorruptError):
            cluster.find_bookie(bookie(1).bookie_id)
        assert cluster.list_bookies() == []
