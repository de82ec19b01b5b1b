"""The kinds of options that the table names, for flags and arguments, variables and TOML.

Each kind has one reader for all of them, so a time or a size is written alike everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pybk.config import BYTE_LIMITS
from pybk.credentials import cut_value
from pybk.values import INT64_MAX

T = TypeVar("T")
N = TypeVar("N", int, float)

SHOWN_MAX: Final = 100
"""Characters of a wrong value that its error shows."""

SECONDS_MAX: Final = 1e9
"""The longest time that an option takes, 31 years: timers of the system take no times without a limit."""

_WHOLE: Final = re.compile("[0-9]{1,19}")
_BYTES: Final = re.compile(r"([0-9]{1,19}) ?(?:([KMGT])iB|([kmgt]))?")
_TIME: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?|\.[0-9]{1,15})([smhd]?)")
_SECONDS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of an option.

    Attributes:
        name: The name in the table of the documents, with the unit if it has one.
        takes: The accepted values, for errors.
        of_toml: Returns the option's value for a value in TOML; raises ValueError for a wrong one.
        other_text: The same for the text of a flag or a variable, if that has another form than in TOML.
    """

    name: str
    takes: str
    of_toml: Callable[[Any], Any]
    other_text: Callable[[str], Any] | None = None

    def of_text(self, text: str) -> Any:
        """Return the option's value for the text of a flag or a variable; raises ValueError for a wrong one."""
        return (self.other_text or self.of_toml)(text)

    def wrong(self, value: object) -> str:
        """Return the error for a value that is not accepted; the value of a secret is not shown."""
        takes = f"it takes {self.takes}"
        return takes if self is KINDS["secret"] else f"{cut_value(value, SHOWN_MAX)} is not accepted, {takes}"


def _accepted(value: T, accepted: object) -> T:
    """Return a value that is accepted; raises ValueError for another one."""
    if not accepted:
        raise ValueError
    return value


def text_of(text: Any) -> str:
    """Return a text that is not empty and printable; raises ValueError for anything else."""
    return str(_accepted(text, isinstance(text, str) and text and text.isprintable()))


def _file(text: Any) -> str:
    return str(_accepted(text, isinstance(text, str) and text))


def _texts(name: str) -> Kind:
    def of_toml(value: Any) -> tuple[str, ...]:
        return tuple(map(text_of, _accepted(value, isinstance(value, list) and value)))

    takes = 'a list of texts, such as ["one", "two"]'
    return Kind(f"list of {name}", takes, of_toml, lambda text: of_toml([each.strip() for each in text.split(",")]))


def _switch(value: object) -> bool:
    return bool(_accepted(value, isinstance(value, bool)))


def _one_of(*choices: str) -> Kind:
    named = " or ".join(choices)
    return Kind(named, named, lambda text: str(_accepted(text, text in choices)))


def _matched(pattern: re.Pattern[str], value: object) -> re.Match[str]:
    found = pattern.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if found is None or isinstance(value, bool):
        raise ValueError
    return found


def _within(number: N, least: float, most: float) -> N:
    return _accepted(number, least <= number <= most)


def size_of(value: object) -> int:
    """Return the bytes that a number or a text names, such as ``65536``, ``64KiB`` or ``64k``; raises ValueError."""
    number, unit, short = _matched(_BYTES, value).groups()
    return int(number) << 10 * " KMGT".index((unit or short or " ").upper())


def seconds_of(value: object) -> float:
    """Return the seconds that a number or a text names, such as ``90``, ``30s`` or ``2h``; raises ValueError."""
    number, unit = _matched(_TIME, value).groups()
    return float(number) * _SECONDS[unit]


def _size(least: int, most: int) -> Kind:
    takes = f'a number of bytes from {least} to {most}, such as {least or 1 << 20} or "64MiB"'
    return Kind("bytes", takes, lambda value: _within(size_of(value), least, most))


def _time(most: float) -> Kind:
    takes = f"a time from 0 to {most:.0f} s, such as 90, 30s, 10m, 2h or 1d"
    return Kind("seconds", takes, lambda value: _within(seconds_of(value), 0, most))


def _number(value: Any) -> float:
    return float(_accepted(value, isinstance(value, str | int | float) and not isinstance(value, bool)))


def host_and_port(text: str) -> tuple[str, int]:
    """Return the two parts of an address such as ``127.0.0.1:9464`` or ``[::1]:9464``.

    Raises:
        ValueError: It is not such an address.
    """
    given, _, port = text.rpartition(":")
    host = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    _accepted(port, port.isascii() and port.isdecimal() and int(port) < 1 << 16)
    return _accepted(host, host and (host != given or ":" not in host)), int(port)


def _host_port(text: object) -> str:
    found = text_of(text)
    host_and_port(found)
    return found


def _whole(value: object, least: int = 0) -> int:
    return _within(int(_matched(_WHOLE, value)[0]), least, INT64_MAX)


def _quorums(text: object) -> tuple[int, int, int]:
    ensemble, write, ack = map(_whole, re.split("[/,]", text_of(text)))
    return _accepted((ensemble, write, ack), ensemble >= write >= ack >= 1)


KINDS: Final[Mapping[str, Kind]] = {
    "text": Kind("text", "a text that is not empty", text_of),
    "url": Kind("text", "a text that is not empty", text_of),
    "path": Kind("path", "a path", text_of),
    "file": Kind("path", "the name of a file", _file),
    "secret": Kind("secret", "a secret", lambda _: _accepted("", None), _file),
    "switch": Kind(
        "true or false", "true or false", _switch, lambda text: _switch({"true": True, "false": False}.get(text))
    ),
    "zstd": _one_of("zstd"),
    "host_port": Kind(
        "HOST:PORT",
        "HOST:PORT with a port from 1 to 65535, or 0 for any that is free, such as 127.0.0.1:9464",
        _host_port,
    ),
    "addresses": _texts("addresses"),
    "directories": _texts("directories"),
    "whole": Kind("whole number", "a whole number from 0 to 2**63 - 1", _whole),
    "positive": Kind("whole number", "a whole number from 1 to 2**63 - 1", lambda value: _whole(value, 1)),
    "bytes": _size(0, INT64_MAX),
    "seconds": _time(SECONDS_MAX),
    "seconds_of_hour": _time(3_600),
    "seconds_of_day": _time(86_400),
    "number": Kind("number", "a number", _number),
    "ratio": Kind("ratio above 0", "a ratio above 0 to 0.95", lambda value: _within(_number(value), 0, 0.95)),
    "quorums": Kind("E/W/A", "E/W/A, from E down, such as 3/2/2", _quorums),
}


def kind_of(name: str, key: str = "") -> Kind:
    """Return a kind, by the name or the choices in the table, and the key of an option of a service."""
    if name == "size":
        return _size(*BYTE_LIMITS[key])
    return _one_of(*name.split(",")) if "," in name else KINDS[name or "switch"]
