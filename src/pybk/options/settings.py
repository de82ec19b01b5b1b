"""The options of a service: one reader of flags, variables and a file, which names the errors in them.

An option's value is the first of these that is given: its flag, its variable ``PYBK_SECTION_KEY``, its key in the file,
its default. A name or a value that no option takes is an error, because it would change nothing.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pybk.errors import UsageError
from pybk.options.kinds import SHOWN_MAX
from pybk.options.rows import PREFIX, Option
from pybk.storage.io.filesystem import read_regular

DEFAULT: Final = "default"

_FILE_BYTES_MAX: Final = 1 << 20


class Setting(NamedTuple):
    """The value of an option, and its origin.

    Attributes:
        option: The option.
        value: Its value.
        origin: A flag, a variable, a file, or ``DEFAULT``.
    """

    option: Option
    value: Any
    origin: str


class ConfigFile(NamedTuple):
    """The options in a TOML file.

    Attributes:
        path: The file.
        values: Values by the names of options.
        problems: The errors in it, a sentence each; the wrong values are left out.
    """

    path: str
    values: Mapping[str, Any]
    problems: Sequence[str]


def read_file(path: str, options: Sequence[Option]) -> ConfigFile:
    """Read a TOML file of options.

    Raises:
        UsageError: It cannot be read, or is not TOML.
    """
    try:
        tables = tomllib.loads(read_regular(path, _FILE_BYTES_MAX).decode())
    except OSError as error:
        raise UsageError(
            f"{path} is to hold options in TOML, and cannot be read: {error.strerror}; name a file that this user can "
            "read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f'{path} is to hold options in TOML: {error}; it has lines such as metadata = "..." below [cluster]'
        ) from None
    values: dict[str, Any] = {}
    problems = []
    known = {option.name: option for option in options}
    for name, found in _flat(tables):
        option = known.get(name)
        if option is None or not option.in_file:
            problems.append(f"{path}: {_shown(name, found, option)}: {_no_such_key(name, option, options)}")
            continue
        try:
            values[name] = option.reader.of_toml(found)
        except ValueError:
            problems.append(f"{path}: {_shown(name, found, option)}: it takes {option.reader.takes}")
    return ConfigFile(path, values, problems)


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, found in tables.items():
        if isinstance(found, dict):
            yield from ((f"{section}.{key}", value) for key, value in found.items())
        else:
            yield section, found


def _shown(name: str, value: object, option: Option | None) -> str:
    section, _, key = name.rpartition(".")
    where = f"[{section}] {key}" if section else key
    # The value of an option that is a secret, or might be one that was misspelt, is not printed.
    hidden = option.secret if option is not None else any(word in key for word in ("secret", "password"))
    if hidden:
        return where
    try:
        return f"{where} = {str(value)[:SHOWN_MAX]!r}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"{where} = (a number that is too long)"


def _no_such_key(name: str, option: Option | None, options: Sequence[Option]) -> str:
    if option is not None and option.secret:
        return f"this file may not hold a secret; name a file that holds it, or set {option.variable}"
    if option is not None:
        return f"it concerns one start only, so it may not stand in a file; give {option.flag}"
    names = [each.name for each in options if each.in_file]
    section, _, key = name.rpartition(".")
    close = difflib.get_close_matches(name, names, 1)
    if not section:
        return "keys stand in a table, such as [bookie]"
    here = [each.rpartition(".")[2] for each in names if each.startswith(f"{section}.")]
    if not here:
        tables = dict.fromkeys(f"[{each.partition('.')[0]}]" for each in names)
        return f"there is no table [{section}]; there are {', '.join(tables)}"
    nearest = f"; did you mean {close[0].rpartition('.')[2]}?" if close else "."
    return f"there is no key {key} in [{section}]{nearest} It takes {', '.join(here)}"


def resolve(
    options: Sequence[Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: ConfigFile | None,
    *,
    variables: Iterable[str] = (),
) -> dict[str, Setting]:
    """Return the value of each option, and its origin, by the option's name.

    Args:
        options: The options.
        flags: The values of flags, by the names of options.
        environment: The environment of the process.
        file: The file.
        variables: Names of variables that are not options, although they begin like those of options.

    Raises:
        UsageError: The file or a variable has a wrong name or value; the text has all of them.
    """
    problems = list(file.problems) if file is not None else []
    found = _of_environment(options, environment, problems, frozenset(variables))
    if problems:
        raise UsageError("; ".join(problems))
    in_file, path = (file.values, file.path) if file is not None else ({}, "")
    settings = {}
    for option in options:
        name, setting = option.name, Setting(option, option.unset, DEFAULT)
        for values, origin in (in_file, path), (found, option.variable), (flags, option.flag):  # the last one counts
            if name in values:
                setting = Setting(option, tuple(values[name]) if option.count else values[name], origin)
        settings[name] = setting
    return settings


def _of_environment(
    options: Sequence[Option], environment: Mapping[str, str], problems: list[str], others: frozenset[str]
) -> dict[str, Any]:
    """Return the values that the environment has; notes in ``problems`` what is wrong there."""
    known = {option.variable: option for option in options if option.variable}
    beginnings = tuple({f"{PREFIX}_{option.section}_".upper() for option in options})
    values = {}
    for variable in sorted(environment):
        text, option = environment[variable], known.get(variable)
        if option is None:
            if variable.startswith(beginnings) and variable not in others:
                close = difflib.get_close_matches(variable, known, 1)
                nearest = f"; did you mean {close[0]}?" if close else ""
                problems.append(f"the environment has {variable}, which no option has{nearest} Unset it")
            continue
        if not text:
            continue  # as unset, so that a unit or a manifest can have the variable without a value
        try:
            values[option.name] = option.reader.of_text(text)
        except ValueError:
            problems.append(f"{variable}: {option.reader.wrong(text)}")
    return values


def missing(settings: Mapping[str, Setting]) -> list[Option]:
    """Return the options that are needed and have no value."""
    return [each.option for each in settings.values() if each.option.required and not each.value]
