"""A cluster's metadata in a file: the stored bytes of every key that is not leased, with their MACs, and no secret.

The file has one JSON object in each line: first a header, then ``{"key": ..., "value": base64}`` for each key, last the
number of values and the SHA-256 of everything before the last line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from pybk.errors import CorruptError, UnsupportedFormatError, UsageError
from pybk.metadata.auditor_records import AUDITOR_KEY, REPORT_KEY
from pybk.metadata.orphan_records import ORPHANS_KEY
from pybk.metadata.reports import MetadataExportReport
from pybk.metadata.scrub_records import QUICK_KEY, SCRUB_KEY
from pybk.metadata.store import MetadataStore
from pybk.storage.io.filesystem import OsFileSystem, open_regular
from pybk.values import from_base64, to_base64

EXPORT_FORMAT: Final = 1
NOT_EXPORTED: Final = ("bookies", "locks", AUDITOR_KEY, REPORT_KEY, ORPHANS_KEY, SCRUB_KEY, QUICK_KEY)
"""The first names of leased keys, because some stores do not distinguish leased keys from others.

The records of the auditor are not exported either, because they say for how long bookies were absent at that time. Nor
are the times of checks, because they prove nothing about later copies.
"""

_KIND: Final = "pybk cluster metadata"
_NAMES: Final = frozenset({"key", "value"})
_PROGRESS_VALUES: Final = 1000
_LINE_BYTES_MAX: Final = 16 << 20
"""Far more bytes than a value of a metadata store has in base64; a file that is not an export may have no line end."""


def write_export(
    store: MetadataStore, path: str, made_ns: int, progress: Callable[[int, int], None]
) -> MetadataExportReport:
    """Write the metadata in a store to a new file, durably.

    Args:
        store: The store.
        path: The file; its owner alone can read it.
        made_ns: The time, for people.
        progress: Called with the number of values written, as both arguments, because the total is not known.

    Raises:
        UsageError: A file of this name exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise UsageError(f"{path} exists, and is not overwritten; name a file that does not exist") from error
    digest, values, ledgers = hashlib.sha256(), 0, 0
    try:
        with os.fdopen(descriptor, "wb") as file:
            header = _line({"kind": _KIND, "format": EXPORT_FORMAT, "made_ns": made_ns})
            digest.update(header)
            file.write(header)
            for key, node in store.walk():
                if key.partition("/")[0] in NOT_EXPORTED:
                    continue
                line = _line({"key": key, "value": to_base64(node.value)})
                digest.update(line)
                file.write(line)
                values += 1
                ledgers += key.startswith("ledgers/")
                if values % _PROGRESS_VALUES == 0:
                    progress(values, values)
            file.write(_line({"count": values, "sha256": digest.hexdigest()}))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        OsFileSystem().sync_directory(os.path.dirname(os.path.abspath(path)))
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    return MetadataExportReport(path, values, ledgers, size, digest.hexdigest())


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode() + b"\n"


def check_export(path: str) -> None:
    """Check that a file is a whole export.

    Raises:
        CorruptError: It was cut or changed, or is not an export.
        UnsupportedFormatError: It has a newer format.
    """
    for _ in read_export(path):
        pass


def read_export(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield the keys and values in an export; an export that is not whole raises only at its end.

    Raises:
        CorruptError, UnsupportedFormatError: As ``check_export``.
    """
    digest, count = hashlib.sha256(), 0
    with open(open_regular(path), "rb") as file:
        lines = iter(partial(file.readline, _LINE_BYTES_MAX), b"")
        header = _decode(path, 1, next(lines, b""))
        if header.get("kind") != _KIND:
            raise CorruptError(
                f"{path} is not an export of a cluster's metadata; name a file of `pybk metadata export`"
            )
        if header.get("format") != EXPORT_FORMAT:
            raise UnsupportedFormatError(
                f"{path}: an export of format {header.get('format')!r}; this pybk reads {EXPORT_FORMAT}: install a "
                "newer one"
            )
        file.seek(0)
        digest.update(next(lines))
        for number, line in enumerate(lines, start=2):
            values = _decode(path, number, line)
            if values.keys() == _NAMES:
                digest.update(line)
                count += 1
                try:
                    yield str(values["key"]), from_base64(values["value"])
                except ValueError as error:
                    raise CorruptError(f"{path}, line {number}: {error}; take another copy of the file") from error
            elif values != {"count": count, "sha256": digest.hexdigest()}:
                raise CorruptError(
                    f"{path}, line {number}: the count or the SHA-256 is wrong, so the file was changed; take another "
                    "copy"
                )
            elif file.read(1):
                raise CorruptError(f"{path} continues after its last line; take another copy of the file")
            else:
                return
    raise CorruptError(f"{path} was cut: its last line is missing; take another copy of the file")


def _decode(path: str, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}, line {number}: {error}; take another copy of the file") from error
    if not isinstance(values, dict):
        raise CorruptError(f"{path}, line {number} is not a JSON object; take another copy of the file")
    return values
