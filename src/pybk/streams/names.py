"""Names of logs and blobs: paths such as ``orders/eu``, which sort and list by prefix."""

from __future__ import annotations

from typing import Final

from pybk.errors import UsageError

NAME_BYTES_MAX: Final = 120
_NO_PARTS: Final = frozenset({"", ".", ".."})


def checked_name(name: object, what: str = "a log") -> str:
    """Return the name of a log, or of ``what``; UsageError if it cannot be one.

    A name has 1 to 120 bytes in UTF-8, in parts separated by ``/``, none of them empty, ``.`` or ``..``. It has no
    control characters, no spaces around it, and does not begin with a full stop, which is reserved.
    """
    if not isinstance(name, str):
        raise UsageError(f"the name of {what} takes a string, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"the name {name!r:.50} cannot be encoded as UTF-8: {error.reason}") from error
    if not 1 <= size <= NAME_BYTES_MAX:
        raise UsageError(f"the name {name!r:.50} has {size} bytes in UTF-8; it takes 1 to {NAME_BYTES_MAX}")
    if not _NO_PARTS.isdisjoint(name.split("/")) or name.startswith("."):
        raise UsageError(
            f"the name {name!r} has an empty part, or one of full stops, or begins with one; choose another"
        )
    if name != name.strip() or not name.isprintable():
        raise UsageError(
            f"the name {name!r} has spaces around it, or characters that cannot be printed; choose another"
        )
    return name


def title_of(name: str, *, of_cursor: bool) -> str:
    """Return what errors call a log, or the subscription whose cursor a ledger list is."""
    if not of_cursor:
        return f"log {name!r}"
    log, _, subscription = name.rpartition("@")
    return f"subscription {subscription!r} of log {log!r}"


def cursor_list_name(log: str, subscription: str) -> str:
    """Return the name of the ledger list of a subscription's cursor; that of the subscription has no ``@``."""
    return f"{log}@{subscription}"
