"""The document of the interface: valid, and about what is really sent."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from pybk import ClusterAdmin, Log
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.admin.http.json_values import as_json, schema_of
from pybk.admin.http.openapi import openapi_of
from pybk.admin.http.tokens import Scope
from pybk.admin.http.view import View
from tests.cluster.inside import inside
from tests.paths import ROOT


def test_the_document_is_valid_and_says_what_each_part_is() -> None:
    document = openapi_of(ROUTES)
    OpenAPIV31SpecValidator(document).validate()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], path
            for parameter in operation.get("parameters", ()):
                assert parameter["description"], (path, parameter["name"])
            assert (method == "get") == (operation["x-scope"] == "read"), "what changes something needs a right"
    names = [each.function.__name__ for each in ROUTES]
    assert len(names) == len(set(names))


def test_the_document_has_the_limits_that_are_checked() -> None:
    paths = openapi_of(ROUTES)["paths"]

    def query(path: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(
            each["schema"] for each in paths[f"/api/v1/{path}"]["get"]["parameters"] if each["name"] == name
        )
        return found

    id_max = 2**63 - 1
    assert query("ledgers", "limit") == {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}
    assert query("ledgers", "after") == {"type": "integer", "minimum": -1, "maximum": id_max, "default": -1}
    assert query("ledgers", "ledger_type") == {"type": "string"}, "what is left out is not null"
    assert query("logs", "limit")["maximum"] == 200
    assert query("series", "since")["minimum"] == query("events", "after")["minimum"] == 0
    assert query("ledgers/{ledger_id}", "ledger_id") == {"type": "integer", "minimum": 0, "maximum": id_max}
    assert query("bookies/{name}", "name") == {"type": "string", "minLength": 1, "maxLength": 128}
    for path, most in (("repairs:pause", 86_400), ("bookies/{name}:maintenance", 30 * 86_400)):
        body = paths[f"/api/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        seconds = body["properties"]["seconds"]
        assert (seconds["type"], seconds["minimum"], seconds["maximum"]) == ("number", 1, most)
    (header,) = paths["/api/v1/settings:change"]["post"]["parameters"]
    assert (header["name"], header["in"], header["required"]) == ("If-Match", "header", False)
    assert "ETag" in header["description"]


def test_results_are_what_the_document_says(tmp_path: Path) -> None:
    document = openapi_of(ROUTES)
    with inside(tmp_path, count=4) as cluster:
        client = cluster.connect()
        with client.create_ledger(password=b"p", custom_metadata={"k": b"v"}) as writer:
            writer.append(b"entry")
        with Log.open(client, "orders", password=b"p") as log, log.writer() as appending:
            appending.append(b"one")
            log.subscribe("billing").close()
        view = View(client)
        view.lags.note()
        ClusterAdmin(client).maintenance("bookie-1", 60.0)
        arguments: dict[str, dict[str, Any]] = {
            "bookie": {"name": "bookie-1"},
            "drain_progress": {"name": "bookie-1"},
            "ok_to_stop": {"name": "bookie-1"},
            "ledger": {"ledger_id": writer.ledger_id},
            "log": {"name": "orders"},
        }
        checked = 0
        for each in ROUTES:
            if each.scope is not Scope.READ or each.function.__name__ == "ok_to_remove":
                continue
            schema = document["paths"][each.template]["get"]["responses"]["200"]["content"]["application/json"][
                "schema"
            ]
            found = as_json(each.function(view, **arguments.get(each.function.__name__, {})))
            Draft202012Validator({**schema, "components": document["components"]}).validate(found)
            checked += 1
        assert checked >= 9
        view.close()


@dataclass
class Sample:
    """A sample.

    Attributes:
        number: A number, which
            has two lines.
        names: Names.
    """

    number: int | None
    names: Mapping[str, tuple[bytes, ...]]


def test_types_have_schemas_or_are_refused() -> None:
    components: dict[str, Any] = {}
    assert schema_of(Sample, components) == {"$ref": "#/components/schemas/Sample"}
    properties = components["Sample"]["properties"]
    assert properties["number"] == {
        "anyOf": [{"type": "integer"}, {"type": "null"}],
        "description": "A number, which has two lines.",
    }
    assert properties["names"]["additionalProperties"]["items"]["type"] == "string"
    assert as_json(Sample(None, {"a": (b"\x01",)})) == {"number": None, "names": {"a": ["01"]}}
    with pytest.raises(TypeError, match="is not supported"):
        schema_of(inspect.Parameter, components)
    with pytest.raises(TypeError, match="cannot be sent"):
        as_json(object())


def test_the_document_for_people_lists_each_route() -> None:
    text = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^\| `(\w+ \S+)`( \*)? \| (\w+) \|", text, re.MULTILINE))
    wanted = set()
    for each in (*ROUTES, *OWN_ROUTES):
        path = each.template.removeprefix("/api/v1").replace("{name}", "NAME").replace("{ledger_id}", "ID")
        wanted.add((f"{each.method} {path}", "" if each.cluster else " *", each.scope.name.lower()))
    assert found == wanted
