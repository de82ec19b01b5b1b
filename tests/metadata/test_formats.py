"""The bytes in the metadata store: golden values of every kind, and what is done about others."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import (
    CorruptError,
    MetadataForgedError,
    PybkError,
    UnsupportedFormatError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.ledger_metadata import (
    CUSTOM_METADATA_BYTES_MAX,
    DESCRIPTION_BYTES_MAX,
    DESCRIPTION_BYTES_MAX_BASE,
    LedgerMetadata,
    LedgerState,
)
from pybk.metadata import durable_positions, lmdb_rows
from pybk.metadata.authenticated_values import ValueKind, decode_authenticated, epoch_of, token_of, unchanged_since
from pybk.metadata.cluster import check_cluster_value, from_values, from_values_base
from pybk.metadata.durable_positions import DurablePosition
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metadata.ledgers import ledger_path
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.registration import decode_cookie, decode_registration
from pybk.values import decode_json, encode_json
from tests.metadata.golden import (
    CLUSTER,
    GOLDEN_HEALING,
    GOLDEN_METADATA,
    GOLDEN_ROTATED,
    GOLDEN_SEALS,
    GOLDEN_SECRETS,
    GOLDEN_STREAMS,
    SECRETS,
    SINCE,
    TOKEN,
    golden,
    golden_rotated,
    rotated,
    steps,
    values,
)
from tests.metadata.records import KEY, KEYS, bookie, ledger, registration
from tests.storage.memory_environment import MapEnvironment

GOLDEN_LEVELS = (GOLDEN_METADATA, GOLDEN_SEALS, GOLDEN_HEALING, GOLDEN_STREAMS, GOLDEN_SECRETS)
"""In the order of their levels."""

LATER_KINDS = (
    "SETTINGS",
    "DELETIONS",
    "DELETION_HEAD",
    "DELETION_POSITION",
    "EPOCH",
    "OUTDATED",
    "AUDITOR",
    "AUDITOR_REPORT",
    "SCRUB",
    "ORPHANS",
    "DELETED_IDS",
)


def test_bytes_are_as_they_ever_were() -> None:
    seals = golden(FeatureLevel.SEALS)
    for later in LATER_KINDS:  # began after this level
        del seals["values"][later]
    assert seals == json.loads(GOLDEN_SEALS.read_text())
    healing = golden(FeatureLevel.HEALING)
    del healing["values"]["DELETED_IDS"]
    assert healing == json.loads(GOLDEN_HEALING.read_text())
    assert golden(FeatureLevel.STREAMS) == json.loads(GOLDEN_STREAMS.read_text())
    assert golden(FeatureLevel.SECRETS) == json.loads(GOLDEN_SECRETS.read_text())
    base, kept = golden(FeatureLevel.BASE), json.loads(GOLDEN_METADATA.read_text())
    for found in (base, kept):
        del found["values"][
            "BOOKIE"
        ]  # says more since: it is made anew by each start, and older versions skip the rest
        for later in ("POSITION", "description of key format 1", *LATER_KINDS):
            found["values"].pop(later, None)
    assert base == kept


@pytest.mark.parametrize("path", GOLDEN_LEVELS, ids=[level.name.lower() for level in FeatureLevel])
def test_golden_bytes_are_read(path: Path) -> None:
    kept = {name: (key, bytes.fromhex(text)) for name, (key, text) in json.loads(path.read_text())["values"].items()}
    identity = from_values_base if path == GOLDEN_METADATA else from_values
    read: dict[str, Callable[[bytes], Any]] = {
        "LEDGER": lambda payload: LedgerMetadata.decode(payload, where="golden"),
        "CLUSTER": lambda payload: decode_json(payload, identity, where="golden")[:2],
        "BOOKIE": lambda payload: decode_json(payload, decode_registration, where="golden")[0],
        "POSITION": lambda payload: decode_json(payload, durable_positions.decode, where="golden"),
        "IDS": lambda payload: json.loads(payload)["next"],
        "COOKIE": lambda payload: decode_json(payload, decode_cookie, where="golden").boots,
    }
    level = FeatureLevel(GOLDEN_LEVELS.index(path))
    expected = {"LEDGER": ledger(7), "CLUSTER": (CLUSTER, level), "IDS": 2000, "COOKIE": 3}
    expected["BOOKIE"] = registration(bookie(1), level_max=level, version="0.2.0" if level else "")
    expected["POSITION"] = DurablePosition(bookie(1), 3, 258, 77, 5, 78)
    for name, decode in read.items():
        if name not in kept:
            continue
        key, value = kept[name]
        kind, payload = decode_authenticated(key, value, None if name == "CLUSTER" else KEYS)
        assert kind.name == name
        assert token_of(value) == TOKEN
        assert decode(payload) == expected[name]
    for name, known in (("description", [KEY]), ("description without a secret", None)):
        assert LedgerDescription.decode(kept[name][1], known, where="golden") == LedgerDescription.of(ledger(7))
    if path != GOLDEN_METADATA:
        found = LedgerDescription.decode(kept["description of key format 1"][1], [KEY], where="golden")
        assert found == LedgerDescription.of(ledger(7, key_format=1))


def test_golden_bytes_of_a_rotation_are_as_they_ever_were_and_are_read() -> None:
    kept = json.loads(GOLDEN_ROTATED.read_text())
    assert golden_rotated() == kept
    values = {name: (key, bytes.fromhex(text)) for name, (key, text) in kept.items()}
    for epochs in steps():
        newest = int(epochs[-1]) if epochs[-1].isdigit() else 0
        given = [SECRETS[newest], *([SECRETS[newest - 1]] if newest and not epochs.startswith("retired") else [])]
        identity, keys = check_cluster_value(values[epochs][1], lambda _, given=given: given)  # type: ignore[misc]
        assert identity == CLUSTER
        assert keys is not None
        old = newest - 1 if epochs.startswith("added") else newest
        assert keys.current == old, epochs
        assert {**keys.earlier, **keys.by_epoch} == {number: SECRETS[number] for number in range(newest + 1)}
        valid = {newest} if epochs.startswith(("retired", "created")) else {newest - 1, newest}
        assert keys.by_epoch.keys() == valid, epochs
    keys = MetadataKeys(1, {1: SECRETS[1]}, {0: SECRETS[0]})
    key, value = values["LEDGER resealed"]
    assert LedgerMetadata.decode(decode_authenticated(key, value, keys)[1], where="golden") == ledger(7)
    assert (token_of(value), epoch_of(value), unchanged_since(value, 300)) == (TOKEN, 1, SINCE)
    key, value = values["BOOKIE"]
    found, _ = decode_json(decode_authenticated(key, value, keys)[1], decode_registration, where="golden")
    assert (found.key_epochs, found.key_epoch, found.old_sessions) == ((0, 1), 1, 2)


def test_every_bit_of_a_resealed_value_counts() -> None:
    key, value = rotated()["LEDGER resealed"]
    keys = MetadataKeys(1, {0: SECRETS[0], 1: SECRETS[1]})
    for at in range(len(value) * 8):
        bad = bytearray(value)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises((MetadataForgedError, CorruptError, UnsupportedFormatError)):
            decode_authenticated(key, bytes(bad), keys)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("level", FeatureLevel)
def test_every_bit_of_a_value_counts(level: FeatureLevel) -> None:
    for name, (key, value) in values(level).items():
        if name.startswith(("CLUSTER", "description", "LEDGER without")):
            continue
        for at in range(len(value) * 8):
            bad = bytearray(value)
            bad[at // 8] ^= 1 << at % 8
            with pytest.raises((MetadataForgedError, CorruptError, UnsupportedFormatError)):
                decode_authenticated(key, bytes(bad), KEYS)


@pytest.mark.parametrize("level", FeatureLevel)
def test_a_value_that_was_cut_short_is_refused_with_an_error_of_ours(level: FeatureLevel) -> None:
    key, value = values(level)["LEDGER"]
    for size in range(len(value)):
        with pytest.raises((MetadataForgedError, CorruptError)):
            decode_authenticated(key, value[:size], KEYS)


def test_a_value_belongs_to_its_key_and_its_cluster() -> None:
    key, value = values()["LEDGER"]
    assert decode_authenticated(key, value, KEYS)[0] is ValueKind.LEDGER
    with pytest.raises(MetadataForgedError, match="secret"):
        decode_authenticated(f"ledgers/{ledger_path(9)}", value, KEYS)
    with pytest.raises(MetadataForgedError, match="secret"):
        decode_authenticated(key, value, MetadataKeys.first(b"x" * 32))
    with pytest.raises(MetadataForgedError, match="give it"):
        decode_authenticated(key, value, None)
    with pytest.raises(MetadataForgedError, match="give none"):
        decode_authenticated(key, values()["LEDGER without a secret"][1], KEYS)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_with_an_error_of_ours(data: bytes) -> None:
    for call in (
        lambda: decode_authenticated("key", data, KEYS),
        lambda: LedgerDescription.decode(data, [KEY], where="here"),
        lambda: LedgerDescription.decode(data, None, where="here"),
        lambda: decode_json(data, decode_registration, where="here"),
        lambda: decode_json(data, from_values_base, where="here"),
        lambda: decode_json(data, from_values, where="here"),
    ):
        with pytest.raises(PybkError):
            call()


def test_a_description_says_what_never_changes_and_nothing_else() -> None:
    made = LedgerDescription.of(ledger(7))
    changed = replace(
        ledger(7),
        state=LedgerState.CLOSED,
        last_entry_id=5,
        length=10,
        tier=StorageHint.HDD,
        version=3,
        fragments=(),
    )
    assert LedgerDescription.of(changed).encode(KEY) == made.encode(KEY)
    others: dict[str, Any] = {
        "ledger_id": 8,
        "ledger_type": LedgerType("other"),
        "storage_hints": frozenset(),
        "write_flags": WriteFlag.DEFERRED_FORCE,
        "digest_type": 3,
        "ensemble_size": 4,
        "write_quorum": 2,
        "ack_quorum": 1,
        "creation_time_ns": 5,
        "creation_sequence": 5,
        "custom_metadata": {"name": b"\0other"},
        "advanced": True,
        "key_salt": b"x" * 16,
        "key_epoch": 1,
        "verifier": b"x" * 32,
    }
    names = {field.name for field in fields(LedgerDescription)} - {"key_format", "custom_metadata"}
    assert {"custom_digest" if name == "custom_metadata" else name for name in others} == names
    others["key_format"] = 1
    base = replace(ledger(7), fragments=())
    seen = {made.encode(KEY)}
    for name, value in others.items():
        description = LedgerDescription.of(replace(base, **{name: value}))
        encoded = description.encode(KEY)
        assert LedgerDescription.decode(encoded, [KEY], where="here") == description
        seen.add(encoded)
    assert len(seen) == len(others) + 1


@pytest.mark.parametrize("key_format", [0, 1])
def test_every_bit_of_a_description_counts(key_format: int) -> None:
    data = LedgerDescription.of(ledger(7, key_format=key_format)).encode(KEY)
    for at in range(len(data) * 8):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises((MetadataForgedError, UnsupportedFormatError)):
            LedgerDescription.decode(bytes(bad), [KEY], where="here")
    without = LedgerDescription.of(ledger(7)).encode(None)
    for made, keys in ((data, None), (without, [KEY]), (data, [b"x" * 32]), (data, [])):
        with pytest.raises(MetadataForgedError):
            LedgerDescription.decode(made, keys, where="here")
    assert LedgerDescription.decode(data, [b"x" * 32, KEY], where="here").ledger_id == 7


def test_a_description_of_key_format_1_has_the_custom_metadata() -> None:
    """A bookie stores all that is needed to make a ledger's metadata again."""
    custom = {"name": b"\0value", "large": b"x" * (CUSTOM_METADATA_BYTES_MAX - 20)}
    metadata = ledger(7, key_format=1, custom_metadata=custom)
    found = LedgerDescription.decode(LedgerDescription.of(metadata).encode(KEY), [KEY], where="here")
    assert found.custom_metadata == custom
    assert found.custom_digest == LedgerDescription.of(replace(metadata, key_format=0)).custom_digest
    assert LedgerDescription.of(replace(metadata, key_format=0)).custom_metadata is None


