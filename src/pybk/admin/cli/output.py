"""The output of all commands: JSON, tables, progress, counts, questions; and the exit statuses.

A document of JSON has ``schema: 1``; a command that prints as it proceeds has a line of JSON for each thing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pybk.admin.shown_text import shown_text
from pybk.deferral import LateModule
from pybk.errors import SafetyCheckError

if TYPE_CHECKING:
    import tabulate
    import tqdm
else:  # few commands print tables, and fewer a bar
    tabulate, tqdm = LateModule("tabulate"), LateModule("tqdm")

SOUND: Final = 0
DAMAGED: Final = 1
"""Damage or another problem was found."""

FAILED: Final = 2
"""Wrong usage, or a store or cluster that cannot be opened."""

REFUSED: Final = 3
"""A safety check, or a person who was asked, refused a change; nothing was changed."""

UNREACHABLE: Final = 4
"""A server could not be reached, or took too long; another try may succeed."""

PARTLY: Final = 5
"""Only a part was done."""

INTERRUPTED: Final = 130
"""Ended by Ctrl-C, as shells report it."""

CUT_OFF: Final = 141
"""Its output is no longer read, as shells report SIGPIPE."""

EXIT_STATUSES: Final[Mapping[int, str]] = {
    SOUND: "done, or all is sound",
    DAMAGED: "damage was found, or something is not as it should be",
    FAILED: "wrong usage, or a store or cluster that cannot be opened",
    REFUSED: "a safety check refused it, or the question was not answered with yes; nothing was changed",
    UNREACHABLE: "something cannot be reached, is in use by another process, or took too long; try again",
    PARTLY: "a part was done, and the rest was not",
    INTERRUPTED: "Ctrl-C ended it",
    CUT_OFF: "the reader of its output closed it",
}
"""The meaning of each exit status."""

LAST_COLUMN: Final = 100
"""The characters at which the last column of a table wraps if that is a sentence."""

_SCHEMA: Final = 1
PROGRESS_AFTER_SECONDS: Final = 1.0
_WATCHED: Final = ContextVar("watched", default=False)
"""True if documents are printed repeatedly, so that each is a line."""

_COLOURS: Final = {"ok": "32", "warn": "33", "bad": "31"}


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, such as "1 ledger"; ``plural`` is ``noun`` with an s by default."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def shown_time(time_ns: int) -> str:
    """Return a time as text for tables; empty for 0."""
    return "" if not time_ns else f"{datetime.fromtimestamp(time_ns // 1_000_000_000, UTC):%Y-%m-%d %H:%M:%S}"


def age_of(since_ns: int) -> str:
    """Return the age of a state as text; empty if unknown."""
    return f"{max(0.0, (time.time_ns() - since_ns) / 1e9):.0f} s" if since_ns else ""


def shown_bytes(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def print_json(content: Mapping[str, Any]) -> None:
    """Print a document: an object with ``schema: 1`` and sorted keys; in one line during a watch.

    Raises:
        TypeError: A value has no form in JSON, and its command did not convert it.
    """
    print(json.dumps({"schema": _SCHEMA, **content}, indent=None if _WATCHED.get() else 2, sort_keys=True))


def print_json_line(content: Mapping[str, Any]) -> None:
    """Print an object in one line, of a command that prints many; raises TypeError as ``print_json``."""
    print(json.dumps(content, sort_keys=True))


def print_result(parsed: argparse.Namespace, content: Mapping[str, Any], *lines: str) -> int:
    """Print the result of a command, as JSON or in lines; return the exit status of success."""
    if parsed.json:
        print_json(content)
    else:
        print(*lines, sep="\n")
    return SOUND


def print_table(rows: Iterable[Sequence[Any]], headers: Sequence[str], *, last_column: int | None = None) -> None:
    """Print a table; the last column wraps at ``last_column`` characters if that is given."""
    widths = None if last_column is None else [*[None] * (len(headers) - 1), last_column]
    shown = [[shown_text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    print(tabulate.tabulate(shown, headers=headers, disable_numparse=True, stralign="left", maxcolwidths=widths))


def print_note(parsed: argparse.Namespace, text: str) -> None:
    """Print a note that is not a result to the standard error, unless ``--quiet`` is given."""
    if not parsed.quiet:
        print(text, file=sys.stderr)


def coloured(verdict: str) -> str:
    """Return a verdict for terminals: in colour, unless NO_COLOR is set."""
    colour = _COLOURS.get(verdict.lower())
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return verdict if plain or colour is None else f"\x1b[{colour}m{verdict}\x1b[0m"


def base64(data: bytes) -> str:
    """Return bytes in base64, as JSON output has them."""
    return b2a_base64(data, newline=False).decode()


# ---- progress ------------------------------------------------------------------------------------------------------


@contextmanager
def progress_bar(parsed: argparse.Namespace, what: str, unit: str = "B") -> Iterator[Callable[[int, int], None]]:
    """Provide a function of the work done and the total, 0 for unknown, which shows a bar after a second.

    The bar is shown on the standard error, and only on terminals; ``--progress json`` always prints a line a second
    instead.

    Args:
        parsed: The command line.
        what: The name of the work.
        unit: The unit of the counts.
    """
    mode = "none" if parsed.quiet else parsed.progress
    if mode == "json":
        yield _json_progress(what, unit)
        return
    if mode == "none" or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with tqdm.tqdm(
        desc=what,
        unit=unit,
        unit_scale=True,
        unit_divisor=1024 if unit == "B" else 1000,
        delay=PROGRESS_AFTER_SECONDS,
        file=sys.stderr,
        leave=False,
        colour=None,
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total or None
            bar.update(done - bar.n)

        yield show


def _json_progress(what: str, unit: str) -> Callable[[int, int], None]:
    began = printed = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= PROGRESS_AFTER_SECONDS:
            printed = now
            values = {
                "progress": what,
                "done": done,
                "total": total or None,
                "unit": unit,
                "seconds": round(now - began),
            }
            print(json.dumps(values), file=sys.stderr, flush=True)

    return show


# ---- looking again and again ---------------------------------------------------------------------------------------


def watch(
    parsed: argparse.Namespace, look: Callable[[], int], done: Callable[[int], bool] = lambda status: False
) -> int:
    """Call ``look``, which prints, once or, with ``--watch``, repeatedly; return its last exit status.

    A terminal is cleared before each look.

    Args:
        parsed: The command line, of a command that takes ``--watch``.
        look: Looks, prints, and returns an exit status.
        done: Whether an exit status ends a watch.
    """
    token = _WATCHED.set(parsed.watch is not None)
    try:
        while True:
            if parsed.watch is not None and sys.stdout.isatty() and not parsed.json:
                print("\x1b[H\x1b[2J", end="")
            status = look()
            sys.stdout.flush()
            if parsed.watch is None or done(status):
                return status
            time.sleep(max(0.05, parsed.watch))
    finally:
        _WATCHED.reset(token)


# ---- questions -----------------------------------------------------------------------------------------------------


def confirm(parsed: argparse.Namespace, name: str, what: str) -> None:
    """Ask before a destruction: the name has to be typed, unless ``--yes`` is given.

    Args:
        parsed: The command line, of a command that takes ``--yes``.
        name: The name to type.
        what: The effect, a sentence without its end.

    Raises:
        SafetyCheckError: The answer was another one, or there is no terminal to ask on.
    """
    if parsed.yes:
        return
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise SafetyCheckError(
            f"{what}, and this is not a terminal, so nobody can be asked: give --yes; nothing was changed"
        )
    print(f"{what}. Type {name} to do it: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() != name:
        raise SafetyCheckError(f"{name} was not typed; nothing was changed")
