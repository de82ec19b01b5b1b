from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import CUSTOM_METADATA_BYTES_MAX, Bookie, Fragment, LedgerMetadata, LedgerState

GOLDEN = (
    b'{"ack_quorum":1,"advanced":true,"creation_sequence":4,"creation_time_ns":1700000000000000000,'
    b'"custom_metadata":{"app":"c2hvcA==","\xc3\xa9":""},"digest_type":101,"ensemble_size":3,"format":1,"key_epoch":2,'
    b'"key_salt":"c2FsdCBvZiAxNiBieXRlcw==","last_entry_id":41,"ledger_id":5,"ledger_type":"orders","length":1000,'
    b'"state":"closed","storage_hints":["hdd","ssd"],"tier":"ssd","verifier":"dmVyaWZpZXI=","version":7,"write_flags":1,'
    b'"write_quorum":2}'
)


GOLDEN_SEALED = (
    GOLDEN.replace(
        b'"ensemble_size":3,"format":1,"key_epoch":2,',
        b'"ensemble_size":3,"extra":{"later":[1]},"format":3,"fragments":[],"key_epoch":2,"key_format":1,',
    )
    .replace(b'"last_entry_id":41,', b'"last_digest":"ZGlnZXN0IQ==","last_entry_id":41,')
    .replace(b'"state":"closed",', b'"seal":"c2VhbCBvZiAzMiBieXRlcywgbm90IHdvcnRoIG1vcmU=","state":"closed",')
)
SEALED: dict[str, Any] = {
    "key_format": 1,
    "seal": b"seal of 32 bytes, not worth more",
    "last_digest": b"digest!",
    "extra": {"later": [1]},
}

HARMLESS: list[tuple[str, object]] = [
    ("custom_metadata", {}),
    ("ledger_type", "€"),
    ("ledger_type", "="),
    ("storage_hints", []),
]
"""Values among the wrong ones that are right for these names."""


def metadata(**changes: Any) -> LedgerMetadata:
    values: dict[str, Any] = {
        "ledger_id": 5,
        "state": LedgerState.CLOSED,
        "ledger_type": LedgerType("orders"),
        "storage_hints": frozenset({StorageHint.SSD, StorageHint.HDD}),
        "write_flags": WriteFlag.DEFERRED_FORCE,
        "digest_type": DigestType.XXH3,
        "ensemble_size": 3,
        "write_quorum": 2,
        "last_entry_id": 41,
        "length": 1000,
        "creation_time_ns": 1_700_000_000_000_000_000,
        "creation_sequence": 4,
        "custom_metadata": {"é": b"", "app": b"shop"},
        "tier": StorageHint.SSD,
        "advanced": True,
        "key_salt": b"salt of 16 bytes",
        "key_epoch": 2,
        "verifier": b"verifier",
        "version": 7,
    }
    return LedgerMetadata(**{**values, **changes})


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    values = json.loads(GOLDEN)
    change(values)
    return json.dumps(values).encode()


def test_encoding_never_changes() -> None:
    assert metadata().encode() == GOLDEN
    assert LedgerMetadata.decode(GOLDEN, where="here") == metadata()


def test_encoding_of_sealed_ledgers_never_changes() -> None:
    assert metadata(**SEALED).encode() == GOLDEN_SEALED
    decoded = LedgerMetadata.decode(GOLDEN_SEALED, where="here")
    assert decoded == metadata(**SEALED)
    assert decoded.sealed
    assert not metadata().sealed


@pytest.mark.parametrize("name", SEALED)
def test_the_format_is_the_oldest_that_can_say_it(name: str) -> None:
    changed = metadata(**{name: SEALED[name]})
    assert json.loads(changed.encode())["format"] == 3
    assert LedgerMetadata.decode(changed.encode(), where="here") == changed


@pytest.mark.parametrize("name", [*SEALED, "fragments"])
@pytest.mark.parametrize("value", [None, 1.0, -2, 2**63, "€", "=", ["x"], {"a": 1}, "c2g="])
def test_a_wrong_value_about_the_seal_is_corruption(name: str, value: object) -> None:
    values = json.loads(GOLDEN_SEALED)
    if (name, value) in [("extra", {"a": 1}), ("last_digest", "c2g=")]:
        return
    with pytest.raises(CorruptError, match="here: "):
        LedgerMetadata.decode(json.dumps({**values, name: value}).encode(), where="here")
    del values[name]
    with pytest.raises(CorruptError, match="here: "):
        LedgerMetadata.decode(json.dumps(values).encode(), where="here")


def test_keys_of_a_later_format_are_refused_by_their_number() -> None:
    data = GOLDEN_SEALED.replace(b'"key_format":1', b'"key_format":4')
    with pytest.raises(UnsupportedFormatError, match="key format 4"):
        LedgerMetadata.decode(data, where="here")


