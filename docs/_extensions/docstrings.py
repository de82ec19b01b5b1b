"""Docstrings as reference entries: links where they name what is public, and fields for threads, cost and the like."""

from __future__ import annotations

import builtins
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from importlib import import_module
from inspect import Signature, isclass, isfunction, signature
from types import GenericAlias, UnionType
from typing import TYPE_CHECKING, Any, Final

from docutils import nodes
from external import elsewhere
from public_api import MODULES, alias_of, names_of, with_fields
from sphinx.addnodes import pending_xref
from sphinx.ext.autodoc.mock import mock
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

import pybk

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_LITERAL: Final = re.compile(r"(?<![`\w])``([A-Za-z_][\w.]*)(\(\))?``(?![`\w])")
_ERROR: Final = re.compile(r"(?<![`\w.~<])([A-Z]\w+Error)\b(?![`>])")
_RAISES: Final = re.compile(r" +[A-Z]\w+Error(, \w+)*: ")
_DOCUMENT: Final = re.compile(r"``docs/([\w/-]+)\.md``|\bdocs/([\w/-]+)\.md\b")
_CONSTRUCTED_BY_PYBK: Final = re.compile(r"Use ``\w+|Made by|Internal")

_SHARED: Final = ("BlobWriter", "NamedList", "PieceWriter", "RecordWriter", "_Section")
"""Base classes that are not public, whose members stand with the classes that inherit them."""

_ONE_LINERS: Final = ("attribute", "data", "property")
_COLON: Final = re.compile(r":(?= )")
_HIDDEN: Final = "\N{RATIO}"
"""Stands for the colon of a sentence until napoleon is done, which takes what comes before one for a type."""

MOCKED: Final = ("pandas", "pyarrow", "pyspark")
"""What ``pybk.spark`` needs, and the site does without."""


class Known:
    """The full names of all that the reference has an entry for, and the objects."""

    def __init__(self) -> None:
        self.by_name: dict[str, object] = {}
        self.errors: dict[str, str] = {}
        self.classes: dict[str, str] = {}
        """The full names of classes and of aliases of types, by their own names."""
        with mock(list(MOCKED)):
            for module in MODULES:
                for name in names_of(module):
                    self._add(f"{module}.{name}", getattr(import_module(module), name))

    def _add(self, full: str, value: Any) -> None:
        self.by_name.setdefault(full, value)
        if not isfunction(value):
            self.classes[full.rpartition(".")[2]] = full
        if not isclass(value):
            return
        if issubclass(value, BaseException):
            self.errors[full.rpartition(".")[2]] = full
        shared = [vars(base) for base in value.__mro__ if base.__name__ in _SHARED]
        for name, member in (*vars(value).items(), *(pair for each in shared for pair in each.items())):
            documented = isfunction(member) or isinstance(member, property | classmethod | staticmethod | Enum)
            if not name.startswith("_") and documented:
                self.by_name.setdefault(f"{full}.{name}", member)

    def target(self, text: str, within: str) -> str:
        """Return the full name that a name in the docstring of ``within`` stands for; empty if it is none of these."""
        parts = within.split(".")
        places = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        if text in self._arguments(within):
            return ""
        for full in (*(f"{place}.{text}" for place in places), f"pybk.{text}", text):
            if full in self.by_name and full != within:
                return full
        return ""

    def _arguments(self, within: str) -> set[str]:
        found: set[str] = set()
        for full in (within, within.rpartition(".")[0]):
            value: Any = self.by_name.get(full)
            with suppress(TypeError, ValueError):
                found |= set(signature(getattr(value, "__func__", value)).parameters)
        return found

    def linked(self, line: str, within: str) -> str:
        """Return a line of a docstring with links to what it names."""

        def link(match: re.Match[str]) -> str:
            target = self.target(match[1], within)
            return f":py:obj:`{match[1]}{match[2] or ''} <{target}>`" if target else match[0]

        def error(match: re.Match[str]) -> str:
            target = self.errors.get(match[1], "")
            return f":py:exc:`{match[1]} <{target}>`" if target not in ("", within) else match[0]

        line = _DOCUMENT.sub(lambda match: f":doc:`/{match[1] or match[2]}`", line)
        line = _LITERAL.sub(link, line)
        return line if _RAISES.match(line) else _ERROR.sub(error, line)


def known_of(app: Sphinx) -> Known:
    """Return what the reference has entries for; found out once a build."""
    found: Known | None = getattr(app, "pybk_known", None)
    if found is None:
        found = app.pybk_known = Known()  # type: ignore[attr-defined]
    return found


def _process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    known = known_of(app)
    if what == "exception":
        lines[:] = without_constructor(lines)
    lines[:] = with_fields([known.linked(line, name) for line in lines])
    if what in _ONE_LINERS and lines:
        lines[0] = _COLON.sub(_HIDDEN, lines[0])


