from __future__ import annotations

import copy
from enum import IntFlag

import pytest

from pybk.errors import UsageError
from pybk.flags import LEDGER_TYPE_BYTES_MAX, Flags, LedgerType, ReadFlag, StorageHint, WriteFlag


class _Three(Flags):
    A = 1
    C = 4
    D = 8


def test_numbers_of_the_flags() -> None:
    assert (int(WriteFlag.NONE), int(WriteFlag.DEFERRED_FORCE)) == (0, 1)
    assert (int(ReadFlag.NONE), int(ReadFlag.DONT_CACHE)) == (0, 1)
    assert WriteFlag(1) is WriteFlag.DEFERRED_FORCE
    assert ReadFlag(0) is ReadFlag.NONE
    assert WriteFlag.DEFERRED_FORCE not in WriteFlag.NONE


@pytest.mark.parametrize("kind", [WriteFlag, ReadFlag])
@pytest.mark.parametrize(("value", "named"), [(2, "0x2"), (3, "0x2"), (0x81, "0x80"), (1 << 40, "0x10000000000")])
def test_unknown_bits_are_refused_by_name(kind: type[IntFlag], value: int, named: str) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} {value:#x} has the unknown bits {named};"):
        kind(value)


@pytest.mark.parametrize("value", [-1, -2, "1", None, 1.5])
def test_invalid_sets_of_flags_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="WriteFlag"):
        WriteFlag(value)  # type: ignore[arg-type]  # what a careless caller may do


def test_operators_refuse_unknown_bits_too() -> None:
    with pytest.raises(ValueError, match="0x4"):
        WriteFlag.DEFERRED_FORCE | 4
    assert ~WriteFlag.DEFERRED_FORCE is WriteFlag.NONE


def test_flags_combine() -> None:
    assert int(_Three(12)) == 12
    assert list(_Three(5)) == [_Three.A, _Three.C]
    with pytest.raises(ValueError, match="unknown bits 0x2;"):
        _Three(15)


def test_storage_hints() -> None:
    assert [str(hint) for hint in StorageHint] == ["nvme", "ssd", "hdd"]
    assert StorageHint("ssd") is StorageHint.SSD
    with pytest.raises(ValueError, match="tape"):
        StorageHint("tape")


@pytest.mark.parametrize(
    "name", ["", "orders", "π.log", "x" * LEDGER_TYPE_BYTES_MAX, "é" * (LEDGER_TYPE_BYTES_MAX // 2)]
)
def test_ledger_types_are_strings(name: str) -> None:
    made = LedgerType(name)
    assert made == name
    assert hash(made) == hash(name)
    assert not made.is_system
    assert LedgerType(made) is made
    assert type(copy.deepcopy(made)) is LedgerType


def test_system_types() -> None:
    assert LedgerType.METADATA == ".metadata"
    assert LedgerType(".metadata").is_system
    assert LedgerType() == ""


@pytest.mark.parametrize("name", [".", ".metadat", ".metadata2", ".x"])
def test_reserved_types_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="reserved"):
        LedgerType(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * (LEDGER_TYPE_BYTES_MAX + 1), "256"),
        ("é" * 128, "256"),
        ("\ud800", "UTF-8"),
        (b"orders", r"b'orders'; it takes a string"),
        (None, "None"),
    ],
)
def test_impossible_types_are_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        LedgerType(name)
