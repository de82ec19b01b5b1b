"""The table of routes: made from functions, whose parameters and results are those of the interface.

A route is a function with ``@route(...)``. Its first argument is the ``View``; the others are the names in the path,
and then the parameters of the query for ``GET``, or the members of the JSON object in the body for other methods. Their
types say what is accepted, as msgspec converts it, their defaults what may be left out, and the docstring what is
documented. A type may be annotated with its limits, ``msgspec.Meta``, or with the ``Header`` that has the value.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple

import msgspec

from pybk.admin.http.problems import ProblemError
from pybk.admin.http.tokens import Scope

_NAME: Final = re.compile(r"\{(\w+)\}")


class Header(str):
    """The name of the header that has the value of a parameter."""

    __slots__ = ()


Place = Literal["path", "query", "body", "header"]


class Parameter(NamedTuple):
    """A parameter of a route.

    Attributes:
        name: Its name; of a header, that of the header.
        argument: The argument of the function.
        hint: Its type, with its limits; of a text, which cannot be null, without None.
        default: What it is if it is left out; ``inspect.Parameter.empty`` if it may not be.
        place: Where it stands.
    """

    name: str
    argument: str
    hint: Any
    default: Any
    place: Place

    @property
    def required(self) -> bool:
        """True if it may not be left out."""
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
    """Return a parameter; what its type is annotated with may name its header."""
    header = next((str(each) for each in typing.get_args(hint)[1:] if isinstance(each, Header)), None)
    if header is not None:
        return Parameter(header, found.name, str, found.default, "header")
    if place != "body" and type(None) in typing.get_args(hint):
        (hint,) = (each for each in typing.get_args(hint) if each is not type(None))
    return Parameter(found.name, found.name, hint, found.default, place)


def converted(parameter: Parameter, value: Any) -> Any:
    """Return a value of a request as its parameter takes it; raises ProblemError for another type, or out of range."""
    try:
        return msgspec.convert(value, parameter.hint, strict=parameter.place == "body")
    except msgspec.ValidationError as error:
        raise _bad(f"the parameter {parameter.name!r} is {value!r:.100}; it takes {_takes(parameter.hint)}") from error


_NAMES: Final = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
}


def _takes(hint: Any) -> str:
    """Return what a type takes, in words."""
    (schema,), components = msgspec.json.schema_components([hint], ref_template="{name}")
    kinds = [components.get(each.get("$ref", ""), each) for each in schema.get("anyOf", [schema])]
    return " or ".join(_named(each) for each in kinds if each.get("type") != "null")


def _named(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    name = _NAMES[schema["type"]]
    if "minLength" in schema:
        return f"{name} of {schema['minLength']} to {schema['maxLength']} characters"
    return f"{name} from {schema['minimum']} to {schema['maximum']}" if "minimum" in schema else name
