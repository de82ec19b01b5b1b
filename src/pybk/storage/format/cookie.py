"""The cookie of a directory: the store that it belongs to, and its tier and number there.

The word is BookKeeper's. An open reads the cookies first, because a tier directory may be another store's, not mounted,
swapped with another, or a leftover of a copy. See ``docs/reference/format.md``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_hexdigest

from pybk.errors import CookieError, CorruptError, UnsupportedFormatError
from pybk.feature_level import FeatureLevel
from pybk.storage.io.filesystem import FileSystem, replace_file

COOKIE_NAME: Final = "cookie"
COOKIE_FORMATS: Final = {FeatureLevel.BASE: 1, FeatureLevel.SEALS: 2, FeatureLevel.STREAMS: 2, FeatureLevel.SECRETS: 2}
"""The format of a cookie at each feature level of stores, for one that was never restored from a backup."""

RESTORED_FORMAT: Final = 3
"""Format of a cookie, and of a catalog, with an incarnation: that of level SEALS, and the incarnation."""

COOKIE_BYTES_MAX: Final = 4096

_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Cookie:
    """The content of a directory's cookie.

    Attributes:
        store_id: 16 bytes, the same in all directories of a store.
        instance: 16 bytes, drawn when the directory joined the store.
        tier: The tier that the directory is part of; "main" for the store's own directory.
        directory: Its index among the directories of its tier.
        salt: Salt of the store's password hashing. Not secret. At level BASE only in the store's own directory.
        scrypt_cost: scrypt's N. At level BASE only in the store's own directory.
        level: The store's feature level.
        incarnation: 0 for a store that was never restored from a backup; otherwise a random number of 64 bits that the
            restore drew. Store id and salt stay, because keys depend on them, so it alone distinguishes a restored
            store from the one that was backed up. Only at level SEALS and above.
    """

    store_id: bytes
    instance: bytes
    tier: str
    directory: int
    salt: bytes | None = None
    scrypt_cost: int | None = None
    level: FeatureLevel = FeatureLevel.BASE
    incarnation: int = 0


def format_of(cookie: Cookie, formats: Mapping[FeatureLevel, int]) -> int:
    """Return the format in which a cookie or a catalog of a store is written.

    Args:
        cookie: The store's cookie.
        formats: The format at each feature level, for stores without an incarnation.
    """
    return RESTORED_FORMAT if cookie.incarnation else formats[cookie.level]


def check_known(level: int, features: int, *, where: str) -> FeatureLevel:
    """Return the FeatureLevel of a stored number, if this version of pybk supports it.

    Args:
        level: The number of the level.
        features: The bits of incompatible features, none of which is in use yet.
        where: The file, for the error.

    Raises:
        UnsupportedFormatError: The level or a feature is newer than this pybk.
    """
    if level not in COOKIE_FORMATS or features:
        raise UnsupportedFormatError(
            f"{where}: feature level {level} and incompatible features {features:#x}; this pybk knows the levels "
            f"{', '.join(str(int(each)) for each in COOKIE_FORMATS)} of stores and no such features; open the store "
            "with the pybk that wrote it, or newer"
        )
    return FeatureLevel(level)


def encode_cookie(cookie: Cookie) -> bytes:
    """Return a cookie's bytes on disk."""
    fields: dict[str, str | int] = {
        "directory": cookie.directory,
        "format": format_of(cookie, COOKIE_FORMATS),
        "instance": cookie.instance.hex(),
        "store": cookie.store_id.hex(),
        "tier": cookie.tier,
    }
    if cookie.salt is not None:
        fields["salt"] = cookie.salt.hex()
    if cookie.scrypt_cost is not None:
        fields["scrypt"] = cookie.scrypt_cost
    if cookie.level > FeatureLevel.BASE:
        fields["features"] = 0
        fields["level"] = int(cookie.level)
    if cookie.incarnation:
        fields["incarnation"] = f"{cookie.incarnation:016x}"
    return _encode(fields)


def _encode(fields: dict[str, str | int]) -> bytes:
    checksum = xxh3_64_hexdigest(json.dumps(fields, sort_keys=True).encode())
    return json.dumps(fields | {"checksum": checksum}, sort_keys=True).encode()


