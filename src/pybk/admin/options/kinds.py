"""The kinds of options that the table names, for flags, variables and TOML."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pybk.config import BYTE_LIMITS
from pybk.credentials import cut_value


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of an option of a service.

    Attributes:
        name: For the table of the documents, with the unit if there is one.
        takes: What is accepted, for errors.
        of_toml: Returns the option's value of a value in TOML; raises ValueError if it is none.
        of_text: The same of a flag or a variable.
    """

    name: str
    takes: str
    of_toml: Callable[[Any], Any]
    of_text: Callable[[str], Any]


def text_of(text: object) -> str:
    """Return a text that is not empty and printable; raises ValueError for anything else."""
    if not isinstance(text, str) or not text or not text.isprintable():
        raise ValueError
    return text


def _texts(name: str) -> Kind:
    def of_toml(value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError
        return tuple(map(text_of, value))

    return Kind(
        f"list of {name}",
        'a list of texts, such as ["one", "two"]',
        of_toml,
        lambda text: of_toml([each.strip() for each in text.split(",")]),
    )


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _one_of(*choices: str) -> Kind:
    def of_text(text: object) -> str:
        if not isinstance(text, str) or text not in choices:
            raise ValueError
        return text

    return Kind(" or ".join(choices), " or ".join(choices), of_text, of_text)


_SWITCHES: Final = {"true": True, "false": False}
_UNITS: Final = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size_of(text: str) -> int:
    """Return the bytes that a text such as ``65536`` or ``64KiB`` names; raises ValueError if it names none."""
    unit = _UNITS.get(text[-3:])
    digits = text if unit is None else text[:-3].rstrip()
    if not digits.isascii() or not digits.isdecimal():
        raise ValueError
    return int(digits) * (unit or 1)


def _size(least: int, most: int) -> Kind:
    def of_toml(value: object) -> int:
        number = size_of(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
            raise ValueError
        return number

    takes = f'a number of bytes from {least} to {most}, such as {least or 1 << 20} or "64MiB"'
    return Kind("bytes", takes, of_toml, of_toml)


def _number(name: str, most: float) -> Kind:
    def of_toml(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
            raise ValueError
        return float(value)

    takes = f"a number of seconds from 0 to {most:g}" if name == "seconds" else f"a {name} to {most:g}"
    return Kind(name, takes, of_toml, lambda text: of_toml(float(text)))


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


KINDS: Final[Mapping[str, Kind]] = {
    "text": Kind("text", "a text that is not empty", text_of, text_of),
    "url": Kind("text", "a text that is not empty", text_of, text_of),
    "path": Kind("path", "a path", text_of, text_of),
    "secret": Kind("secret", "a secret", _no_toml, _secret),
    "switch": Kind("true or false", "true or false", _switch, lambda text: _switch(_SWITCHES.get(text))),
    "zstd": _one_of("zstd"),
    "host_port": Kind("HOST:PORT", "HOST:PORT, such as 127.0.0.1:9464", _host_port, _host_port),
    "addresses": _texts("addresses"),
    "directories": _texts("directories"),
    "seconds_of_hour": _number("seconds", 3_600),
    "seconds_of_day": _number("seconds", 86_400),
    "ratio": _number("ratio above 0", 0.95),
}


def kind_of(name: str, key: str) -> Kind:
    """Return a kind of an option of a service, by the name or the choices in the table, and the option's key."""
    if name == "size":
        return _size(*BYTE_LIMITS[key])
    return _one_of(*name.split(",")) if "," in name else KINDS[name or "switch"]


# ---- what arguments of commands take -------------------------------------------------------------------------------


def seconds_of(text: str) -> float:
    """Return the seconds that a text such as ``90``, ``30s``, ``10m``, ``2h`` or ``1d`` names."""
    unit = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}.get(text[-1:])
    try:
        found = float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{cut_value(text, 50)} is no time; it takes 90, 30s, 10m, 2h or 1d")
    return found


def whole_number(text: str) -> int:
    """Return the number that a text names, from 0 to 2**63 - 1."""
    number = int(text) if text.isdecimal() and text.isascii() and len(text) <= _DIGITS_MAX else -1
    if not 0 <= number < 1 << 63:
        raise argparse.ArgumentTypeError(
            f"{cut_value(text, 50)} is not a number; it takes a whole number from 0 to 2**63 - 1"
        )
    return number


_DIGITS_MAX: Final = 19

OF_TEXT: Final[Mapping[str, Callable[[str], Any]]] = {"whole": whole_number, "seconds": seconds_of, "number": float}
"""The kinds that any command may take, by name: the function of a flag's text."""
