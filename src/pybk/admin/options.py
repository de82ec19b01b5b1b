"""Options of a service, each described once: its flag, its environment variable, its key in TOML, its documentation.

All four are made from the description, so that none of them can be forgotten or differ.

An option's value is the first of these that is given: its flag, its variable ``PYBK_SECTION_KEY``, its key in the file,
its default. A name or a value that no option takes is an error, because it would change nothing.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pybk.errors import UsageError
from pybk.storage.io.filesystem import read_regular

PREFIX: Final = "PYBK"
DEFAULT: Final = "default"

_FILE_BYTES_MAX: Final = 1 << 20
_SHOWN_MAX: Final = 100
"""Characters of a wrong value that its error shows."""


# ---- what an option takes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OptionType:
    """What an option takes.

    Attributes:
        name: For the table of the documents, with the unit if there is one.
        takes: What is accepted, for errors.
        of_toml: Returns the option's value of a value in TOML; raises ValueError if it is none.
        of_text: The same of a flag or a variable.
        is_list: Whether the flag may be repeated; a variable has the values separated by commas.
    """

    name: str
    takes: str
    of_toml: Callable[[object], Any]
    of_text: Callable[[str], Any]
    is_list: bool = False


def _text_of_toml(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return _text(value)


def _text(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError
    return text


def _texts_of_toml(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError
    return tuple(map(_text_of_toml, value))


def _texts(text: str) -> tuple[str, ...]:
    return tuple(_text(each.strip()) for each in text.split(","))


def _switch_of_toml(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text] if text in ("true", "false") else _switch_of_toml(text)


_UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(text: str) -> int:
    """Return the bytes that a text such as ``65536`` or ``64KiB`` names; raises ValueError if it names none."""
    unit = _UNITS.get(text[-3:])
    digits = text if unit is None else text[:-3].rstrip()
    if not digits.isascii() or not digits.isdecimal():
        raise ValueError
    return int(digits) * (unit or 1)


def _secret(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _no_toml(value: object) -> str:
    raise ValueError


TEXT: Final = OptionType("text", "a text that is not empty", _text_of_toml, _text)
SECRET: Final = OptionType("secret", "a secret", _no_toml, _secret)
PATH: Final = OptionType("path", "a path", _text_of_toml, _text)
SWITCH: Final = OptionType("true or false", "true or false", _switch_of_toml, _switch)


def texts(name: str) -> OptionType:
    """Return the type of one or more texts."""
    return OptionType(f"list of {name}", 'a list of texts, such as ["one", "two"]', _texts_of_toml, _texts, True)


def one_of(*choices: str) -> OptionType:
    """Return the type of a choice."""

    def of_text(text: object) -> str:
        if not isinstance(text, str) or text not in choices:
            raise ValueError
        return text

    return OptionType(" or ".join(choices), " or ".join(choices), of_text, of_text)


def size(least: int, most: int) -> OptionType:
    """Return the type of a number of bytes within limits."""

    def of_toml(value: object) -> int:
        number = size_of(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise ValueError
        return number

    takes = f'a number of bytes from {least} to {most}, such as {least or 1 << 20} or "64MiB"'
    return OptionType("bytes", takes, of_toml, of_toml)


def checked_text(name: str, takes: str, check: Callable[[str], object]) -> OptionType:
    """Return the type of a text that ``check`` accepts; it raises ValueError for another one."""

    def of_text(text: object) -> str:
        if not isinstance(text, str):
            raise ValueError
        check(text)
        return text

    return OptionType(name, takes, of_text, of_text)


def number(name: str, least: float, most: float) -> OptionType:
    """Return the type of a number within limits; ``name`` is its unit or kind."""

    def of_toml(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError
        return float(value)

    takes = f"a number of seconds from {least:g} to {most:g}" if name == "seconds" else f"a {name} to {most:g}"
    return OptionType(name, takes, of_toml, lambda text: of_toml(float(text)))


# ---- options -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a service.

    Attributes:
        section: Its table in TOML, and a part of its variable's name.
        key: Its key there.
        type: What it takes.
        help: What it does.
        default: Its value where none is given.
        shown_default: The default in words, if the value says nothing to people.
        flag: Its flag; the flag of an option without a name for it here is made of section and key. ``PATH`` is the
            argument without a flag; "" has none.
        metavar: What the flag takes, for ``--help``.
        required: Whether there is no service without it.
        flag_only: It is of one start, so it stands neither in a file nor in the environment.
        redacted: Returns its value without the secrets that it may contain.
    """

    section: str
    key: str
    type: OptionType
    help: str
    default: Any = None
    shown_default: str = ""
    flag: str | None = None
    metavar: str = ""
    required: bool = False
    flag_only: bool = False
    redacted: Callable[[str], str] = str

    @property
    def name(self) -> str:
        """Its name: section and key."""
        return f"{self.section}.{self.key}"

    @property
    def variable(self) -> str:
        """Its environment variable; "" if none may have it."""
        return "" if self.flag_only else f"{PREFIX}_{self.section}_{self.key}".upper()

    @property
    def shown_flag(self) -> str:
        """Its flag as people type it; "" if it has none."""
        if self.secret:
            return ""
        return f"--{self.section}-{self.key}".replace("_", "-") if self.flag is None else self.flag

    @property
    def secret(self) -> bool:
        """Whether it is a secret, so that the environment alone may have it, and it is never shown."""
        return self.type is SECRET

    @property
    def in_file(self) -> bool:
        """Whether a file may have it."""
        return not self.flag_only and not self.secret

    def shown(self, value: Any) -> str:
        """Return a value as ``config show`` and the documents have it."""
        if value is None or value == ():
            return ""
        if self.secret:
            return "(hidden)"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:g}"
        return ", ".join(value) if isinstance(value, tuple) else self.redacted(str(value))


