"""The interface as an OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from pybk.admin.http.json_values import Schema, schema_of
from pybk.admin.http.problems import JSON, PROBLEM, Problem
from pybk.admin.http.routes import HEADERS, Route
from pybk.admin.http.tokens import Scope
from pybk.version import __version__


def openapi_of(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the document of routes."""
    components: dict[str, Schema] = {}
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
    summary, _, rest = (inspect.getdoc(route.function) or "").partition("\n")
    error = {PROBLEM: {"schema": schema_of(Problem, components)}}
    operation: dict[str, Any] = {
        "operationId": route.function.__name__,
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {JSON: {"schema": schema_of(route.result, components)}}},
            "default": {"description": "An error.", "content": error},
        },
        "x-scope": route.scope.name.lower(),
        **_parameters(route, components),
    }
    if description := rest.partition("Args:")[0].strip():
        operation["description"] = description
    if route.scope is not Scope.READ:
        operation["security"] = [{"token": []}]
    return operation


def _parameters(route: Route, components: dict[str, Schema]) -> dict[str, Any]:
    """Return what an operation says of its parameters, and of its body."""
    schema_of(route.parameters, components)
    schema = components.pop(route.parameters.__name__)
    properties, needed = schema["properties"], schema["required"]
    outside = [
        {
            "name": HEADERS.get(name, name),
            "in": route.place(name),
            "required": name in needed,
            "description": properties[name].pop("description", ""),
            "schema": properties.pop(name),
        }
        for name in list(properties)
        if route.place(name) != "body"
    ]
    found: dict[str, Any] = {"parameters": outside} if outside else {}
    if properties:
        needed = [name for name in needed if name in properties]
        body = {"type": "object", "properties": properties, "additionalProperties": False, "required": needed}
        found["requestBody"] = {"required": bool(needed), "content": {JSON: {"schema": body}}}
    return found
