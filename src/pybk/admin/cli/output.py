"""What all commands print with: JSON, tables, progress, counts; and the exit statuses."""

from __future__ import annotations

import json
import sys
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tabulate import tabulate
from tqdm import tqdm

SOUND: Final = 0
DAMAGED: Final = 1
"""Damage was found, or something is not as it should be."""

FAILED: Final = 2
"""Wrong usage, or a store or cluster that cannot be opened."""

REFUSED: Final = 3
"""A safety check refused a change of a cluster; nothing was changed."""

INTERRUPTED: Final = 130
"""Ended by Ctrl-C, as shells report it."""

CUT_OFF: Final = 141
"""Nobody reads its output any more, as shells report SIGPIPE."""

_PROGRESS_AFTER_SECONDS: Final = 1.0


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 ledger"; ``plural`` is ``noun`` with an s by default."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def print_json(content: Any, *, indent: int | None = 2) -> None:
    """Print JSON with sorted keys.

    Raises:
        TypeError: A value has no form in JSON, and its command did not convert it.
    """
    print(json.dumps(content, indent=indent, sort_keys=True))


def print_table(rows: Iterable[Sequence[Any]], headers: Sequence[str], *, last_column: int | None = None) -> None:
    """Print a table; the last column wraps at ``last_column`` characters if that is given."""
    widths = None if last_column is None else [*[None] * (len(headers) - 1), last_column]
    print(tabulate(rows, headers=headers, disable_numparse=True, stralign="left", maxcolwidths=widths))


def base64(data: bytes) -> str:
    """Return bytes as JSON output has them."""
    return b2a_base64(data, newline=False).decode()


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Provide a function of the bytes done and their total, which shows a bar once the command has taken a second.

    Nothing is shown where standard error is not a terminal.
    """
    with tqdm(
        desc=what, unit="B", unit_scale=True, delay=_PROGRESS_AFTER_SECONDS, disable=None, file=sys.stderr, leave=False
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
