"""How a rule of the protocol is broken on purpose: the syntax tree of a function with one piece replaced."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tests.mutation.patterns import changed
from tests.simulator.harness import Harness


class Piece(NamedTuple):
    """What is replaced in a function, as patterns of ``tests.mutation.patterns``.

    The function is ``module:Class.function``; the module is one of ``pybk.replication``, or a whole name.
    """

    function: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A rule, and how it is broken; ``first`` is the first seed that tries what the rule is about."""

    name: str
    rule: str
    pieces: tuple[Piece, ...]
    first: int = 0


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put changed copies of functions in the place of the real ones."""
    undo: list[tuple[Any, str, Any]] = []
    try:
        for piece in mutant.pieces:
            owner, name, real, changed = _changed(piece)
            undo.append((owner, name, real))
            setattr(owner, name, changed)
        yield
    finally:
        for owner, name, real in reversed(undo):
            setattr(owner, name, real)


def _changed(piece: Piece) -> tuple[Any, str, Any, Any]:
    module_name, path = piece.function.split(":")
    owner: Any = importlib.import_module(module_name if "." in module_name else f"pybk.replication.{module_name}")
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = inspect.getattr_static(owner, name)
    function: Any = real.fget if isinstance(real, property) else real
    return owner, name, real, changed(function, piece.old, piece.new)


def kills(mutant: Mutant, seed: int) -> str:
    """Run a seed with a mutant, and return how it was noticed, or nothing."""
    with mutated(mutant):
        try:
            Harness(seed).run()
        except Exception as error:  # noqa: BLE001  # a machine that breaks down is noticed as well as a judge that speaks
            return f"{type(error).__name__}: {error}"
    return ""
