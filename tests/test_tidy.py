"""The project's own house rules, where no linter has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

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

OF_OTHERS = {
    "_basetemp": "where pytest makes directories, which differs by file",
    "_gateway": "the way to the JVM from a context that may be None",
    "_getOrCreate": "makes the context of a task outside a task",
    "_jdf": "the plan of a query, as the JVM has it",
    "_jsparkSession": "the session in the JVM, to ask for the plans it ran",
    "_localProperties": "what a driver sends with a task, to be set without a driver",
    "_options": "what a builder of sessions was given",
    "_partitionId": "the number of a task, to be set without a driver",
    "_taskAttemptId": "that of its attempt, likewise",
    "_taskContext": "the context of the task that runs, to have none",
}
"""Private names of PySpark and pytest that tests use, each with what for."""

TESTS = [path for path in SOURCES if path.is_relative_to(ROOT / "tests") and path != ROOT / "tests" / "internals.py"]
"""All but the one module that knows private names of the classes that users see."""

ENTRANCES = {ROOT / "src" / name / "__init__.py" for name in ("pybk", "pyspark_pybk")}
"""Modules of which each process uses a part: the public names, and what Spark looks for by its name."""

MAY_BE_MISSING = {"pyarrow", "pyspark", "zstandard"}
"""Packages of extras, which functions that need one import."""

LIBRARY = [path for path in SOURCES if path.is_relative_to(ROOT / "src")]


def nodes_below(root: ast.AST) -> list[ast.AST]:
    """Return what ``ast.walk`` yields, in half the time."""
    found = [root]
    for node in found:
        for value in vars(node).values():
            if value.__class__ is list:
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


def bad_imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of imports that are relative, of the package as a whole, or of pickle."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            if node.level or node.module == "pickle":
                yield node.lineno, "." * node.level + (node.module or "")
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, name.name) for name in node.names if name.name.split(".")[0] in ("pybk", "pickle")
            )


def is_of_missing(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler is one of modules that are missing."""
    return handler.type is not None and ast.unparse(handler.type) in ("ImportError", "ModuleNotFoundError")


