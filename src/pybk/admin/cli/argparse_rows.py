"""Adds the arguments that the table declares to parsers of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Final

from pybk.options.kinds import Kind, kind_of, text_of
from pybk.options.rows import Row
from pybk.options.settings import Option

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
        if not row.section:
            groups[name].add_argument(*(row.flags or (row.dest or row.metavar.lower(),)), **_of_argument(row))
            continue
        option = Option(row)
        if option.flag not in ("", "PATH"):
            groups[name].add_argument(option.flag, **_of_option(option))


def _of_argument(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {"help": row.help.replace("%", "%%")}
    if row.flags and row.dest:
        found["dest"] = row.dest
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
        found["type"] = _named(*row.kind.split(".")) if "." in row.kind else _reading(kind_of(row.kind))
    elif row.metavar == "FILE" and row.default is None:
        found["type"] = _reading(kind_of("file"))
    if "!" in row.words:
        found["required"] = True
    return found


def _named(module: str, function: str) -> Callable[[str], Any]:
    """Return what converts a text by a function of a module of commands, which is imported when it is needed."""

    def convert(text: str) -> Any:
        return getattr(import_module(f"pybk.admin.cli.{module}"), function)(text)

    return convert


def _of_option(option: Option) -> dict[str, Any]:
    notes = [f"default: {option.shown_default}"] if option.shown_default else []
    if option.variable:
        notes.append(f"variable: {option.variable}")
    text = f"{option.row.help} ({'; '.join(notes)})" if notes else option.row.help
    found = {"dest": option.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if option.once:
        return {**found, "action": "store_true"}
    if option.row.kind == "switch":
        return {**found, "action": argparse.BooleanOptionalAction}
    action = "append" if option.row.count else "store"
    return {
        **found,
        "metavar": option.row.metavar or option.key.upper(),
        "type": _reading(option.kind, count=option.row.count),
        "action": action,
    }


def _reading(kind: Kind, count: str = "") -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            # A list has one value for each time that its flag is given, so that the value may contain a comma.
            return text_of(text) if count else kind.of_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(kind.wrong(text)) from None

    return convert
