"""The table of routes: made from functions, whose parameters and results are those of the interface.

A route is a function with ``@route(...)``. Its first argument is the ``View``; the others are the names in the path,
and then the parameters of the query for ``GET``, or the members of the JSON object in the body for other methods. Their
types say what is accepted, their defaults what may be left out, and the docstring what is documented.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Union

from pybk.admin.http.problems import ProblemError

_NAME: Final = re.compile(r"\{(\w+)\}")

_BOOLEANS: Final[Mapping[str | bool, bool]] = {"true": True, "false": False, True: True, False: False}


class Scope(IntEnum):
    """What a token allows, each with all before it.

    ``READ``: to look. ``OPERATE``: to change what can be taken back, such as a pause or a drain. ``ADMIN``: everything.
    """

    READ = 0
    OPERATE = 1
    ADMIN = 2


class Parameter(NamedTuple):
    """A parameter of a route.

    Attributes:
        name: Its name.
        hint: Its type.
        default: What it is if it is left out; ``inspect.Parameter.empty`` if it may not be.
        in_path: Whether it stands in the path.
    """

    name: str
    hint: Any
    default: Any
    in_path: bool

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
        parameters: The parameters, those in the path first.
        result: The type of the result.
        pattern: What paths match.
        cluster: Whether it exists only for clusters.
    """

    method: str
    template: str
    scope: Scope
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    result: Any
    pattern: re.Pattern[str]
    cluster: bool

    @property
    def operation(self) -> str:
        """The name of the operation."""
        return self.function.__name__

    def arguments(self, path: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the function.

        Args:
            path: The names in the path.
            given: The parameters of the query, strings, or the members of the body.

        Raises:
            ProblemError: One is missing, unknown, or of another type.
        """
        known = {each.name for each in self.parameters if not each.in_path}
        if unknown := sorted(given.keys() - known):
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise _bad(f"{self.method} {self.template} has no parameter {unknown[0]!r}; {takes}")
        found = {}
        for each in self.parameters:
            source: Mapping[str, Any] = path if each.in_path else given
            if each.name in source:
                found[each.name] = converted(each, source[each.name])
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
        hints = typing.get_type_hints(function)
        names = _NAME.findall(template)
        signature = list(inspect.signature(function).parameters.values())[1:]
        parameters = [Parameter(each.name, hints[each.name], each.default, each.name in names) for each in signature]
        escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
        pattern = re.compile(_NAME.sub(r"(?P<\1>[^/:]+)", escaped))
        ordered = tuple(sorted(parameters, key=lambda each: not each.in_path))
        return Route(method, template, scope, function, ordered, hints["return"], pattern, cluster)

    return made


def converted(parameter: Parameter, value: Any) -> Any:
    """Return a value of the query or of a JSON body as its parameter takes it; raises ProblemError for another type."""
    accepted = typing.get_args(parameter.hint) if _is_union(parameter.hint) else (parameter.hint,)
    if value is None and type(None) in accepted:
        return None
    for kind in accepted:
        found = _as(kind, value)
        if found is not None:
            return found
    kinds = " or ".join(_named(kind) for kind in accepted if kind is not type(None))
    raise _bad(f"the parameter {parameter.name!r} is {value!r:.100}; it takes {kinds}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (Union, types.UnionType)


def _as(kind: Any, value: Any) -> Any:
    """Return a value as one of a type; None if it is not one."""
    if typing.get_origin(kind) is tuple:
        (each, _) = typing.get_args(kind)
        values = value.split(",") if isinstance(value, str) else value
        if not isinstance(values, list):
            return None
        found = [_as(each, value) for value in values]
        return None if None in found else tuple(found)
    if typing.get_origin(kind) is Mapping:
        return value if isinstance(value, dict) else None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((each for each in kind if each.value == value), None)
    if kind is bool:
        return _BOOLEANS.get(value) if isinstance(value, str | bool) else None
    if kind is str:
        return value if isinstance(value, str) else None
    if kind in (int, float):
        return _number(kind, value)
    return None


def _number(kind: type, value: Any) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        found = kind(value)
    except (ValueError, OverflowError):
        return None
    exact = isinstance(value, str) or found == value
    return typing.cast("int | float", found) if exact else None


def _named(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"a list, of which each is {_named(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is Mapping:
        return "an object"
    if issubclass(kind, Enum):
        return f"one of {', '.join(str(each.value) for each in kind)}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[kind]
