"""Replaces a piece of a function's syntax tree, found by a pattern, so that layout and comments do not matter.

A pattern is Python: an expression, statements, or ``name=value`` for an argument by name. In it ``...`` as a statement
stands for any statements, and ``_1`` to ``_9`` for any expression; the replacement has them, too.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import re
import textwrap
from typing import Any, NamedTuple

_WILDCARD = re.compile(r"_[1-9]")


class PatternError(LookupError):
    """A pattern does not name exactly one place of a function."""


class _Place(NamedTuple):
    """Where a pattern matches: one node, or ``size`` statements of a list from ``at`` on."""

    parent: ast.AST
    field: str
    at: int | None
    size: int
    bound: dict[str, Any]


def changed(function: Any, old: str, new: str) -> Any:
    """Return a copy of a function in which the one place that matches a pattern is replaced.

    Args:
        function: The function.
        old: The pattern.
        new: What takes its place.

    Raises:
        PatternError: The pattern matches nowhere, or in several places.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    replace_in(tree, old, new, what=function.__qualname__)
    owner = function.__qualname__.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node) == "super()":
            # A function outside of its class has no cell for a super() without arguments.
            node.args = [ast.Name(owner, ast.Load()), ast.Name("self", ast.Load())]
    flags = __future__.annotations.compiler_flag
    code = compile(ast.fix_missing_locations(tree), f"<mutant of {function.__qualname__}>", "exec", flags)
    namespace: dict[str, Any] = {}
    exec(code, inspect.unwrap(function).__globals__, namespace)
    return namespace[function.__name__]


def replace_in(tree: ast.AST, old: str, new: str, *, what: str) -> None:
    """Replace the one place of a tree that matches a pattern.

    Args:
        tree: The tree.
        old: The pattern.
        new: What takes its place.
        what: What the tree is of, for the error.

    Raises:
        PatternError: The pattern matches nowhere, or in several places.
    """
    pattern, replacement = _parse(old), _parse(new)
    if isinstance(pattern, ast.expr) and not isinstance(replacement, ast.expr):
        pattern = [ast.Expr(pattern)]
    if isinstance(pattern, ast.expr):
        places = _expressions(tree, pattern)
    else:
        places = _statements(tree, pattern) or _keywords(tree, pattern)
    if len(places) != 1:
        raise PatternError(f"{what} has {len(places)} places like {old!r}; a mutant needs one: choose another pattern")
    place = places[0]
    if isinstance(pattern, ast.expr):
        assert isinstance(replacement, ast.expr)
        filled: Any = _Fill(place.bound).visit(copy.deepcopy(replacement))
        if place.at is None:
            setattr(place.parent, place.field, filled)
        else:
            getattr(place.parent, place.field)[place.at] = filled
        return
    body: list[ast.stmt] = [ast.Expr(replacement)] if isinstance(replacement, ast.expr) else replacement
    if isinstance(place.parent, ast.keyword):
        assert isinstance(body[0], ast.Assign)
        place.parent.arg, place.parent.value = ast.unparse(body[0].targets[0]), body[0].value
        return
    assert place.at is not None
    statements = _Fill(place.bound).body(copy.deepcopy(body))
    getattr(place.parent, place.field)[place.at : place.at + place.size] = statements


def _parse(text: str) -> ast.expr | list[ast.stmt]:
    """Return an expression, or statements if the text is not an expression."""
    try:
        return ast.parse(textwrap.dedent(text).strip(), mode="eval").body
    except SyntaxError:
        return ast.parse(textwrap.dedent(text)).body


def _expressions(tree: ast.AST, pattern: ast.expr) -> list[_Place]:
    places = []
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            many = isinstance(value, list)
            for index, node in enumerate(value if many else [value]):
                bound: dict[str, Any] = {}
                if isinstance(node, ast.expr) and _matches(node, pattern, bound):
                    places.append(_Place(parent, field, index if many else None, 1, bound))
    return places


def _statements(tree: ast.AST, pattern: list[ast.stmt]) -> list[_Place]:
    places = []
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if not isinstance(value, list):
                continue
            for index in range(len(value) - len(pattern) + 1):
                bound: dict[str, Any] = {}
                if all(_matches(value[index + at], each, bound) for at, each in enumerate(pattern)):
                    places.append(_Place(parent, field, index, len(pattern), bound))
    return places


def _keywords(tree: ast.AST, pattern: list[ast.stmt]) -> list[_Place]:
    """Return the arguments by name that look like an assignment."""
    if len(pattern) > 1 or not isinstance(pattern[0], ast.Assign):
        return []
    name, value = ast.unparse(pattern[0].targets[0]), pattern[0].value
    return [
        _Place(node, "value", None, 1, {})
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == name and _matches(node.value, value, {})
    ]


def _is_rest(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is Ellipsis


def _matches(node: object, pattern: object, bound: dict[str, Any]) -> bool:
    """Return whether a node is what a pattern says; what wildcards stand for is put into ``bound``."""
    if isinstance(pattern, ast.Name) and _WILDCARD.fullmatch(pattern.id) and isinstance(node, ast.expr):
        known = bound.setdefault(pattern.id, node)
        return ast.dump(known) == ast.dump(node)
    if isinstance(pattern, list) and isinstance(node, list):
        if len(pattern) == 1 and _is_rest(pattern[0]):
            bound["..."] = node
            return True
        return len(node) == len(pattern) and all(
            _matches(each, part, bound) for each, part in zip(node, pattern, strict=True)
        )
    if isinstance(pattern, ast.expr_context):
        return True
    if isinstance(pattern, ast.AST) and isinstance(node, ast.AST):
        return type(node) is type(pattern) and all(
            _matches(getattr(node, field, None), getattr(pattern, field, None), bound) for field in pattern._fields
        )
    return type(node) is type(pattern) and node == pattern


class _Fill(ast.NodeTransformer):
    """Puts what the wildcards stood for into a replacement."""

    def __init__(self, bound: dict[str, Any]) -> None:
        self._bound = bound

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for each in statements:
            if _is_rest(each) and "..." in self._bound:
                result += copy.deepcopy(self._bound["..."])
            else:
                result.append(self.visit(each))
        return result

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._bound[node.id]) if node.id in self._bound else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("body", "orelse", "finalbody"):
            value = getattr(node, field, None)
            if isinstance(value, list):
                setattr(node, field, self.body(value))
        return super().generic_visit(node)
