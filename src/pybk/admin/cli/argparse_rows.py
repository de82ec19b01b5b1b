"""Adds the arguments that the table declares to parsers of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Final

from pybk.options.kinds import KINDS, Kind, text_of
from pybk.options.rows import Option, Row

WATCH_SECONDS: Final = 2.0
"""The value of a flag without one, such as ``--watch``."""


def add_rows(parser: argparse.ArgumentParser, rows: Iterable[Row]) -> None:
    """Add arguments to a parser. The flag of an option of a service leaves no value if it is not given.

    Raises:
        KeyError: A row has a kind that does not exist.
    """
    groups: dict[str, Any] = {"": parser}
    for row in rows:
        name = row.excludes or row.title
        if name not in groups and row.excludes:
            groups[name] = parser.add_mutually_exclusive_group(required=name == "^!")
        elif name not in groups:
            groups[name] = parser.add_argument_group(name)
        notes = f" ({'; '.join(row.notes)})" if row.notes else ""
        found = {"help": f"{row.help}{notes}".replace("%", "%%")}
        if not isinstance(row, Option):
            groups[name].add_argument(*(row.flags or (row.dest or row.metavar.lower(),)), **found, **_of_argument(row))
        elif row.flag not in ("", "PATH"):
            groups[name].add_argument(row.flag, **found, **_of_option(row))


def _of_argument(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"dest": row.dest} if row.flags and row.dest else {}
    if row.is_switch:
        if row.const:
            return {**found, "action": "store_const", "const": row.const, "default": row.default}
        return {**found, "action": "store_true"}
    found["metavar"] = row.metavar or None
    if row.default is not None:
        found["default"] = row.default or ([] if row.count in ("+", "*") else "")
    if row.count == "...":
        found |= {"action": "append", "default": []}
    elif row.count:
        found |= {"nargs": row.count, **({"const": WATCH_SECONDS} if row.flags and row.count == "?" else {})}
    if row.choices:
        found["choices"] = row.choices
    elif row.kind and row.metavar != "PATH":
        found["type"] = _named(*row.kind.split(".")) if "." in row.kind else _reading(row.reader)
    elif row.metavar == "FILE" and row.default is None:
        found["type"] = _reading(KINDS["file"])
    if "!" in row.words:
        found["required"] = True
    return found


def _named(module: str, function: str) -> Callable[[str], Any]:
    """Return what converts a text by a function of a module of commands, which is imported when it is needed."""

    def convert(text: str) -> Any:
        return getattr(import_module(f"pybk.admin.cli.{module}"), function)(text)

    return convert


def _of_option(option: Option) -> dict[str, Any]:
    found: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
    if option.once:
        return {**found, "action": "store_true"}
    if option.kind == "switch":
        return {**found, "action": argparse.BooleanOptionalAction}
    # A list has one value for each time that its flag is given, so that the value may contain a comma.
    reading = _reading(option.reader, text_of if option.count else option.reader.of_text)
    action = "append" if option.count else "store"
    return {**found, "metavar": option.metavar or option.key.upper(), "type": reading, "action": action}


def _reading(kind: Kind, read: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return (read or kind.of_text)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(kind.wrong(text)) from None

    return convert
