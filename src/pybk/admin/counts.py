"""Numbers of things in what the commands print."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 ledger"; ``plural`` is ``noun`` with an s by default."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