def test_decoded_values_have_their_types() -> None:
    decoded = LedgerMetadata.decode(GOLDEN, where="here")
    for each in fields(LedgerMetadata):
        assert type(getattr(decoded, each.name)) is type(getattr(metadata(), each.name)), each.name


@given(
    state=st.sampled_from(LedgerState),
    ledger_type=st.text(st.characters(codec="utf-8"), max_size=40).filter(lambda name: not name.startswith(".")),
    storage_hints=st.frozensets(st.sampled_from(StorageHint)),
    write_flags=st.sampled_from(WriteFlag),
    digest_type=st.sampled_from(DigestType),
    last_entry_id=st.integers(-1, 2**63 - 1),
    length=st.integers(0, 2**63 - 1),
    custom_metadata=st.dictionaries(st.text(st.characters(codec="utf-8")), st.binary()),
    key_salt=st.binary(),
    verifier=st.binary(),
)
def test_encoded_metadata_are_decoded_unchanged(**changes: Any) -> None:
    made = metadata(**changes)
    decoded = LedgerMetadata.decode(made.encode(), where="here")
    assert decoded == made
    assert decoded.encode() == made.encode()


def test_system_types_are_decoded() -> None:
    made = metadata(ledger_type=LedgerType.METADATA)
    assert LedgerMetadata.decode(made.encode(), where="here") == made


@pytest.mark.parametrize("number", [0, 4, 99])
def test_another_format_is_named(number: int) -> None:
    data = changed(lambda values: values.update(format=number, news=1))
    with pytest.raises(UnsupportedFormatError, match=f"here: .*format {number}"):
        LedgerMetadata.decode(data, where="here")


@pytest.mark.parametrize("name", sorted(json.loads(GOLDEN)))
def test_a_missing_value_is_corruption(name: str) -> None:
    with pytest.raises(CorruptError, match="here: "):
        LedgerMetadata.decode(changed(lambda values: values.pop(name)), where="here")


@pytest.mark.parametrize("name", sorted(json.loads(GOLDEN)))
@pytest.mark.parametrize("value", [None, 1.0, 1.5, -2, 2**63, "€", "=", [], {}, ["x"], {"a": "="}, {"a": 1}, [[]]])
def test_a_wrong_value_is_corruption(name: str, value: object) -> None:
    data = changed(lambda values: values.update({name: value}))
    if (name, value) in HARMLESS:
        LedgerMetadata.decode(data, where="here")
        return
    expected = UnsupportedFormatError if name == "format" and type(value) is int else CorruptError
    with pytest.raises(expected, match="here: "):
        LedgerMetadata.decode(data, where="here")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("advanced", 1),
        ("ledger_id", True),
        ("write_flags", True),
        ("write_flags", 2),
        ("digest_type", 5),
        ("state", "OPEN"),
        ("tier", "tape"),
        ("storage_hints", ["ssd", "tape"]),
        ("ledger_type", ".other"),
        ("key_salt", "c2Fs dA=="),
        ("key_salt", "c2FsdA"),
        ("verifier", "c2FsdA==x"),
        ("ack_quorum", 3),
        ("write_quorum", 4),
        ("last_entry_id", -2),
        ("custom_metadata", {"\ud800": ""}),
        ("custom_metadata", {"x": b64encode(bytes(CUSTOM_METADATA_BYTES_MAX)).decode()}),
    ],
)
def test_values_out_of_their_range_are_corruption(name: str, value: object) -> None:
    with pytest.raises(CorruptError, match="here: "):
        LedgerMetadata.decode(changed(lambda values: values.update({name: value})), where="here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"1",
        b"\xff" + GOLDEN,
        GOLDEN[:-1],
        GOLDEN + b"x",
        GOLDEN + GOLDEN,
        GOLDEN.replace(b'"version":7', b'"version":7,"version":7'),
        GOLDEN.replace(b'"app":', b'"app":"","app":'),
        GOLDEN.replace(b'"version":7', b'"version":7,"more":7'),
        GOLDEN.replace(b'"version":7', b'"version":NaN'),
        GOLDEN.replace(b'"version":7', b'"version":' + b"7" * 5000),
        b"[" * 100_000,
    ],
    ids=range(14),
)
def test_other_bytes_are_corruption(data: bytes) -> None:
    with pytest.raises(CorruptError, match="here: "):
        LedgerMetadata.decode(data, where="here")


def test_cut_short_is_corruption() -> None:
    for size in range(len(GOLDEN)):
        with pytest.raises(CorruptError):
            LedgerMetadata.decode(GOLDEN[:size], where="here")


def test_nothing_can_be_changed() -> None:
    custom = {"app": b"shop"}
    made = metadata(custom_metadata=custom)
    custom["app"] = b"other"
    assert made.custom_metadata == {"app": b"shop"}
    with pytest.raises(TypeError):
        made.custom_metadata["app"] = b"other"  # type: ignore[index]  # that it cannot be done is the point
    with pytest.raises(FrozenInstanceError):
        made.version = 8  # type: ignore[misc]  # that it cannot be done is the point
    assert replace(made, version=8).version == 8
    assert hash(made) == hash(metadata(custom_metadata={"app": b"shop"}))


