"""What is public, and what docstrings say of it, read from the sources; without Sphinx, so that a test can use it."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Final

SOURCES: Final = Path(__file__).resolve().parents[2] / "src"

MODULES: Final = (
    "pybk",
    "pybk.testing",
    "pybk.pytest_plugin",
    "pybk.admin.http",
    "pybk.admin.metrics",
    "pybk.spark",
    "pybk.adapters.eventsourcing",
    "pybk.adapters.blob_filesystem",
    "pybk.adapters.opentelemetry",
)
"""The modules that users import from; ``__all__`` has the public names of each."""

FIELDS: Final = {
    "Durability": "Durability",
    "Threads": "Threads",
    "Cost": "Cost",
    "Outcome": "Did it happen",
    "Retry": "Retry",
    "Remedy": "What to do",
}
"""What docstrings say in a line of its own that begins with the name, and its label in the reference."""

_FIELD: Final = re.compile(rf"({'|'.join(FIELDS)}): (.*)")
_SECTION: Final = re.compile(r"[A-Z]\w*:")
_ENTRY: Final = re.compile(r" {4}(\w+): (.*)")


def path_of(module: str) -> Path:
    """Return the file of a module of pybk."""
    path = SOURCES.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


def names_of(module: str) -> list[str]:
    """Return the names in ``__all__`` of a public module."""
    for node in tree_of("pybk.public" if module == "pybk" else module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{module} has no __all__")


def homes() -> dict[str, str]:
    """Return the module that each public name of ``pybk`` is defined in."""
    tree = tree_of("pybk.public")
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}
    return {name: module for name, module in found.items() if module.startswith("pybk.")}


def alias_of(name: str) -> tuple[str, str]:
    """Return what a public alias of a type stands for, and its docstring; raises LookupError if it is no alias."""
    tree = tree_of(homes()[name])
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if [ast.unparse(target) for target in targets] == [name] and not isinstance(node.value, ast.Call):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            return ast.unparse(node.value), str(text)  # type: ignore[union-attr, arg-type]
    raise LookupError(f"{name} is not assigned in {homes()[name]}")


def is_alias(name: str) -> bool:
    """Return whether a public name of ``pybk`` is an alias of a type, and neither a class nor a function."""
    try:
        alias_of(name)
    except LookupError:
        return False
    return True


def arguments_in(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument or attribute, in any of its sections."""
    found: dict[str, str] = {}
    name, inside = "", False
    for line in _dedented(docstring):
        if line and not line.startswith(" "):
            inside, name = _SECTION.fullmatch(line) is not None, ""
        elif inside and (entry := _ENTRY.fullmatch(line)):
            name = entry[1]
            found[name] = entry[2]
        elif inside and name and line.strip():
            found[name] += " " + line.strip()
    return found


def fields_in(docstring: str) -> dict[str, str]:
    """Return the lines of a docstring that begin with one of ``FIELDS``, by that name."""
    found: dict[str, str] = {}
    name = ""
    for line in _dedented(docstring):
        if field := _FIELD.fullmatch(line):
            name = field[1]
            found[name] = field[2]
        elif name and line.startswith(" "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def with_fields(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with a field of reST for each line that begins with one of ``FIELDS``."""
    made: list[str] = []
    inside = False
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field:
            if not inside and made and made[-1]:
                made.append("")
            made.append(f":{FIELDS[field[1]]}: {field[2]}")
        else:
            made.append(line)
        inside = field is not None or (inside and line.startswith(" "))
    return made


def _dedented(docstring: str) -> list[str]:
    first, _, rest = docstring.partition("\n")
    return [first.strip(), *textwrap.dedent(rest).splitlines()]
