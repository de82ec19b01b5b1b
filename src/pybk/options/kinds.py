"""The kinds of options that the table names, for flags and arguments, variables and TOML.

Each kind has one reader for all of them, so a time or a size is written alike everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pybk.config import BYTE_LIMITS
from pybk.credentials import cut_value
from pybk.values import INT64_MAX

SHOWN_MAX: Final = 100
"""Characters of a wrong value that its error shows."""

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


def text_of(text: object) -> str:
    """Return a text that is not empty and printable; raises ValueError for anything else."""
    if not isinstance(text, str) or not text or not text.isprintable():
        raise ValueError
    return text


def _file(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError
    return text


def _texts(name: str) -> Kind:
    def of_toml(value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError
        return tuple(map(text_of, value))

    takes = 'a list of texts, such as ["one", "two"]'
    return Kind(f"list of {name}", takes, of_toml, lambda text: of_toml([each.strip() for each in text.split(",")]))


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _one_of(*choices: str) -> Kind:
    def of_text(text: object) -> str:
        if not isinstance(text, str) or text not in choices:
            raise ValueError
        return text

    return Kind(" or ".join(choices), " or ".join(choices), of_text)


def _matched(pattern: re.Pattern[str], value: object) -> re.Match[str]:
    found = pattern.fullmatch(str(value)) if isinstance(value, str | int | float) else None
    if found is None or isinstance(value, bool):
        raise ValueError
    return found


def _within(number: Any, least: float, most: float) -> Any:
    if not least <= number <= most:
        raise ValueError
    return number


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
    return Kind("bytes", takes, lambda value: int(_within(size_of(value), least, most)))


def _time(most: float) -> Kind:
    limit = "" if most == float("inf") else f" from 0 to {most:g} s"
    takes = f"a time{limit}, such as 90, 30s, 10m, 2h or 1d"
    return Kind("seconds", takes, lambda value: float(_within(seconds_of(value), 0, most)))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError
    return float(value)


def host_and_port(text: str) -> tuple[str, int]:
    """Return the two parts of an address such as ``127.0.0.1:9464`` or ``[::1]:9464``.

    Raises:
        ValueError: It is not such an address.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or not int(port) < 1 << 16:
        raise ValueError
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError
    if not host:
        raise ValueError
    return host, int(port)


def _host_port(text: object) -> str:
    found = text_of(text)
    host_and_port(found)
    return found


def _secret(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _no_toml(value: object) -> str:
    raise ValueError


def _whole(value: object, least: int = 0) -> int:
    return int(_within(int(_matched(re.compile("[0-9]{1,19}"), value)[0]), least, INT64_MAX))


def _quorums(text: object) -> tuple[int, int, int]:
    ensemble, write, ack = map(_whole, re.split("[/,]", text_of(text)))
    if not ensemble >= write >= ack >= 1:
        raise ValueError
    return ensemble, write, ack


KINDS: Final[Mapping[str, Kind]] = {
    "text": Kind("text", "a text that is not empty", text_of),
    "url": Kind("text", "a text that is not empty", text_of),
    "path": Kind("path", "a path", text_of),
    "file": Kind("path", "the name of a file", _file),
    "secret": Kind("secret", "a secret", _no_toml, _secret),
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
    "seconds": _time(float("inf")),
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
