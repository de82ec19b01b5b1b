"""The table of routes: made from functions, whose parameters and results are those of the interface.

A route is a function with ``@route(...)``. Its first argument is the ``View``; the others are the names in the path,
the headers in ``HEADERS``, and then the parameters of the query for ``GET``, or the members of the JSON object in the
body for other methods. msgspec converts them: the types define the accepted values, with limits as ``msgspec.Meta``; a
parameter with a default may be left out; and the docstring becomes the documentation.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from functools import reduce
from http import HTTPStatus
from operator import or_
from typing import Any, Final, NamedTuple

import msgspec

from pybk.admin.http.problems import ProblemError
from pybk.admin.http.tokens import Scope

HEADERS: Final = {"if_match": "If-Match"}
"""The headers that routes take, by the names of their arguments."""

_NAME: Final = re.compile(r"\{(\w+)\}")


class Route(NamedTuple):
    """A route.

    Attributes:
        method: The method.
        template: The path, with names in braces.
        scope: The scope that a token needs.
        function: The function that answers.
        parameters: The class of its parameters, as msgspec converts and describes them.
        result: The type of the result.
        cluster: Whether it exists only for clusters.
    """

    method: str
    template: str
    scope: Scope
    function: Callable[..., Any]
    parameters: type[msgspec.Struct]
    result: Any
    cluster: bool

    def place(self, argument: str) -> str:
        """Return the place of an argument of the function: the path, a header, the query or the body."""
        if argument in _NAME.findall(self.template):
            return "path"
        return "header" if argument in HEADERS else "query" if self.method == "GET" else "body"

    def arguments(
        self, path: Mapping[str, str], given: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the arguments of the function.

        Args:
            path: The names in the path.
            given: The parameters of the query, strings, or the members of the body.
            headers: The headers by name in small letters.

        Raises:
            ProblemError: An argument is missing, unknown, of another type, or out of range.
        """
        named = {argument: headers[name] for argument, name in HEADERS.items() if name in headers}
        if given.keys() & (path.keys() | HEADERS.keys()):
            raise _bad(f"{self.method} {self.template} takes these elsewhere: {', '.join(given)}")
        try:
            found = msgspec.convert({**given, **path, **named}, self.parameters, strict=self.method != "GET")
        except msgspec.ValidationError as error:
            raise _bad(f"{self.method} {self.template}: {error}") from error
        every = msgspec.structs.asdict(found)
        return {name: value for name, value in every.items() if value is not msgspec.UNSET}


def _bad(detail: str) -> ProblemError:
    return ProblemError(HTTPStatus.BAD_REQUEST, "bad_parameter", detail)


def route(
    method: str, template: str, scope: Scope = Scope.READ, *, cluster: bool = True
) -> Callable[[Callable[..., Any]], Route]:
    """Return a decorator that makes a route of a function.

    Args:
        method: The method.
        template: The path, with names in braces.
        scope: The scope that a token needs.
        cluster: Whether it exists only for clusters.
    """

    def made(function: Callable[..., Any]) -> Route:
        hints = typing.get_type_hints(function, include_extras=True)
        arguments = list(inspect.signature(function).parameters.values())[1:]
        parameters = msgspec.defstruct(
            function.__name__,
            [_field(each, hints[each.name]) for each in arguments],
            namespace={"__doc__": function.__doc__},
            forbid_unknown_fields=True,
            kw_only=True,
        )
        return Route(method, template, scope, function, parameters, hints["return"], cluster)

    return made


def _field(argument: inspect.Parameter, hint: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    """Return the field of an argument; one that is None if it is left out is not null otherwise."""
    if argument.default is argument.empty:
        return argument.name, hint
    if argument.default is None:
        kinds = (each for each in typing.get_args(hint) if each is not type(None))
        return argument.name, reduce(or_, kinds) | msgspec.UnsetType, msgspec.UNSET
    return argument.name, hint, argument.default
