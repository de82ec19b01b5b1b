"""The values of the interface as JSON, and the types of those values as JSON Schema.

Both follow from the type: dataclasses and named tuples are objects of their fields, enumerations their values, bytes
hexadecimal strings, tuples arrays, mappings objects. So what the interface documents is what it sends.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, Union

Schema = dict[str, Any]

_PLAIN: Final[Mapping[Any, Schema]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bytes: {"type": "string", "pattern": "^([0-9a-f]{2})*$"},
    type(None): {"type": "null"},
}
_ARRAYS: Final = (tuple, list, set, frozenset, Sequence, Collection, Iterable)


def as_json(value: Any) -> Any:
    """Return a value as ``json.dumps`` takes it."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, tuple) and (names := _names_of(type(value))):
        return {name: as_json(each) for name, each in zip(names, value, strict=True)}
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
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return dict(_PLAIN[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each, components) for each in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in _ARRAYS:
        return {"type": "array", "items": schema_of(arguments[0], components)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": schema_of(arguments[1], components)}
    if isinstance(hint, type) and _parts_of(hint) is not None:
        return _referred(hint, components)
    raise TypeError(f"values of type {hint} cannot be sent as JSON")


def _parts_of(found: type) -> Callable[[dict[str, Schema]], Schema] | None:
    """Return what makes the schema of a class; None for one without."""
    if issubclass(found, Enum):
        return lambda _: {"type": "string", "enum": [each.value for each in found]}
    if dataclasses.is_dataclass(found) or _names_of(found):
        return lambda components: _object(found, components)
    return None


def _names_of(found: Any) -> list[str]:
    """Return the names of the fields of a named tuple's class; of any other class, none."""
    try:
        return list(found._fields) if issubclass(found, tuple) else []
    except AttributeError:
        return []


def _referred(found: type, components: dict[str, Schema]) -> Schema:
    name = found.__name__
    if name not in components:
        components[name] = {}  # classes may refer to each other
        parts = _parts_of(found)
        assert parts is not None
        components[name] = parts(components)
    return {"$ref": f"#/components/schemas/{name}"}


def _object(found: Any, components: dict[str, Schema]) -> Schema:
    hints = typing.get_type_hints(found)
    names = [each.name for each in dataclasses.fields(found)] if dataclasses.is_dataclass(found) else _names_of(found)
    schema: Schema = {"type": "object", "properties": {}, "required": names}
    described = attributes_of(found.__doc__ or "")
    for name in names:
        schema["properties"][name] = schema_of(hints[name], components) | (
            {"description": described[name]} if name in described else {}
        )
    if found.__doc__:
        schema["description"] = found.__doc__.split("\n\n")[0].strip()
    return schema


def attributes_of(docstring: str) -> dict[str, str]:
    """Return what a docstring says of attributes or arguments, by name."""
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