def test_a_description_is_small_and_bounded() -> None:
    largest = ledger(7, ledger_type="é" * 127, custom_metadata={"key": b"x" * 65_000})
    assert len(LedgerDescription.of(largest).encode(KEY)) < 1500
    with pytest.raises(UsageError, match=str(DESCRIPTION_BYTES_MAX_BASE)):
        LedgerDescription.of(ledger(7, verifier=b"x" * 4000)).encode(KEY)
    with pytest.raises(UsageError, match=str(DESCRIPTION_BYTES_MAX)):
        LedgerDescription.of(ledger(7, verifier=b"x" * (1 << 17), key_format=1)).encode(KEY)
    with pytest.raises(CorruptError):
        LedgerDescription.decode(b"\x01\x00" + b" " * DESCRIPTION_BYTES_MAX, None, where="here")


@pytest.mark.parametrize(
    ("name", "value"),
    [("ledger_id", "7"), ("ledger_id", None), ("advanced", 1), ("storage_hints", "ssd"), ("key_salt", 5), ("more", 1)],
)
def test_a_description_of_other_values_is_refused(name: str, value: object) -> None:
    body = json.loads(LedgerDescription.of(ledger(7)).encode(None)[2:])
    body[name] = value
    with pytest.raises(CorruptError, match="here"):
        LedgerDescription.decode(b"\x01\x00" + encode_json(body), None, where="here")


def test_records_in_lmdb_are_read_as_they_ever_were() -> None:
    rows = json.loads(GOLDEN_METADATA.read_text())["lmdb"]
    environment = MapEnvironment({bytes.fromhex(name): bytes.fromhex(value) for name, value in rows.items()})
    with environment.read() as transaction:
        assert lmdb_rows.get(transaction, lmdb_rows.FORMAT_NAME) == b"\x01"
        assert lmdb_rows.last_number(transaction) == 258
        assert lmdb_rows.sessions(transaction) == [(257, 2, 5000)]
        record = lmdb_rows.get_value(transaction, lmdb_rows.node_name("a/b"))
        assert record == lmdb_rows.StoredValue(256, 258, 257, b"value")
        assert list(lmdb_rows.children(transaction, lmdb_rows.node_name("a"))) == [("b", 256)]
    with environment.write() as writing:
        lmdb_rows.end_session(writing, 257)
    assert len(environment.rows) == 2, "format and number"