def add_flags(command: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Add the flags of all options, in groups by section. A flag that is not given leaves no value."""
    groups: dict[str, Any] = {}
    for option in options:
        if option.shown_flag in ("", "PATH"):
            continue
        group = groups.get(option.section)
        if group is None:
            group = groups[option.section] = command.add_argument_group(f"[{option.section}]")
        settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": _help(option)}
        if option.flag_only:
            settings["action"] = "store_true"
        elif option.type is SWITCH:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = option.metavar or option.key.upper()
            settings["type"] = _of_flag(option)
            settings["action"] = "append" if option.type.is_list else "store"
        group.add_argument(option.shown_flag, **settings)


def _help(option: Option) -> str:
    default = option.shown_default or option.shown(option.default)
    notes = [f"default: {default}"] if default else []
    if option.variable:
        notes.append(f"variable: {option.variable}")
    return f"{option.help} ({'; '.join(notes)})".replace("%", "%%") if notes else option.help


def _of_flag(option: Option) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            # A list has one value for each time that its flag is given, so that the value may contain a comma.
            return _text(text) if option.type.is_list else option.type.of_text(text)
        except ValueError:
            raise argparse.ArgumentTypeError(_wrong(text, option)) from None

    return convert


def _wrong(value: object, option: Option) -> str:
    takes = f"it takes {option.type.takes}"
    return takes if option.secret else f"{str(value)[:_SHOWN_MAX]!r} is not accepted, {takes}"


# ---- where values come from ----------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """The value of an option, and where it comes from.

    Attributes:
        option: The option.
        value: Its value.
        origin: A flag, a variable, a file, or ``DEFAULT``.
    """

    option: Option
    value: Any
    origin: str


class ConfigFile(NamedTuple):
    """What a TOML file says of options.

    Attributes:
        path: The file.
        values: Values by the names of options.
        problems: What is wrong in it, a sentence each; the values in question are left out.
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
        raise UsageError(f"{path} is to hold options in TOML, and cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is to hold options in TOML: {error}") from None
    values: dict[str, Any] = {}
    problems = []
    known = {option.name: option for option in options}
    for name, found in _flat(tables):
        option = known.get(name)
        if option is None or not option.in_file:
            problems.append(f"{path}: {_shown(name, found, option)}: {_no_such_key(name, option, options)}")
            continue
        try:
            values[name] = option.type.of_toml(found)
        except ValueError:
            problems.append(f"{path}: {_shown(name, found, option)}: it takes {option.type.takes}")
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
        return f"{where} = {str(value)[:_SHOWN_MAX]!r}"
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"{where} = (a number that is too long)"


def _no_such_key(name: str, option: Option | None, options: Sequence[Option]) -> str:
    if option is not None and option.secret:
        return f"no secret stands in this file; name a file that holds it, or set {option.variable}"
    if option is not None:
        return f"it is of one start, so it stands in no file; give {option.shown_flag}"
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
    """Return the value of each option, by its name, and where it comes from.

    Args:
        options: The options.
        flags: The values of flags, by the names of options.
        environment: The environment of the process.
        file: The file.
        variables: Names of variables that mean something else, though they begin as those of options do.

    Raises:
        UsageError: The file or a variable has a wrong name or value; the text has all of them.
    """
    problems = list(file.problems) if file is not None else []
    found = _of_environment(options, environment, problems, frozenset(variables))
    if problems:
        raise UsageError("; ".join(problems))
    settings = {}
    for option in options:
        name = option.name
        if name in flags:
            value = tuple(flags[name]) if option.type.is_list else flags[name]
            settings[name] = Setting(option, value, option.shown_flag)
        elif name in found:
            settings[name] = Setting(option, found[name], option.variable)
        elif file is not None and name in file.values:
            settings[name] = Setting(option, file.values[name], file.path)
        else:
            settings[name] = Setting(option, option.default, DEFAULT)
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
            values[option.name] = option.type.of_text(text)
        except ValueError:
            problems.append(f"{variable}: {_wrong(text, option)}")
    return values


def missing(settings: Mapping[str, Setting]) -> list[Option]:
    """Return the options that have no value and are needed."""
    return [each.option for each in settings.values() if each.option.required and not each.value]


# ---- the documents -------------------------------------------------------------------------------------------------


def markdown_table(options: Sequence[Option]) -> str:
    """Return the table of all options, as the documents have it."""
    lines = ["| flag | variable | key in the file | takes | default | meaning |", "|---|---|---|---|---|---|"]
    for option in options:
        default = option.shown_default or option.shown(option.default)
        cells = (
            f"`{option.shown_flag}`" if option.shown_flag else "",
            f"`{option.variable}`" if option.variable else "",
            f"`[{option.section}]` `{option.key}`" if option.in_file else "",
            "" if option.flag_only else option.type.name,
            "needed" if option.required else default,
            option.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
