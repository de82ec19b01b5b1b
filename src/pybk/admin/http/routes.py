"""The table of routes: made from functions, whose parameters and results are those of the interface.

A route is a function with ``@route(...)``. Its first argument is the ``View``; the others are the names in the path,
and then the parameters of the query for ``GET``, or the members of the JSON object in the body for other methods. Their
types say what is accepted, their defaults what may be left out, and the docstring what is documented. A type may be
annotated with its ``Range``, or with the ``Header`` that has the value.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

from pybk.admin.http.problems import ProblemError
from pybk.admin.http.tokens import Scope

_NAME: Final = re.compile(r"\{(\w+)\}")

_BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "false": False}

_NUMBERS: Final[Mapping[type, re.Pattern[str]]] = {
    int: re.compile(r"-?[0-9]{1,20}"),
    float: re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?"),
}
"""How a number is written in a path or a query, as in JSON: Python would also take ``1_0``, `` 1`` and other digits."""


class Range(NamedTuple):
    """The values that a number may have, or the characters that a string may have.

    Attributes:
        least: The least.
        most: The greatest.
    """

    least: int
    most: int


class Header(str):
    """The name of the header that has the value of a parameter."""

    __slots__ = ()


Place = Literal["path", "query", "body", "header"]


class Parameter(NamedTuple):
    """A parameter of a route.

    Attributes:
        name: Its name; of a header, that of the header.
        argument: The argument of the function.
        hint: Its type.
        default: What it is if it is left out; ``inspect.Parameter.empty`` if it may not be.
        place: Where it stands.
        range: Its limits; None for none.
    """

    name: str
    argument: str
    hint: Any
    default: Any
    place: Place
    range: Range | None

    @property
    def required(self) -> bool:
        """Whether it may not be left out."""
        return self.default is inspect.Parameter.empty


class Route(NamedTuple):
    """A route.

    Attributes:
        method: The method.
        template: The path, with names in braces.
        scope: What a token has to allow.
        function: What answers.
        parameters: The parameters, those in the path first, and those in headers last.
        result: The type of the result.
        cluster: Whether it exists only for clusters.
    """

    method: str
    template: str
    scope: Scope
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    result: Any
    cluster: bool

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.function.__name__

    def arguments(
        self, path: Mapping[str, str], given: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the arguments of the function.

        Args:
            path: The names in the path.
            given: The parameters of the query, strings, or the members of the body.
            headers: The headers by name in small letters.

        Raises:
            ProblemError: One is missing, unknown, of another type, or out of range.
        """
        known = {each.name for each in self.parameters if each.place in ("query", "body")}
        if unknown := sorted(given.keys() - known):
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise _bad(f"{self.method} {self.template} has no parameter {unknown[0]!r}; {takes}")
        found = {}
        for each in self.parameters:
            source: Mapping[str, Any] = {"path": path, "header": headers}.get(each.place, given)
            name = each.name.lower() if each.place == "header" else each.name
            if name in source:
                found[each.argument] = converted(each, source[name])
            elif each.required:
                raise _bad(f"{self.method} {self.template} needs the parameter {each.name!r}")
        return found


def _bad(detail: str) -> ProblemError:
    return ProblemError(HTTPStatus.BAD_REQUEST, "bad_parameter", detail)


def route(
    method: str, template: str, scope: Scope = Scope.READ, *, cluster: bool = True
) -> Callable[[Callable[..., Any]], Route]:
    """Return what makes a route of a function.

    Args:
        method: The method.
        template: The path, with names in braces.
        scope: What a token has to allow.
        cluster: Whether it exists only for clusters.
    """

    def made(function: Callable[..., Any]) -> Route:
        hints = typing.get_type_hints(function, include_extras=True)
        names = _NAME.findall(template)
        others: Place = "query" if method == "GET" else "body"
        signature = list(inspect.signature(function).parameters.values())[1:]
        parameters = [
            _parameter(each, hints[each.name], "path" if each.name in names else others) for each in signature
        ]
        ordered = tuple(sorted(parameters, key=lambda each: _ORDER[each.place]))
        return Route(method, template, scope, function, ordered, hints["return"], cluster)

    return made


_ORDER: Final[Mapping[Place, int]] = {"path": 0, "query": 1, "body": 1, "header": 2}


def _parameter(found: inspect.Parameter, hint: Any, place: Place) -> Parameter:
    """Return a parameter; what its type is annotated with says more of it."""
    said = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    plain = typing.get_args(hint)[0] if said else hint
    header = next((str(each) for each in said if isinstance(each, Header)), None)
    limits = next((each for each in said if isinstance(each, Range)), None)
    if header is not None:
        return Parameter(header, found.name, plain, found.default, "header", limits)
    return Parameter(found.name, found.name, plain, found.default, place, limits)


def converted(parameter: Parameter, value: Any) -> Any:
    """Return a value of a request as its parameter takes it; raises ProblemError for another type, or out of range."""
    accepted = typing.get_args(parameter.hint) if _is_union(parameter.hint) else (parameter.hint,)
    if value is None and type(None) in accepted:
        return None
    kind_of = _of_json if parameter.place == "body" else _of_text
    for kind in accepted:
        found = kind_of(kind, value)
        if found is not None and _in_range(found, parameter.range):
            return found
    kinds = " or ".join(_named(kind, parameter.range) for kind in accepted if kind is not type(None))
    raise _bad(f"the parameter {parameter.name!r} is {value!r:.100}; it takes {kinds}")


def _in_range(value: Any, limits: Range | None) -> bool:
    if limits is None:
        return True
    return limits.least <= (len(value) if isinstance(value, str) else value) <= limits.most


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _of_text(kind: Any, text: str) -> Any:
    """Return a text of the path, the query or a header as a value of a type; None if it is not one."""
    if typing.get_origin(kind) is tuple:
        return _all_of([_of_text(typing.get_args(kind)[0], each) for each in text.split(",")])
    if kind is bool:
        return _BOOLEANS.get(text)
    if kind in _NUMBERS:
        return kind(text) if _NUMBERS[kind].fullmatch(text) else None
    return _of_json(kind, text)


def _of_json(kind: Any, value: Any) -> Any:
    """Return a value of a JSON body as one of a type; None if it is not one."""
    if typing.get_origin(kind) is tuple:
        each = typing.get_args(kind)[0]
        return _all_of([_of_json(each, one) for one in value]) if isinstance(value, list) else None
    if typing.get_origin(kind) is Mapping:
        return value if isinstance(value, dict) else None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((each for each in kind if each.value == value), None)
    if kind in _NUMBERS:
        return _number(kind, value)
    return value if isinstance(value, kind) else None


def _all_of(found: list[Any]) -> tuple[Any, ...] | None:
    return None if None in found else tuple(found)


def _number(kind: type, value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = kind(value)
    except (ValueError, OverflowError):
        return None
    return typing.cast("int | float", found) if found == value else None


def _named(kind: Any, limits: Range | None = None) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, of which each is {_named(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is Mapping:
        return "an object"
    if issubclass(kind, Enum):
        return f"one of {', '.join(str(each.value) for each in kind)}"
    name = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
    if limits is None:
        return name
    if kind is str:
        return f"{name} of {limits.least} to {limits.most} characters"
    return f"{name} from {limits.least} to {limits.most}"
