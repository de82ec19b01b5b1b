"""The verbs ``pybk cluster settings show|set``: the settings that all members of a cluster follow."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pybk.admin.cli.clusters import admin_of, person_of
from pybk.admin.cli.output import SOUND, print_json, print_table, shown_time
from pybk.credentials import cut_value
from pybk.errors import UsageError
from pybk.options.kinds import seconds_of, size_of

if TYPE_CHECKING:
    from pybk.metadata.settings import ClusterSettings


def show(parsed: argparse.Namespace) -> int:
    """Run ``pybk cluster settings show``."""
    with admin_of(parsed) as admin:
        settings = admin.settings()
    _print(parsed, settings)
    return SOUND


def change(parsed: argparse.Namespace) -> int:
    """Run ``pybk cluster settings set``."""
    with admin_of(parsed) as admin:
        found = admin.settings()
        values = dict(_value_of(found, text) for text in parsed.values)
        settings = found.changed(values)
        if not parsed.dry_run:
            settings = admin.change_settings(lambda now: now.changed(values), person_of(parsed))
    if parsed.json:
        _print(parsed, settings)
        return SOUND
    for name in values:
        old, new = (_shown(_current(each, name)) for each in (found, settings))
        would = "would be" if parsed.dry_run else "is"
        print(f"{name} {would} {new or 'empty'}" + (f", and was {old or 'empty'}" if old != new else " as before"))
    return SOUND


def _value_of(settings: ClusterSettings, text: str) -> tuple[str, Any]:
    """Return the name and the value that ``NAME=VALUE`` gives, by the type of the setting's present value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{cut_value(text, 100)} gives no value; write NAME=VALUE, such as repair.grace_s=10m")
    now = _current(settings, name)
    try:
        if isinstance(now, bool):
            return name, {"true": True, "false": False}[value.lower()]
        if isinstance(now, tuple):
            return name, tuple(each.strip() for each in value.split(",") if each.strip())
        if isinstance(now, str):
            return name, value
        if name.endswith("_s"):
            return name, seconds_of(value)
        return name, size_of(value) if name.endswith("bytes_per_second") else type(now)(value)
    except (KeyError, ValueError):
        takes = {bool: "true or false", int: "a whole number, of bytes also as 64MiB"}
        takes |= {float: "a number, of seconds also as 10m"}
        raise UsageError(f"setting {name} takes {takes[type(now)]}, and not {cut_value(value, 100)}") from None


def _current(settings: ClusterSettings, name: str) -> Any:
    section, _, key = name.partition(".")
    found = settings.as_dict()
    if key not in found.get(section, {}):
        raise UsageError(
            f"there is no setting {cut_value(name, 100)}; `pybk cluster settings show` lists those that there are"
        )
    return found[section][key]


def _print(parsed: argparse.Namespace, settings: ClusterSettings) -> None:
    if parsed.json:
        values = {"changed_by": settings.changed_by, "changed_ns": settings.changed_ns}
        print_json({**settings.as_dict(), **values})
        return
    rows = [
        (f"{section}.{name}", _shown(value))
        for section, values in settings.as_dict().items()
        for name, value in values.items()
    ]
    print_table(rows, ("setting", "value"))
    if settings.changed_ns:
        print(f"changed at {shown_time(settings.changed_ns)} UTC by {settings.changed_by or 'somebody'}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
