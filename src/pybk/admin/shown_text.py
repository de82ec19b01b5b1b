"""Text of others, such as names of ledger types, as terminals and logs show it."""

from __future__ import annotations

from typing import Final

_NAME_MAX: Final = 48
"""Characters of a name that tables show; a longer one would push the other columns off the screen."""


def shown_name(name: str) -> str:
    """Return a name as tables show it: a long one is cut in the middle, and JSON has the whole."""
    if len(name) <= _NAME_MAX:
        return name
    kept = (_NAME_MAX - 1) // 2
    return f"{name[:kept]}…{name[-kept:]}"


def shown_text(text: str) -> str:
    """Return a text without what terminals obey, and without ends of lines: each such character is escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
