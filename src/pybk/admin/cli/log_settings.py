"""The verb ``settings`` of ``pybk log`` and ``pybk wal``: its options, and what it prints."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pybk.flags import StorageHint

if TYPE_CHECKING:
    from pybk.streams.ledger_spec import LogSettings


def changes_settings(parsed: argparse.Namespace) -> bool:
    """Return whether the arguments name a setting, or all."""
    return bool(_given(parsed)) or bool(parsed.defaults)


def changed_settings(parsed: argparse.Namespace, kept: LogSettings) -> LogSettings:
    """Return the settings that a log keeps after the change."""
    from pybk.streams.ledger_spec import LogSettings

    return replace(LogSettings() if parsed.defaults else kept, **_given(parsed))


def _given(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the arguments name."""
    from pybk.ledger.digest import DigestType

    given = {
        "quorums": parsed.quorums,
        "digest_type": parsed.digest and DigestType[parsed.digest],
        "storage_hints": parsed.storage_hint and {StorageHint(parsed.storage_hint)},
        "segment_bytes": parsed.segment_bytes,
        "segment_age_s": parsed.segment_age,
        "segment_records": parsed.segment_records,
    }
    return {name: value for name, value in given.items() if value is not None}


def fields_of(kept: LogSettings) -> dict[str, Any]:
    """Return the settings that a log keeps, in the form of the JSON output."""
    quorums = None if kept.quorums == (None, None, None) else "/".join(map(str, kept.quorums))
    return {**kept.described(), "quorums": quorums}
