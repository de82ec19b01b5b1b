"""Where a module's syntax tree can be mutated, and how.

A mutation replaces one node by another. It is named by its module, the function, the operator and a number, so the name
does not depend on the text or on line numbers: ``replication.inflight:Adds.confirm/compare.0``.
"""

from __future__ import annotations

import ast
import copy
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

PACKAGE = "pybk"

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),  # codespell:ignore
    ast.NotIn: (ast.In,),  # codespell:ignore
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_UNSWAPPABLE = ("isinstance", "getattr", "setattr", "hasattr")
_UNSEEN_FIELDS = ("annotation", "returns", "decorator_list", "type_comment")


class Mutation(NamedTuple):
    """A node in its slot, and what takes its place.

    Attributes:
        function: Qualified name of the function within its module.
        operator: What kind of change it is.
        number: Which of this operator in this function.
        parent: The node that has the slot.
        field: The slot.
        at: Which element, if the slot is a list.
        old: The node.
        new: Its replacement.
    """

    function: str
    operator: str
    number: int
    parent: ast.AST
    field: str
    at: int | None
    old: ast.AST
    new: ast.AST

    def apply(self) -> None:
        """Put the replacement into the tree."""
        ast.copy_location(self.new, self.old)
        if self.at is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.at] = self.new


class Name(NamedTuple):
    """A mutant's name, taken apart."""

    module: str
    function: str
    operator: str
    number: int

    def __str__(self) -> str:
        return f"{self.module}:{self.function}/{self.operator}.{self.number}"


def parse(name: str) -> Name:
    """Take a mutant's name apart."""
    module, rest = name.split(":")
    function, what = rest.split("/")
    operator, number = what.rsplit(".", 1)
    return Name(module, function, operator, int(number))


def path_of(module: str) -> Path:
    """Return the file of a module of the package, without importing the module."""
    package = find_spec(PACKAGE)
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], *module.split(".")).with_suffix(".py")


def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of a module of the package."""
    return ast.parse(path_of(module).read_bytes())


def mutations(tree: ast.Module) -> list[Mutation]:
    """Return all mutations of a module's functions."""
    return [each for name, function in _functions(tree, "") for each in _of_function(name, function)]


def mutated(name: Name, source: bytes) -> ast.Module:
    """Return the syntax tree of a module with one mutation."""
    tree = ast.parse(source)
    wanted = (name.function, name.operator, name.number)
    found = next((each for each in mutations(tree) if (each.function, each.operator, each.number) == wanted), None)
    if found is None:
        raise LookupError(f"there is no mutation {name}: the function has changed, so draw another one")
    found.apply()
    return ast.fix_missing_locations(tree)


def exists(name: Name) -> bool:
    """Return whether the library still has the place that a mutant changes."""
    wanted = (name.function, name.operator, name.number)
    places = mutations(tree_of(name.module)) if path_of(name.module).exists() else []
    return any((each.function, each.operator, each.number) == wanted for each in places)


def fingerprint(name: Name) -> str:
    """Return a checksum of the function that a mutant is of, to find out whether a result is still about it."""
    functions = dict(_functions(tree_of(name.module), "")) if path_of(name.module).exists() else {}
    return f"{zlib.crc32(ast.dump(functions[name.function]).encode()):08x}" if name.function in functions else ""


def is_same_code(mutation: Mutation, source: bytes, module: str) -> bool:
    """Return whether a mutation compiles to the same code, so that it does not count as a mutant."""
    name = Name(module, mutation.function, mutation.operator, mutation.number)
    return _bare(compile(source, module, "exec")) == _bare(compile(mutated(name, source), module, "exec"))


def _bare(code: CodeType) -> tuple[Any, ...]:
    """Return what a code object does, without its line numbers."""
    constants = tuple(_bare(each) if isinstance(each, CodeType) else (type(each), each) for each in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions of a module and its classes by qualified name; protocols have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name, child
        elif isinstance(child, ast.ClassDef) and not any(ast.unparse(base) == "Protocol" for base in child.bases):
            yield from _functions(child, f"{prefix}{child.name}.")


def _of_function(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Mutation]:
    """Yield the mutations of one function, numbered by operator."""
    numbers: dict[str, int] = {}
    for parent, field, index, node in _slots(function, function):
        for operator, new in _changes(function, parent, node):
            number = numbers.get(operator, 0)
            numbers[operator] = number + 1
            yield Mutation(name, operator, number, parent, field, index, node, new)


def _slots(node: ast.AST, function: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield the nodes below a node, each with its slot, but for what only people read."""
    for field, value in ast.iter_fields(node):
        if field in _UNSEEN_FIELDS:
            continue
        if isinstance(value, ast.AST):
            if not _is_for_people(value):
                yield node, field, None, value
                yield from _slots(value, function)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, ast.AST) and not _is_for_people(each):
                    yield node, field, index, each
                    yield from _slots(each, function)


def _is_for_people(node: ast.AST) -> bool:
    """Return whether a node is a text, a docstring, a log line, or an assertion."""
    if isinstance(node, ast.JoinedStr | ast.Assert | ast.arguments):
        return True
    if isinstance(node, ast.Expr):
        call = node.value
        if isinstance(call, ast.Constant):
            return True
        return isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger.")
    return isinstance(node, ast.If) and "logger.isEnabledFor" in ast.unparse(node.test)


def _changes(function: ast.AST, parent: ast.AST, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may take a node's place, each with the operator's name."""
    if isinstance(node, ast.Compare):
        yield from _comparisons(node)
    elif isinstance(node, ast.BoolOp):
        yield "logic", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and not isinstance(parent, ast.Raise):
        yield from _constants(node)
    elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.USub | ast.Not):
        yield "unary", node.operand
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.stmt):
        yield from _statements(function, parent, node)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "negate", _with(node, test=_negated(node.test))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield "negate", _with(node, ifs=[_negated(node.ifs[0]), *node.ifs[1:]])


def _comparisons(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for at, op in enumerate(node.ops):
        for other in _COMPARISONS[type(op)]:
            yield "compare", _with(node, ops=[*node.ops[:at], other(), *node.ops[at + 1 :]])


def _constants(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int):
        yield "boundary", ast.Constant(node.value + 1)
        yield "boundary", ast.Constant(node.value - 1)


def _calls(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _OPPOSITES:
        yield "opposite", _with(node, func=ast.Name(_OPPOSITES[name], ast.Load()))
    if name in _OPPOSITES or name in _UNSWAPPABLE or any(isinstance(each, ast.Starred) for each in node.args):
        return
    for at in range(len(node.args) - 1):
        swapped = [*node.args[:at], node.args[at + 1], node.args[at], *node.args[at + 2 :]]
        if ast.dump(swapped[at]) != ast.dump(swapped[at + 1]):
            yield "swap", _with(node, args=swapped)


def _statements(function: ast.AST, parent: ast.AST, node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise) or _is_kept(node):
        yield "remove", ast.Pass()
    elif isinstance(node, ast.Return) and parent is not function:
        yield "return", ast.Pass()
    elif isinstance(node, ast.Continue | ast.Break):
        yield "jump", ast.Pass()
        yield "jump", ast.Break() if isinstance(node, ast.Continue) else ast.Continue()


def _is_kept(node: ast.stmt) -> bool:
    """Return whether a statement assigns to something that outlives the function."""
    return isinstance(node, ast.Assign) and not any(isinstance(each, ast.Name | ast.Tuple) for each in node.targets)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """Return a shallow copy of a node with other fields."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
