"""Keys and headers of records: every one is read again, those that cannot be are refused, and damage is noticed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pybk.errors import CorruptError, UsageError
from pybk.streams.format import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    KEY_BYTES_MAX,
    NO_ATTRIBUTES,
    decode_attributes,
    encode_attributes,
)

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60)
KEYS = st.none() | st.binary(max_size=100)
HEADERS = st.lists(st.tuples(NAMES, st.binary(max_size=100)), max_size=8)


@given(key=KEYS, headers=HEADERS, data=st.binary(max_size=100))
def test_what_was_encoded_is_decoded(key: bytes | None, headers: list[tuple[str, bytes]], data: bytes) -> None:
    encoded = encode_attributes(key, headers) or NO_ATTRIBUTES
    assert decode_attributes(encoded + data, where="here") == (key, tuple(headers), data)


def test_the_bytes_are_those_that_are_documented() -> None:
    assert encode_attributes(None, ()) == b""
    assert NO_ATTRIBUTES.hex() == "ffff0000"
    assert encode_attributes(b"", ()).hex() == "00000000"
    assert encode_attributes(b"k", [("ü", b"\x00\x01"), ("a", b"")]).hex() == (
        "01000200" + "6b" + "020002000000" + "c3bc" + "0001" + "010000000000" + "61"
    )


def test_limits_are_those_that_are_documented() -> None:
    longest = [("n" * 255, b"v" * 600)] * HEADERS_MAX
    assert decode_attributes(encode_attributes(b"k" * KEY_BYTES_MAX, longest), where="")[1] == tuple(longest)
    value = b"v" * (HEADERS_BYTES_MAX - len(encode_attributes(None, [("n", b"")])) + KEY_BYTES_MAX)
    assert decode_attributes(encode_attributes(None, [("n", value)]), where="")[1] == (("n", value),)
    wrong: list[tuple[object, object]] = [
        (b"k" * (KEY_BYTES_MAX + 1), ()),
        ("text", ()),
        (bytearray(b"k"), ()),
        (None, [("n", value + b"v")]),
        (None, [("n", b"")] * (HEADERS_MAX + 1)),
        (None, [("n" * 256, b"")]),
        (None, [("ü" * 128, b"")]),
        (None, [("\ud800", b"")]),
        (None, [("", b"")]),
        (None, [("n", "text")]),
        (None, [("n",)]),
        (None, {"n": b""}),
        (None, "text"),
        (None, iter([])),
        (None, None),
    ]
    for key, headers in wrong:
        with pytest.raises(UsageError):
            encode_attributes(key, headers)


@given(data=st.binary(max_size=60))
@example(data=b"")
@example(data=b"\xff\xff\x01")
@example(data=b"\x05\x00\x00\x00abcd")
@example(data=b"\xff\xff\x01\x00\x01\x00\x00\x00\x00\x00\xff")
def test_any_bytes_are_decoded_or_damaged(data: bytes) -> None:
    with suppress(CorruptError):
        key, headers, rest = decode_attributes(data, where="record 7")
        assert data.endswith(rest)
        assert (encode_attributes(key, headers) or NO_ATTRIBUTES) + rest == data


@given(
    key=KEYS,
    headers=HEADERS.filter(bool),
    cut=st.floats(0, 1, exclude_max=True),
)
def test_what_was_cut_off_is_damaged(key: bytes | None, headers: list[tuple[str, bytes]], cut: float) -> None:
    encoded = encode_attributes(key, headers)
    with pytest.raises(CorruptError, match="record 7: its key and headers are damaged"):
        decode_attributes(encoded[: int(len(encoded) * cut)], where="record 7")
