"""The values of the interface as JSON, and the types of those values as JSON Schema.

Both follow from the type: dataclasses and named tuples become objects of their fields, enumerations their values, bytes
hexadecimal strings, tuples arrays, and mappings objects. So the documented schema is that of the values sent.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, Union

import msgspec

Schema = dict[str, Any]


def as_json(value: Any) -> Any:
    """Return a value in a form that ``json.dumps`` takes."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if names := _names_of(type(value)):
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(as_json(key)): as_json(each) for key, each in value.items()}
    if isinstance(value, Iterable):
        return [as_json(each) for each in value]
    raise TypeError(f"a {type(value).__name__} cannot be sent as JSON")


def as_body(value: Any) -> bytes:
    """Return a value as the body of a response."""
    return json.dumps(as_json(value)).encode()


def schema_of(hint: Any, components: dict[str, Schema]) -> Schema:
    """Return the schema of the values of a type.

    Args:
        hint: The type, as ``typing.get_type_hints`` has it.
        components: Gets the schemas of classes, by name; the result refers to them.

    Raises:
        TypeError: Values of the type cannot be sent.
    """
    (schema,), found = msgspec.json.schema_components([_sent(hint)], ref_template="#/components/schemas/{name}")
    components.update((name, _described(each)) for name, each in found.items() if name not in components)
    return schema


def _sent(hint: Any) -> Any:
    """Return the type of the JSON that ``as_json`` makes of the values of a type."""
    if hint is bytes:
        return Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
    if isinstance(hint, type) and _names_of(hint):
        return _object(hint)
    origin, arguments = typing.get_origin(hint), tuple(map(_sent, typing.get_args(hint)))
    if not arguments or origin in (Annotated, Literal):
        return hint
    return reduce(or_, arguments) if origin in (types.UnionType, Union) else origin[arguments]


@cache
def _object(found: Any) -> type:
    """Return a class of objects with the fields of a class."""
    hints = typing.get_type_hints(found, include_extras=True)
    fields = [(name, _sent(hints[name])) for name in _names_of(found)]
    return msgspec.defstruct(found.__name__, fields, namespace={"__doc__": found.__doc__})


def _names_of(found: Any) -> list[str]:
    """Return the names of the fields of a dataclass or a named tuple; of any other class, none."""
    if dataclasses.is_dataclass(found):
        return [each.name for each in dataclasses.fields(found)]
    try:
        return list(found._fields) if issubclass(found, tuple) else []
    except AttributeError:
        return []


def _described(schema: Schema) -> Schema:
    """Return the schema of a class with what its docstring says of each attribute next to that."""
    said = schema.get("description", "")
    for name, text in attributes_of(said).items():
        if name in schema.get("properties", {}):
            schema["properties"][name]["description"] = text
    return schema | {"description": said.split("\n\n")[0].strip()} if said else schema


def attributes_of(docstring: str) -> dict[str, str]:
    """Return the texts of a docstring on attributes or arguments, by name."""
    found: dict[str, str] = {}
    name, margin = "", -1
    for line in docstring.expandtabs().splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if text in ("Attributes:", "Args:"):
            name, margin = "", indent + 4
        elif not text:
            continue
        elif indent < margin:
            margin = -1
        elif indent == margin and ": " in text:
            name, _, said = text.partition(": ")
            found[name] = said
        elif margin >= 0 and indent > margin and name:
            found[name] += f" {text}"
    return found
