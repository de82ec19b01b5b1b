"""The directives ``settings`` and ``bookie-options``: settings with unit, default and effect, from the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

from docstrings import Rst, known_of
from docutils.parsers.rst import directives
from public_api import arguments_in

from pybk.config import BYTE_LIMITS
from pybk.options.bookie import OPTIONS

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIMES: Final = ((365 * 86_400, "year"), (86_400, "day"), (3_600, "hour"), (60, "minute"))
_DEFAULT: Final = re.compile(r" Default (?:[^.;]|\.\d)+\.(?= |$)")
_ANY_BYTES: Final = 1 << 60


def found(path: str) -> Any:
    """Return the object that a dotted name such as ``pybk.Log.writer`` leads to."""
    module, *names = path.split(".")
    value = import_module(module)
    for name in names:
        value = getattr(value, name)
    return value


def size(number: int) -> str:
    """Return a number of bytes as people write it."""
    for unit, name in _UNITS:
        if number and number % unit == 0:
            return f"{number // unit} {name}"
    return str(number)


def duration(seconds: float) -> str:
    """Return seconds, and what they are in larger units."""
    for unit, name in _TIMES:
        if seconds and seconds % unit == 0:
            count = int(seconds // unit)
            return (
                f"{seconds:g} ({count} {name}{'s' * (count > 1)})"
                if seconds < 1e6
                else f"{count} {name}{'s' * (count > 1)}"
            )
    return f"{seconds:g}"


class Setting:
    """One setting: its name, what it takes, its default and its effect."""

    def __init__(
        self, name: str, annotation: str, default: object, text: str, limits: tuple[float, float] | None
    ) -> None:
        self.name = name
        self.default_value = default
        self.unit = unit_of(name, annotation, text)
        self.limits = limits
        self.annotation = annotation
        self.text = _DEFAULT.sub("", text)

    @property
    def takes(self) -> str:
        """What it takes, with the unit and the range."""
        what = self.unit or f"``{self.annotation}``"
        if self.limits is None:
            return what
        least, most = (self._shown(each) for each in self.limits)
        if self.limits[1] < _ANY_BYTES:
            return f"{what}, {least} to {most}"
        return f"{what}, at least {least}" if self.limits[0] else what

    @property
    def default(self) -> str:
        """The default, in words."""
        value = self.default_value
        if isinstance(value, str) and value.startswith("="):
            return value[1:]
        if value is inspect.Parameter.empty or value is MISSING:
            return "required"
        if isinstance(value, Enum):
            return f"``{type(value).__name__}.{value.name}``"
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self._shown(value)
        return f"``{value!r}``"

    def _shown(self, value: float) -> str:
        if self.unit.startswith("bytes"):
            return size(int(value))
        return duration(value) if self.unit == "seconds" else f"{value:g}"


def unit_of(name: str, annotation: str, text: str) -> str:
    """Return the unit of a setting, or what it takes; empty for one that its type describes."""
    if annotation == "bool":
        return "true or false"
    if "per_second" in name:
        return "bytes per second"
    if name.endswith("_ns"):
        return "nanoseconds since 1970"
    if name.endswith("bytes") or "_bytes_" in name or text.startswith("Bytes "):
        return "bytes"
    if name.endswith(("_s", "_seconds")) or text.startswith("Seconds "):
        return "seconds"
    if name in ("fill_ratio", "hold_below"):
        return "a share, 0 to 1"
    return {"int": "a number", "str": "a text", "int | None": "a number, or None"}.get(annotation, "")


def settings_of(source: Any, names_from: Any = None, defaults: Mapping[str, str] | None = None) -> list[Setting]:
    """Return the settings that a class of options has, or a function takes.

    Args:
        source: The class or the function.
        names_from: The class of keyword arguments to which the settings of a function are restricted.
        defaults: Defaults in words, by name, which the code does not show.
    """
    texts = arguments_in(inspect.getdoc(source) or "")
    limits: Mapping[str, tuple[float, float]] = getattr(source, "limits", BYTE_LIMITS)
    if is_dataclass(source):
        known = {each.name: (str(each.type), each.default) for each in fields(source)}
    elif hasattr(source, "__total__"):
        known = {name: (_bare(of), inspect.Parameter.empty) for name, of in source.__annotations__.items()}
    else:
        parameters = inspect.signature(source.__init__ if inspect.isclass(source) else source).parameters.values()
        known = {each.name: (str(each.annotation), each.default) for each in parameters if _is_named(each)}
    if names_from is not None:
        known = {name: known[name] for name in names_from.__annotations__}
    for name, words in (defaults or {}).items():
        known[name] = (known[name][0], f"={words}")
    return [
        Setting(name, annotation, default, texts.get(name, ""), limits.get(name))
        for name, (annotation, default) in known.items()
    ]


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def _bare(annotation: Any) -> str:
    text = annotation.__forward_arg__ if hasattr(annotation, "__forward_arg__") else str(annotation)
    return ast.unparse(ast.parse(text, mode="eval"))


class Settings(Rst):
    """List the settings of a class of options, or the arguments of a function.

    The content has defaults that the code does not show, ``name: default`` a line.
    """

    required_arguments = 1
    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"prefix": directives.unchanged, "of": directives.unchanged}

    def text(self) -> Iterator[str]:
        """Yield a table."""
        full = self.arguments[0]
        known = known_of(self.env.app)
        defaults = dict(line.split(": ", 1) for line in self.content if line)
        of = self.options.get("of")
        yield from table("setting", "takes", "default", "effect")
        for each in settings_of(found(full), found(of) if of else None, defaults):
            name = f"``{self.options.get('prefix', '')}{each.name}``"
            yield from row(name, *(known.linked(cell, full) for cell in (each.takes, each.default, each.text)))


class BookieOptions(Rst):
    """List the options of a bookie by variable, with unit, default and effect."""

    def text(self) -> Iterator[str]:
        """Yield a table."""
        yield from table("variable", "takes", "default", "effect")
        for option in OPTIONS:
            if option.variable:
                default = "required" if option.required else option.shown_default
                text = default.replace("`", "``")
                yield from row(f"``{option.variable}``", option.reader.name, text, option.help)


def table(*heads: str) -> Iterator[str]:
    """Yield the beginning of a table in reST."""
    yield from (".. list-table::", "   :header-rows: 1", "   :class: settings", "")
    yield from row(*heads)


def row(*cells: str) -> Iterator[str]:
    """Yield a row of a table."""
    for number, cell in enumerate(cells):
        yield f"   {'* -' if number == 0 else '  -'} {cell}".rstrip()


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives to Sphinx."""
    app.add_directive("settings", Settings)
    app.add_directive("bookie-options", BookieOptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