def _restore(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    shown = [line.replace(_HIDDEN, ":") for line in lines]
    lines[:] = with_types(shown, obj) if what in ("class", "exception") else shown


def with_types(lines: list[str], kind: Any) -> list[str]:
    """Return what napoleon made of the docstring of a class, with the types of attributes as the source has them."""
    made = []
    for line in lines:
        if line.startswith("   :type: "):
            continue
        made.append(line)
        if line.startswith(".. attribute:: "):
            annotation = _annotations(kind).get(line.removeprefix(".. attribute:: "))
            made += [f"   :type: {annotation}"] if annotation else []
    return made


def _annotations(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
            text = text.removeprefix("Final[").removesuffix("]") if text.startswith("Final[") else text
            found[name] = spelled(text, vars(sys.modules[base.__module__]))
    return found


def spelled(annotation: str, home: Mapping[str, object]) -> str:
    """Return an annotation in which aliases that are not public are replaced by what they stand for."""

    def spell(match: re.Match[str]) -> str:
        value = home.get(match[0])
        if not isinstance(value, GenericAlias | UnionType) or getattr(pybk, match[0], None) is value:
            return match[0]
        text = repr(value).replace("collections.abc.", "").replace("typing.", "")
        return match[0] if "." in text.replace("...", "") else text

    return re.sub(r"(?<![.\w])\w+", spell, annotation)


def without_constructor(lines: list[str]) -> list[str]:
    """Return the docstring of an error with its own attributes alone, because nobody but pybk makes one."""
    made: list[str] = []
    section, dropped = "", False
    for line in lines:
        if line and not line.startswith(" "):
            section, dropped = line, False
        elif section == "Args:" and re.match(r" {4}\w+: ", line):
            dropped = line.strip().startswith(("message:", "outcome_unknown:"))
        elif not line:
            dropped = False
        if not dropped:
            made.append("Attributes:" if line == "Args:" else line)
    empty = [i for i, line in enumerate(made) if line == "Attributes:" and not "".join(made[i + 1 : i + 2])]
    return [line for i, line in enumerate(made) if i not in empty]


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: object, arguments: str | None, returned: str | None
) -> tuple[str, str] | None:
    """Return a signature as the source has it, without what applications do not pass.

    Sphinx evaluates annotations, so that aliases such as ``Tiers`` would be replaced by what they stand for.
    """
    if arguments is None or what not in ("class", "exception", "function", "method"):
        return None
    if what == "exception" or (what == "class" and not _is_made_by_users(app, obj)):
        return "", ""
    try:
        found = signature(obj)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    if what == "class":
        found = found.replace(return_annotation=Signature.empty)
    home = vars(sys.modules[obj.__module__])
    shown = [
        each.replace(default=_Default(each.default), annotation=spelled(each.annotation, home))
        if isinstance(each.annotation, str)
        else each.replace(default=_Default(each.default))
        for each in parameters
    ]
    text = stringify_signature(found.replace(parameters=shown), unqualified_typehints=True)
    taken, arrow, back = text.rpartition(" -> ")
    return (taken, back) if arrow else (text, "")


class _Default:
    """A default value, with a ``repr`` that is Python."""

    def __new__(cls, value: object) -> Any:
        """Leave a parameter without a default without one."""
        return value if value is Signature.empty else super().__new__(cls)

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, Enum):
            return f"{type(self._value).__name__}.{self._value.name}"
        if not self._value and isinstance(self._value, Mapping):
            return "{}"
        text = repr(self._value)
        return "..." if text.startswith("<") else text


def _is_made_by_users(app: Sphinx, kind: type) -> bool:
    """Return whether applications make objects of a class: not of protocols, and not from what is not public."""
    if issubclass(kind, Enum) or getattr(kind, "_is_protocol", False) or hasattr(kind, "__total__"):
        return False
    if _CONSTRUCTED_BY_PYBK.match(vars(kind).get("__init__", object).__doc__ or ""):
        return False
    public = known_of(app).by_name.values()
    home = vars(sys.modules[kind.__module__])
    for name in re.findall(r"\w+", str(signature(kind))):
        found = home.get(name)
        if isclass(found) and found.__module__.startswith("pybk.") and not any(found is each for each in public):
            return False
    return True


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: object) -> bool | None:
    """Leave out what named tuples say of their fields, and members of enums are not left out."""
    doc = getattr(obj, "__doc__", None) or ""
    if doc.startswith("Alias for field number"):
        return True
    if isinstance(obj, Enum) and not name.startswith("_"):
        return False
    return None


def _exact(app: Sphinx, doctree: nodes.document) -> None:
    """Have types be looked up by their whole names, or ``bytes`` would be any attribute of that name."""
    named = known_of(app).classes
    for node in list(doctree.findall(pending_xref)):
        if node.get("refdomain") == "py" and node.get("reftype") in ("class", "obj", "exc"):
            target = str(node.get("reftarget"))
            node.attributes.pop("refspecific", None)
            if target in named:
                node["reftarget"] = named[target]
            elif isclass(getattr(builtins, target, None)):
                node.replace_self(nodes.Text(target))


class TypeAlias(SphinxDirective):
    """Document a public alias of a type, such as ``pybk.Payload``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the entry of the alias."""
        full = self.arguments[0]
        name = full.rpartition(".")[2]
        value, text = alias_of(name)
        known = known_of(self.env.app)
        described = [known.linked(line.strip(), full) for line in text.strip().splitlines()]
        lines = [f".. py:type:: {full}", f"   :canonical: {value}", "", *(f"   {line}" for line in described), ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Rst(SphinxDirective, ABC):
    """A directive whose content is made as text of reST, to be used in an ``eval-rst`` block."""

    @abstractmethod
    def text(self) -> Iterator[str]:
        """Yield the lines."""

    def run(self) -> list[nodes.Node]:
        """Return what the lines are parsed to."""
        return self.parse_text_to_nodes("\n".join(self.text()) + "\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive and the handlers to Sphinx."""
    app.add_directive("type-alias", TypeAlias)
    app.connect("autodoc-process-docstring", _process, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _restore, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-read", _exact)
    app.connect("missing-reference", elsewhere)
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
