"""The cookies of directories."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from xxhash import xxh3_64_hexdigest

from pybk.errors import CookieError, CorruptError, UnsupportedFormatError
from pybk.feature_level import FeatureLevel
from pybk.storage.format.cookie import Cookie, check_cookie, decode_cookie, encode_cookie, read_cookie, write_cookie
from tests.simdisk import SimCrash, SimFileSystem

MAIN = Cookie(bytes(range(16)), bytes(range(16, 32)), "main", 0, salt=b"salt" * 4, scrypt_cost=1 << 14)
TIER = Cookie(bytes(range(16)), bytes(range(32, 48)), "hdd", 2)
GOLDEN = (
    b'{"checksum": "fb39704c972ad5d7", "directory": 2, "format": 1, "instance": "202122232425262728292a2b2c2d2e2f", '
    b'"store": "000102030405060708090a0b0c0d0e0f", "tier": "hdd"}'
)

RESTORED = replace(
    TIER, salt=b"salt" * 4, scrypt_cost=1 << 14, level=FeatureLevel.SEALS, incarnation=0x1122334455667788
)
GOLDEN_RESTORED = (
    b'{"checksum": "e19d1e5612378af5", "directory": 2, "features": 0, "format": 3, "incarnation": "1122334'
    b'455667788", "instance": "202122232425262728292a2b2c2d2e2f", "level": 1, "salt": "73616c7473616c74736'
    b'16c7473616c74", "scrypt": 16384, "store": "000102030405060708090a0b0c0d0e0f", "tier": "hdd"}'
)


@pytest.fixture
def fs() -> SimFileSystem:
    """A file system with a directory for the cookie."""
    fs = SimFileSystem(seed=1)
    fs.make_directory("/tier")
    return fs


def sealed(fields: dict[str, object]) -> bytes:
    """Return a cookie of any content, with its right checksum."""
    checksum = xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields | {"checksum": checksum}, sort_keys=True).encode()


def fields_of(cookie: Cookie) -> dict[str, object]:
    fields: dict[str, object] = json.loads(encode_cookie(cookie))
    del fields["checksum"]
    return fields


@pytest.mark.parametrize("cookie", [MAIN, TIER, RESTORED])
def test_cookie_comes_back(fs: SimFileSystem, cookie: Cookie) -> None:
    assert read_cookie(fs, "/tier") is None
    write_cookie(fs, "/tier", cookie)
    assert read_cookie(fs, "/tier") == cookie


def test_bytes_on_disk() -> None:
    assert encode_cookie(TIER) == GOLDEN


def test_bytes_on_disk_of_a_restored_store() -> None:
    assert encode_cookie(RESTORED) == GOLDEN_RESTORED
    assert decode_cookie(GOLDEN_RESTORED, where="here") == RESTORED


def test_an_incarnation_takes_its_own_format() -> None:
    fields = fields_of(RESTORED)
    for change in ({"format": 2}, {"incarnation": "0" * 16}, {"incarnation": 7}, {"incarnation": "1" * 17}):
        with pytest.raises(CorruptError):
            decode_cookie(sealed(fields | change), where="here")
    with pytest.raises(CorruptError):
        decode_cookie(sealed(fields_of(TIER) | {"incarnation": "00000000000000aa"}), where="here")


def test_a_directory_of_another_incarnation_is_refused() -> None:
    with pytest.raises(CookieError, match="one of the two was restored from a backup"):
        check_cookie(replace(RESTORED, incarnation=0), RESTORED, "/tier")


@pytest.mark.parametrize("cookie", [MAIN, TIER, RESTORED])
def test_every_flipped_bit_and_every_cut_is_noticed(cookie: Cookie) -> None:
    sound = encode_cookie(cookie)
    for bit in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match="here: the cookie is damaged"):
            decode_cookie(bytes(damaged), where="here")
    for size in range(len(sound)):
        with pytest.raises(CorruptError):
            decode_cookie(sound[:size], where="here")
    with pytest.raises(CorruptError):
        decode_cookie(sound + b"\n", where="here")


@pytest.mark.parametrize(
    "change",
    [
        {"store": "00"},
        {"store": 5},
        {"instance": "zz" * 16},
        {"tier": 5},
        {"tier": None},
        {"directory": "2"},
        {"directory": -1},
        {"directory": True},
        {"salt": 7},
        {"scrypt": "16384"},
        {"scrypt": True},
        {"more": 1},
    ],
)
def test_wrong_fields_under_a_right_checksum_are_refused(change: dict[str, object]) -> None:
    assert decode_cookie(sealed(fields_of(TIER)), where="here") == TIER
    with pytest.raises(CorruptError):
        decode_cookie(sealed(fields_of(TIER) | change), where="here")


@pytest.mark.parametrize("name", ["store", "instance", "tier", "directory"])
def test_missing_fields_are_refused(name: str) -> None:
    fields = fields_of(TIER)
    del fields[name]
    with pytest.raises(CorruptError):
        decode_cookie(sealed(fields), where="here")


def test_a_newer_cookie_format_is_refused_with_its_version() -> None:
    with pytest.raises(UnsupportedFormatError, match="cookie format 4; this pybk reads 3 and older"):
        decode_cookie(sealed(fields_of(TIER) | {"format": 4, "more": 1}), where="here")


def test_huge_cookie_is_not_read(fs: SimFileSystem) -> None:
    fs.create("/tier/cookie", 1 << 20).close()
    with pytest.raises(CorruptError, match="1048576 bytes; a cookie has at most 4096"):
        read_cookie(fs, "/tier")


def test_a_cookie_is_whole_or_missing_after_a_crash() -> None:
    found = set()
    for seed in range(300):
        fs = SimFileSystem(seed)
        fs.make_directory("/tier")
        write_cookie(fs, "/tier", TIER)
        fs.crash_at(seed % 6)
        with suppress(SimCrash):
            write_cookie(fs, "/tier", MAIN)
            assert seed % 6 >= 5
            assert read_cookie(fs.crash(), "/tier") == MAIN
            continue
        found.add(read_cookie(fs.crash() if seed % 2 else fs.kill(), "/tier"))
    assert found == {MAIN, TIER}


def test_right_directory_passes_whatever_its_salt() -> None:
    check_cookie(MAIN, replace(MAIN, salt=None, scrypt_cost=None), "/tier")


@pytest.mark.parametrize(
    ("found", "both", "remedy"),
    [
        (replace(TIER, store_id=b"f" * 16), ((b"f" * 16).hex(), TIER.store_id.hex()), "name the right directory"),
        (replace(TIER, tier="ssd"), ("tier ssd", "tier hdd"), "name the right directory"),
        (replace(TIER, directory=1), ("directory 1", "directory 2"), "in the order in which they were first given"),
        (replace(TIER, instance=b"c" * 16), ((b"c" * 16).hex(), TIER.instance.hex()), "a copy or from an older backup"),
    ],
)
def test_wrong_directory_is_named_with_its_remedy(found: Cookie, both: tuple[str, str], remedy: str) -> None:
    with pytest.raises(CookieError) as caught:
        check_cookie(found, TIER, "/tier")
    for text in ("/tier is", *both, remedy):
        assert text in str(caught.value)


def test_above_the_first_level_every_cookie_carries_salt_cost_and_level() -> None:
    sealed_tier = replace(MAIN, tier="hdd", level=FeatureLevel.SEALS)
    assert decode_cookie(encode_cookie(sealed_tier), where="here") == sealed_tier
    with pytest.raises(CorruptError):
        decode_cookie(encode_cookie(replace(sealed_tier, salt=None)), where="here")


@pytest.mark.parametrize("newer", [{"level": 2}, {"level": 5}, {"features": 1}])
def test_a_newer_level_or_feature_and_a_level_of_clusters_alone_are_refused(newer: dict[str, int]) -> None:
    fields = fields_of(replace(MAIN, level=FeatureLevel.SEALS))
    with pytest.raises(UnsupportedFormatError, match="this pybk knows the levels 0, 1, 3, 4 of stores"):
        decode_cookie(sealed(fields | newer), where="here")