def decode_cookie(data: bytes, *, where: str) -> Cookie:
    """Decode and check a cookie's bytes.

    Raises:
        CorruptError: They are not exactly what :func:`encode_cookie` makes.
        UnsupportedFormatError: They are sound but of another format.
    """
    damage = CorruptError(
        f"{where}: the cookie is damaged: {data[:200]!r}; restore this file from a copy of the directory", path=where
    )
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damage from error
    # Only one encoding is valid, so that any changed byte is noticed, even in white space that JSON ignores.
    if not isinstance(fields, dict) or _encode({k: v for k, v in fields.items() if k != "checksum"}) != data:
        raise damage
    if fields.get("format") not in (*COOKIE_FORMATS.values(), RESTORED_FORMAT):
        raise UnsupportedFormatError(
            f"{where}: cookie format {fields.get('format')!r}; this pybk reads "
            f"{RESTORED_FORMAT} and older; open the store with the pybk that wrote it, or newer"
        )
    level, features = fields.get("level", 0), fields.get("features", 0)
    if type(level) is not int or type(features) is not int or level < 0:
        raise damage
    try:
        cookie = Cookie(
            store_id=bytes.fromhex(fields["store"]),
            instance=bytes.fromhex(fields["instance"]),
            tier=fields["tier"],
            directory=fields["directory"],
            salt=bytes.fromhex(fields["salt"]) if "salt" in fields else None,
            scrypt_cost=fields.get("scrypt"),
            level=check_known(level, features, where=where),
            incarnation=int(fields.get("incarnation", "0"), 16),
        )
        sound = encode_cookie(cookie) == data
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damage from error
    if not (sound and _well_typed(cookie)):
        raise damage
    return cookie


def _well_typed(cookie: Cookie) -> bool:
    return (
        len(cookie.store_id) == len(cookie.instance) == _ID_BYTES
        and type(cookie.tier) is str
        and type(cookie.directory) is int
        and cookie.directory >= 0
        and type(cookie.scrypt_cost) in (int, type(None))
        and (cookie.level is FeatureLevel.BASE or not (cookie.salt is None or cookie.scrypt_cost is None))
        and 0 <= cookie.incarnation < 1 << 64
        and not (cookie.incarnation and cookie.level is FeatureLevel.BASE)
    )


def write_cookie(fs: FileSystem, directory: str, cookie: Cookie) -> None:
    """Write the cookie of an existing directory, durably, replacing any other."""
    replace_file(fs, os.path.join(directory, COOKIE_NAME), encode_cookie(cookie))


def read_cookie(fs: FileSystem, directory: str) -> Cookie | None:
    """Return a directory's cookie, None if it has none.

    Raises:
        CorruptError: It is damaged.
        UnsupportedFormatError: It is sound but of another format.
        OSError: It cannot be read.
    """
    path = os.path.join(directory, COOKIE_NAME)
    if not fs.exists(path):
        return None
    with closing(fs.open(path)) as file:
        if file.size > COOKIE_BYTES_MAX:
            raise CorruptError(
                f"{path}: {file.size} bytes; a cookie has at most {COOKIE_BYTES_MAX}; restore it from "
                "a copy of the directory",
                path=path,
            )
        data = file.read(0, file.size)
    return _decoded(data, path)


@lru_cache(maxsize=64)
def _decoded(data: bytes, path: str) -> Cookie:
    """Decode a cookie's bytes; cached, because an open reads each cookie several times and decoding is slow."""
    return decode_cookie(data, where=path)


def check_cookie(found: Cookie, expected: Cookie, directory: str) -> None:
    """Check that a directory is the one that the store expects; salt and scrypt cost are not compared.

    Raises:
        CookieError: It belongs to another store, incarnation, tier or index, or it is a copy; names both and the
            remedy.
    """
    if (found.store_id, found.incarnation, found.tier, found.directory, found.instance) == (
        expected.store_id,
        expected.incarnation,
        expected.tier,
        expected.directory,
        expected.instance,
    ):
        return
    remedy = "mount or name the right directory"
    if found.store_id == expected.store_id and found.tier == expected.tier:
        if found.incarnation != expected.incarnation:
            remedy = "one of the two was restored from a backup, so their directories do not belong together; " + remedy
        elif found.directory != expected.directory:
            remedy = "name the directories of a tier in the order in which they were first given"
        else:
            remedy = "it is a copy or from an older backup; mount or name the one that the store last used"
    raise CookieError(f"{directory} is {_describe(found)}; expected is {_describe(expected)}; {remedy}")


def _describe(cookie: Cookie) -> str:
    return (
        f"directory {cookie.directory} of tier {cookie.tier} of store {cookie.store_id.hex()}"
        f"{f', incarnation {cookie.incarnation:016x},' if cookie.incarnation else ''} "
        f"(instance {cookie.instance.hex()})"
    )
