"""The interface as an OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from pybk.admin.http.json_values import Schema, attributes_of, schema_of
from pybk.admin.http.problems import JSON, PROBLEM
from pybk.admin.http.routes import Parameter, Route
from pybk.admin.http.tokens import Scope
from pybk.version import __version__

_PROBLEM: Final[Schema] = {
    "type": "object",
    "description": "An error (RFC 9457).",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "A stable name of the error."},
        "detail": {"type": "string"},
        "retryable": {"type": "boolean", "description": "Whether the same request may succeed later."},
        "failures": {"type": "array", "items": {"type": "string"}, "description": "The safety checks that failed."},
        "passing": {"type": "boolean", "description": "Whether these checks pass by themselves within a minute."},
    },
    "required": ["type", "title", "status", "code", "detail", "retryable"],
}


def openapi_of(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document of routes."""
    components: dict[str, Schema] = {"Problem": _PROBLEM}
    paths: dict[str, dict[str, Any]] = {}
    for each in routes:
        paths.setdefault(each.template, {})[each.method.lower()] = _operation(each, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "pybk", "version": __version__, "summary": "The administration of a cluster or a store."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, components: dict[str, Schema]) -> dict[str, Any]:
    said = inspect.getdoc(route.function) or ""
    described = attributes_of(said)
    summary, _, rest = said.partition("\n")
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": summary,
        "responses": {
            "200": {
                "description": "Done.",
                "content": {JSON: {"schema": schema_of(route.result, components)}},
            },
            "default": {
                "description": "An error.",
                "content": {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        },
        "x-scope": route.scope.name.lower(),
    }
    if description := rest.partition("Args:")[0].strip():
        operation["description"] = description
    if route.scope is not Scope.READ:
        operation["security"] = [{"token": []}]
    in_body = [each for each in route.parameters if each.place == "body"]
    outside = [each for each in route.parameters if each.place != "body"]
    if outside:
        operation["parameters"] = [_parameter(each, described, components) for each in outside]
    if in_body:
        operation["requestBody"] = _body(in_body, described, components)
    return operation


def _schema(parameter: Parameter, components: dict[str, Schema]) -> Schema:
    found = schema_of(parameter.hint, components)
    if parameter.default not in (None, inspect.Parameter.empty):
        found["default"] = getattr(parameter.default, "value", parameter.default)
    return found


def _parameter(parameter: Parameter, described: dict[str, str], components: dict[str, Schema]) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.required,
        "description": described.get(parameter.argument, ""),
        "schema": _schema(parameter, components),
    }


def _body(parameters: list[Parameter], described: dict[str, str], components: dict[str, Schema]) -> dict[str, Any]:
    properties = {
        each.name: _schema(each, components) | {"description": described.get(each.name, "")} for each in parameters
    }
    required = [each.name for each in parameters if each.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": required}
    return {"required": bool(required), "content": {JSON: {"schema": schema}}}
