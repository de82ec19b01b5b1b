"""Text of others, such as names of ledger types, as terminals and logs show it."""

from __future__ import annotations


def shown_text(text: str) -> str:
    """Return a text without what terminals obey, and without ends of lines: each such character is escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
