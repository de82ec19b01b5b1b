"""Loads one module of the package mutated, in this process and, by ``site/sitecustomize.py``, in all that it starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from tests.mutation.operators import PACKAGE, Name, mutated, parse

VARIABLE = "PYBK_MUTANT"


class MutantLoader(SourceFileLoader):
    """Compiles a module from its mutated syntax tree."""

    def __init__(self, fullname: str, path: str, name: Name) -> None:
        super().__init__(fullname, path)
        self._mutant = name

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the mutated module; nothing is read from or written to a cache."""
        tree = mutated(self._mutant, self.get_data(self.path))
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class MutantFinder(MetaPathFinder):
    """Finds the one module that is mutated."""

    def __init__(self, name: Name) -> None:
        self._mutant = name
        self._module = f"{PACKAGE}.{name.module}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = MutantLoader(fullname, spec.origin, self._mutant)
        return spec


def install() -> None:
    """Have the mutant that the environment names loaded, if it names one."""
    name = os.environ.get(VARIABLE)
    if name:
        sys.meta_path.insert(0, MutantFinder(parse(name)))
