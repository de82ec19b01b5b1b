"""The threat model names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.paths import ROOT

MODEL = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", MODEL)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(filter(None, found)) for found in NAMED])
def test_tests_that_the_threat_model_names_exist(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert tests
    assert not name or name in tests


def test_every_promise_of_the_threat_model_names_its_test() -> None:
    rows = re.findall(
        r"^\| (?!holds|secret|-)(.+?) \| (.+?) \|$", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), re.M
    )
    promises = [row for row in rows if "|" not in row[1]]
    assert len(promises) > 15
    assert all("`tests/" in shown for _, shown in promises)
