"""Text from callers, such as names of ledger types, in a form for terminals and logs."""

from __future__ import annotations

from typing import Final

_NAME_MAX: Final = 48
"""Characters of a name that tables show; a longer one would push the other columns off the screen."""


def shown_name(name: str) -> str:
    """Return a name for tables: a long one is cut in the middle; JSON output has it whole."""
    if len(name) <= _NAME_MAX:
        return name
    kept = (_NAME_MAX - 1) // 2
    return f"{name[:kept]}…{name[-kept:]}"


def shown_text(text: str) -> str:
    """Return a text in which control characters of terminals, and ends of lines, are escaped."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
