"""The project's own house rules, where no linter has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

FUNCTION_LINES_MAX = 70
BANNED_MODULES = {"base", "common", "helper", "helpers", "misc", "shared", "tools", "util", "utils"}
SOURCES = sorted(
    path for folder in ("src", "bench", "deploy", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
)
USERS = [
    path
    for folder in ("src/pybk/spark", "src/pybk/admin", "bench", "deploy", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
"""Packages that use pybk as an application does, or nearly so."""

NOT_PRIVATE = {"_asdict", "_fields", "_make", "_replace", "_exit", "_jsc", "_jvm"}
"""Public in spite of their names: those of named tuples, ``os._exit``, and PySpark's one way to the JVM."""

OF_PYSPARK = {
    "_gateway": "the way to the JVM from a context that may be None",
    "_getOrCreate": "makes the context of a task outside a task",
    "_jdf": "the plan of a query, as the JVM has it",
    "_jsparkSession": "the session in the JVM, to ask for the plans it ran",
    "_localProperties": "what a driver sends with a task, to be set without a driver",
    "_options": "what a builder of sessions was given",
    "_taskContext": "the context of the task that runs, to have none",
}
"""Private names of PySpark that tests use, each with what for."""

TESTS = [path for path in SOURCES if path.is_relative_to(ROOT / "tests") and path != ROOT / "tests" / "internals.py"]
"""All but the one module that knows private names of the classes that users see."""

LIBRARY = [path for path in SOURCES if path.is_relative_to(ROOT / "src")]


def long_functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield name, line and length of functions that are too long."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.name, node.lineno, lines


def bad_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of imports that are relative, of the package as a whole, or of pickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level or node.module == "pickle":
                yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, name.name) for name in node.names if name.name.split(".")[0] in ("pybk", "pickle")
            )


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of private names that are imported, and of private attributes of other objects.

    Attributes may also be named by a string, as for ``setattr``, or by a keyword of an object that stands for another.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own and node.attr not in NOT_PRIVATE:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name.name) for name in node.names if is_private(name.name))
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, name) for name in named_in_call(node) if is_private(name.split(".")[-1]))


def named_in_call(call: ast.Call) -> Iterator[str]:
    """Yield attributes that a call names: keywords of a ``SimpleNamespace``, and strings of ``setattr`` and such."""
    called = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if called == "SimpleNamespace":
        yield from (keyword.arg for keyword in call.keywords if keyword.arg)
    elif called in ("getattr", "hasattr", "setattr", "delattr"):
        strings = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
        yield from (each for each in strings if isinstance(each, str))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def unfinished(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of notes that something is still to be done."""
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    for number, line in enumerate(text.splitlines(), 1):
        found = words.search(line)
        if found:
            yield number, found.group()


def test_there_are_sources() -> None:
    assert len(LIBRARY) > 10
    assert len(SOURCES) > len(LIBRARY)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_tidy(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert not list(long_functions(tree)), f"functions have at most {FUNCTION_LINES_MAX} lines"
    assert not list(bad_imports(tree)), "import as `from pybk.x import y`, and no pickle"
    assert not list(unfinished(text)), "finish it or leave it out"
    assert not BANNED_MODULES & {path.stem, path.parent.name}, "name a module by what it knows"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_library_has_docstrings_and_future_annotations(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "say in a sentence what the module knows"
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree)):
        assert "from __future__ import annotations" in text


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_users_of_the_library_keep_to_public_names(path: Path) -> None:
    offenders = list(private_uses(ast.parse(path.read_text(encoding="utf-8"))))
    assert not offenders, "make what is needed a documented member"


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_keep_to_public_and_package_level_names(path: Path) -> None:
    found = private_uses(ast.parse(path.read_text(encoding="utf-8")))
    offenders = [(line, name) for line, name in found if name.split(".")[-1] not in OF_PYSPARK]
    assert not offenders, "test what it does; or make the name package-level; or add an accessor to internals.py"


def test_rules_report_files_that_break_them() -> None:
    long = "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX
    assert list(long_functions(ast.parse(long))) == [("f", 1, FUNCTION_LINES_MAX + 1)]
    assert not list(long_functions(ast.parse(long[: -len("    pass\n")])))
    bad = "from . import x\nimport pybk\nimport pickle\nfrom pickle import loads\nimport pybk.flags as f\n"
    assert [line for line, _ in bad_imports(ast.parse(bad))] == [1, 2, 3, 4, 5]
    assert not list(bad_imports(ast.parse("from pybk.flags import LedgerType\n")))
    assert list(unfinished("x = 1  # TO" + "DO: y\n")) == [(1, "TO" + "DO")]
    private = "from pybk.x import _y\nself._a\ncls._b\nx._asdict()\nx.__class__\nself._a._b\nmanager._backend.close()\n"
    assert list(private_uses(ast.parse(private))) == [(1, "_y"), (6, "self._a._b"), (7, "manager._backend")]
    named = 'setattr(x, "_y", 1)\nm.setattr("pybk.x._Y", 1)\nSimpleNamespace(_y=1)\n'
    named += 'setattr(x, "y", 1)\nsetattr(x, y, "_z")\n'
    assert list(private_uses(ast.parse(named))) == [(1, "_y"), (2, "pybk.x._Y"), (3, "_y")]