def hidden_imports(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and module of imports in functions, except of packages that may be missing."""
    lines = [node.lineno for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    for function in nodes:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not any(function.lineno <= line <= (function.end_lineno or line) for line in lines):
            continue
        below = nodes_below(function)
        tried = {
            each
            for node in below
            if isinstance(node, ast.Try) and any(map(is_of_missing, node.handlers))
            for part in node.body
            for each in nodes_below(part)
        }
        for node in below:
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in tried:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
                yield from ((node.lineno, name) for name in names if name.split(".")[0] not in MAY_BE_MISSING)


def private_uses(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and name of private names that are imported, and of private attributes of other objects.

    Attributes may also be named by a string, as for ``setattr``, or by a keyword of an object that stands for another.
    """
    for node in nodes:
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
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if called == "SimpleNamespace":
        yield from (keyword.arg for keyword in call.keywords if keyword.arg)
    elif called in ("getattr", "hasattr", "setattr", "delattr"):
        strings = [each.value for each in call.args[:2] if isinstance(each, ast.Constant)]
        yield from (each for each in strings if isinstance(each, str))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def raises_kept(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of errors that are raised as they were kept: all callers would share one traceback."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            kept = isinstance(node.exc, ast.Attribute) and not node.exc.attr.startswith("__")
            if kept or "with_traceback" in ast.unparse(node.exc):
                yield node.lineno, ast.unparse(node)


def unfinished(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of notes that something is still to be done."""
    words = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")))
    for found in words.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found.group()


def test_there_are_sources() -> None:
    assert len(LIBRARY) > 10
    assert len(SOURCES) > len(LIBRARY)


def untidy(path: Path, *groups: list[Path]) -> Iterator[tuple[object, str]]:
    """Yield what breaks a rule in a file of some of ``LIBRARY``, ``USERS`` and ``TESTS``, and what to do instead."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes = nodes_below(tree)
    yield from ((found, "import as `from pybk.x import y`, and no pickle") for found in bad_imports(nodes))
    yield from ((found, "finish it or leave it out") for found in unfinished(text))
    yield from ((name, "name a module by what it knows") for name in BANNED_MODULES & {path.stem, path.parent.name})
    if LIBRARY in groups:
        if path not in ENTRANCES:
            yield from (
                (found, "import at the head of the module; for a late import see `pybk.deferral`")
                for found in hidden_imports(nodes)
            )
        yield from ((found, "raise `without_frames` of an error that is kept") for found in raises_kept(nodes))
        if not ast.get_docstring(tree):
            yield 1, "say in a sentence what the module knows"
        defines = any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in nodes)
        if defines and "from __future__ import annotations" not in text:
            yield 1, "begin with `from __future__ import annotations`"
    if USERS in groups:
        yield from ((found, "make what is needed a documented member") for found in private_uses(nodes))
    if TESTS in groups:
        advice = "test what it does; or make the name package-level; or add an accessor to internals.py"
        found = ((line, name) for line, name in private_uses(nodes) if name.split(".")[-1] not in OF_OTHERS)
        yield from ((each, advice) for each in found)
        marks = [
            each for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each).startswith("pytestmark =")
        ]
        yield from ((each.lineno, "put all marks in one list: this replaces the first ones") for each in marks[1:])


def test_sources_are_tidy() -> None:
    groups = [(group, set(group)) for group in (LIBRARY, USERS, TESTS)]
    for path in SOURCES:
        assert not list(untidy(path, *(group for group, paths in groups if path in paths))), path


@pytest.mark.parametrize(
    ("group", "name", "text", "advice"),
    [
        (LIBRARY, "x.py", "x = 1\n", "say in a sentence"),
        (LIBRARY, "x.py", '"""X."""\n\ndef f():\n    pass\n', "annotations"),
        (LIBRARY, "utils.py", '"""X."""\n', "by what it knows"),
        (
            LIBRARY,
            "x.py",
            "'''X.'''\n\nfrom __future__ import annotations\n\n\ndef f():\n    import os\n",
            "at the head",
        ),
        (LIBRARY, "x.py", '"""X."""\n\nif x:\n    raise self.error\n', "without_frames"),
        (LIBRARY, "x.py", '"""X."""\n\nif x:\n    raise y.with_traceback(None)\n', "without_frames"),
        (USERS, "x.py", "manager._backend.close()\n", "documented member"),
        (TESTS, "x.py", "manager._backend.close()\n", "package-level"),
        (TESTS, "x.py", "pytestmark = x\npytestmark = y\n", "in one list"),
    ],
)
def test_what_is_untidy_is_reported(group: list[Path], name: str, text: str, advice: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert [advice in said for _, said in untidy(tmp_path / name, group)] == [True]


def nodes_of(text: str) -> list[ast.AST]:
    return nodes_below(ast.parse(text))


def test_rules_report_files_that_break_them() -> None:
    bad = "from . import x\nimport pybk\nimport pickle\nfrom pickle import loads\nimport pybk.flags as f\n"
    assert [line for line, _ in bad_imports(nodes_of(bad))] == [1, 2, 3, 4, 5]
    assert not list(bad_imports(nodes_of("from pybk.flags import LedgerType\n")))
    late = "def f():\n    import os\n    from pybk.x import y\n    import pyarrow\n"
    late += "    try:\n        import z\n    except ImportError:\n        pass\n"
    late += "    try:\n        import a\n    except ImportError:\n        import b\n"
    late += "    try:\n        import c\n    finally:\n        pass\n"
    assert sorted(hidden_imports(nodes_of(late))) == [(2, "os"), (3, "pybk.x"), (12, "b"), (14, "c")]
    assert list(unfinished("x = 1  # TO" + "DO: y\n")) == [(1, "TO" + "DO")]
    private = "from pybk.x import _y\nself._a\ncls._b\nx._asdict()\nx.__class__\nself._a._b\nmanager._backend.close()\n"
    assert list(private_uses(nodes_of(private))) == [(1, "_y"), (6, "self._a._b"), (7, "manager._backend")]
    named = 'setattr(x, "_y", 1)\nm.setattr("pybk.x._Y", 1)\nSimpleNamespace(_y=1)\n'
    named += 'setattr(x, "y", 1)\nsetattr(x, y, "_z")\n'
    assert list(private_uses(nodes_of(named))) == [(1, "_y"), (2, "pybk.x._Y"), (3, "_y")]
