"""Each guarantee names the tests and rules that hold it, and all of them exist."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.paths import ROOT

TEXT = (ROOT / "docs" / "concepts" / "guarantees.md").read_text(encoding="utf-8")
CLAUSES = re.findall(r"^### (\d+)\. ([^\n]+)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
RULES = [ROOT / "docs" / "design" / name for name in ("replication.md", "ledger_lists.md")]
RULE = re.compile(r"\b[A-Z]{1,2}\d{1,2}\b")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@cache
def names_in(path: str) -> set[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_clauses_are_numbered() -> None:
    assert [int(number) for number, _, _ in CLAUSES] == list(range(1, len(CLAUSES) + 1))
    assert len(CLAUSES) == TEXT.count("### ")


@pytest.mark.parametrize(("number", "title", "text"), CLAUSES, ids=[number for number, _, _ in CLAUSES])
def test_each_clause_says_when_it_holds_and_which_test_holds_it(number: str, title: str, text: str) -> None:
    assert not title.endswith(".")
    assert re.match(r"\n\*\*Holds\*\* (?:always|for|while|once|in|on|if|after)\b", text)
    [held] = re.findall(r"^\*\*Held by:\*\* (.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert re.search(r"`tests/[\w/]+\.py::test_\w+`", held)
    others = [word for word in re.findall(r"`([^`]*)`", held) if not re.fullmatch(r"tests/[\w/]+\.py::test_\w+", word)]
    assert others == [], f"clause {number} names what is no test"


@pytest.mark.parametrize(("path", "name"), NAMED, ids=["::".join(each) for each in NAMED])
def test_tests_that_guarantees_name_exist(path: str, name: str) -> None:
    assert name in names_in(path)


def test_rules_that_guarantees_name_exist() -> None:
    tables = [line for path in RULES for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rules = {rule for line in tables for rule in RULE.findall(line.split("|")[1])}
    prose = re.sub(r"`[^`]*`", "", TEXT)
    assert set(RULE.findall(prose)) <= rules


def test_clauses_that_others_refer_to_exist() -> None:
    numbers = {number for number, _, _ in CLAUSES}
    named = re.findall(r"\bclauses? (\d+)(?: and (\d+))?", TEXT)
    assert named
    assert {number for found in named for number in found if number} <= numbers
