"""The command ``pybk config``: check a file of options, and show a bookie's values and their origins."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import FAILED, SOUND, counted, print_json, print_table
from pybk.admin.cli.service import settings_given
from pybk.errors import UsageError
from pybk.options.bookie import OPTIONS, check, resolved
from pybk.options.settings import ConfigFile, Setting, read_file


def _check(parsed: argparse.Namespace) -> int:
    file = read_file(parsed.path, OPTIONS)
    problems = list(file.problems)
    try:
        check(resolved({}, {}, ConfigFile(file.path, file.values, ())))
    except UsageError as error:
        problems.append(str(error))
    if parsed.json:
        print_json({"file": parsed.path, "options": len(file.values), "problems": problems})
    else:
        for problem in problems:
            print(f"pybk: {problem}", file=sys.stderr)
        if not problems:
            print(f"{parsed.path}: {counted(len(file.values), 'option')}, all of them known and of the right type")
    return FAILED if problems else SOUND


def _show(parsed: argparse.Namespace) -> int:
    settings = settings_given(parsed)
    check(settings)
    if parsed.json:
        print_json({"options": [_as_json(each) for each in settings.values()]})
        return SOUND
    rows = [(each.option.name, each.option.shown(each.value), each.origin) for each in settings.values()]
    headers = ("option", "value", "origin")
    columns = len(headers) if parsed.origin else len(headers) - 1
    print_table((row[:columns] for row in rows), headers[:columns])
    return SOUND


def _as_json(setting: Setting) -> dict[str, Any]:
    option, value, origin = setting
    plain = value is None or isinstance(value, bool | int | float)
    shown = list(value) if isinstance(value, tuple) else value if plain else option.shown(value)
    return {"option": option.name, "value": shown, "origin": origin, "takes": option.reader.name}


VERBS: Final[Verbs] = {"check": _check, "show": _show}
"""The verbs of ``pybk config``."""