def test_plain_values_become_flags_and_types() -> None:
    made = metadata(ledger_type="x", storage_hints={"nvme"}, tier="hdd", state="open", write_flags=0, digest_type=3)
    assert type(made.ledger_type) is LedgerType
    assert made.storage_hints == frozenset({StorageHint.NVME})
    assert made.tier is StorageHint.HDD
    assert made.state is LedgerState.OPEN
    assert made.write_flags is WriteFlag.NONE
    assert made.digest_type is DigestType.CRC32C


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ({"x": bytes(CUSTOM_METADATA_BYTES_MAX)}, "65537 bytes; the limit is 65536"),
        ({"é": bytes(CUSTOM_METADATA_BYTES_MAX - 1)}, "65537 bytes"),
        ({"a": "text"}, "values bytes"),
        ({b"a": b""}, "keys are strings"),
        ({"\ud800": b""}, "UTF-8"),
        (7, "mapping"),
    ],
)
def test_custom_metadata_is_bounded_and_bytes(custom: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        metadata(custom_metadata=custom)


def test_custom_metadata_at_its_bound() -> None:
    made = metadata(custom_metadata={"x": bytes(CUSTOM_METADATA_BYTES_MAX - 1)})
    assert LedgerMetadata.decode(made.encode(), where="here") == made


@pytest.mark.parametrize(
    ("name", "value"),
    [("ledger_id", -1), ("version", -1), ("ack_quorum", 0), ("tier", "tape"), ("key_salt", "text"), ("verifier", None)],
)
def test_impossible_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError):
        metadata(**{name: value})


def test_repr_shows_neither_salt_nor_verifier() -> None:
    shown = repr(metadata())
    assert "ledger_id=5" in shown
    assert "salt" not in shown
    assert "verifier" not in shown


BOOKIES = tuple(Bookie(f"bookie-{number}", bytes([number]) * 16) for number in range(4))


def replicated(*fragments: Fragment) -> LedgerMetadata:
    return metadata(ensemble_size=3, write_quorum=3, ack_quorum=2, fragments=fragments)


def test_fragments_are_metadata_of_the_next_format() -> None:
    made = replicated(Fragment(0, BOOKIES[:3]), Fragment(17, BOOKIES[1:]))
    assert json.loads(made.encode())["format"] == 2
    assert LedgerMetadata.decode(made.encode(), where="here") == made
    assert json.loads(metadata().encode())["format"] == 1


@pytest.mark.parametrize(
    "fragments",
    [
        [Fragment(1, BOOKIES[:3])],
        [Fragment(0, BOOKIES[:2])],
        [Fragment(0, BOOKIES)],
        [Fragment(0, (BOOKIES[0], BOOKIES[0], BOOKIES[1]))],
        [Fragment(0, BOOKIES[:3]), Fragment(0, BOOKIES[1:])],
        [Fragment(0, BOOKIES[:3]), Fragment(9, BOOKIES[1:]), Fragment(8, BOOKIES[:3])],
        [Fragment(0, (*BOOKIES[:2], Bookie("", bytes(16))))],
        [Fragment(0, (*BOOKIES[:2], Bookie("short", bytes(15))))],
    ],
)
def test_fragments_that_cannot_be_are_refused(fragments: list[Fragment]) -> None:
    with pytest.raises(UsageError):
        replicated(*fragments)


def test_another_seal_changes_nothing_else() -> None:
    sealed = metadata(**SEALED)
    bare = sealed.with_seal(b"", b"")
    assert bare == replace(sealed, seal=b"", last_digest=b"")
    assert bare.with_seal(sealed.seal, sealed.last_digest) == sealed
    assert hash(bare.with_seal(sealed.seal, sealed.last_digest)) == hash(sealed)
    for seal, last_digest in [(b"short", b""), (bytearray(32), b""), (bytes(32), "text"), (bytes(32), bytes(100))]:
        with pytest.raises(UsageError, match="seal"):
            sealed.with_seal(seal, last_digest)  # type: ignore[arg-type]


def test_the_end_changes_nothing_else() -> None:
    opened = metadata(state=LedgerState.OPEN, last_entry_id=-1, length=0)
    closed = opened.closed_at(41, 1000)
    changed: dict[str, Any] = {
        "state": LedgerState.CLOSED,
        "last_entry_id": 41,
        "length": 1000,
        "version": opened.version + 1,
    }
    assert closed == replace(opened, **changed)
    assert opened.closed_at(-1, 0).last_entry_id == -1
    for last_entry_id, length in [(-2, 0), (2**63, 0), (True, 0), ("1", 0), (0, -1), (0, 1.0)]:
        with pytest.raises(UsageError, match="whole number"):
            opened.closed_at(last_entry_id, length)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="version"):
        replace(opened, version=2**63 - 1).closed_at(0, 0)
