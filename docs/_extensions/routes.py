"""The directive ``http-routes``: routes with parameters and results, from the OpenAPI document of the interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from argument_texts import escaped
from sphinx.util.docutils import SphinxDirective

from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.admin.http.openapi import openapi_of

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

Schema = Mapping[str, Any]

_METHODS: Final = ("get", "post")


def takes_of(schema: Schema | bool) -> str:
    """Return what a value is, in Markdown."""
    if isinstance(schema, bool):
        return "any value"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(takes_of(each) for each in schema["anyOf"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {takes_of(schema.get('items', {}))}"
    if isinstance(kind, list):
        kind = " or ".join(kind)
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, Mapping):
        return f"object of {takes_of(values)}"
    least, most = schema.get("minimum", schema.get("minLength")), schema.get("maximum", schema.get("maxLength"))
    if least is None or most is None:
        return str(kind)
    return f"{kind} of {least} to {most} characters" if kind == "string" else f"{kind}, {least} to {most}"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield a table in Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def of_route(method: str, path: str, operation: Schema) -> Iterator[str]:
    """Yield the section of a route."""
    yield from (f"### {method.upper()} {escaped(path)}", "")
    yield from (f"{operation['summary']} Scope: `{operation['x-scope']}`.", "")
    if "description" in operation:
        yield from (operation["description"].replace("``", "`"), "")
    rows = []
    for each in operation.get("parameters", ()):
        default = "required" if each["required"] else _default(each["schema"])
        rows.append((f"`{each['name']}`", each["in"], takes_of(each["schema"]), default, each["description"]))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for name, schema in body.get("properties", {}).items():
        default = "required" if name in body["required"] else _default(schema)
        rows.append((f"`{name}`", "body", takes_of(schema), default, schema["description"]))
    if rows:
        yield from table(("parameter", "in", "takes", "default", "meaning"), [tuple(map(_cell, row)) for row in rows])
    found = operation["responses"]["200"]["content"]["application/json"]["schema"]
    yield from (f"Returns: {takes_of(found)}.", "")


def of_object(name: str, schema: Schema) -> Iterator[str]:
    """Yield the section of an object of results."""
    yield from (f"### {name}", "")
    if "description" in schema:
        yield from (schema["description"].replace("``", "`"), "")
    if "enum" in schema:
        yield from (f"{takes_of(schema)}.", "")
    members = schema.get("properties", {})
    rows = [(f"`{key}`", takes_of(each), each.get("description", "")) for key, each in members.items()]
    if rows:
        yield from table(("member", "is", "meaning"), [tuple(map(_cell, row)) for row in rows])


def _default(schema: Schema) -> str:
    return f"`{schema['default']}`" if schema.get("default") not in (None, "") else "none"


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


class HttpRoutes(SphinxDirective):
    """Document all routes, and the objects that they return."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each."""
        document = openapi_of((*ROUTES, *OWN_ROUTES))
        lines = ["## The routes", ""]
        for path, operations in document["paths"].items():
            for method in _METHODS:
                if method in operations:
                    lines += of_route(method, path, operations[method])
        lines += ["## The objects", ""]
        for name, schema in document["components"]["schemas"].items():
            lines += of_object(name, schema)
        return self.parse_text_to_nodes("\n".join(lines) + "\n", allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("http-routes", HttpRoutes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
