"""The directives ``errors`` and ``error-table``: the tree of errors, each with what it means for the operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from docstrings import Rst, known_of
from public_api import FIELDS, fields_in

import pybk
from pybk import PybkError

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_SAYS: Final = "As ``outcome_unknown`` says"


def tree(kind: type[PybkError], depth: int = 0) -> Iterator[tuple[type[PybkError], int]]:
    """Yield an error and all below it, with the depth of each; one with two bases is below the first."""
    yield kind, depth
    for below in sorted(kind.__subclasses__(), key=lambda each: each.__name__):
        if below.__module__ == PybkError.__module__ and below.__bases__[0] is kind:
            yield from tree(below, depth + 1)


def outcome_of(kind: type[PybkError]) -> str:
    """Return whether the operation happened, in words."""
    said = fields_in(kind.__doc__ or "").get("Outcome")
    return said or ("Unknown." if kind.outcome_unknown else "No.")


def retry_of(kind: type[PybkError]) -> str:
    """Return whether the same call may be made again, in words, and that the attribute does not say so."""
    said = fields_in(kind.__doc__ or "").get("Retry")
    if said and said.startswith("Yes") and not kind.retryable:
        return f"{said.rstrip('.')}; ``retryable`` is False."
    return said or ("Yes." if kind.retryable else "No.")


def is_raised(kind: type[PybkError]) -> bool:
    """Return whether the class is more than the base of others."""
    return "Remedy" in fields_in(kind.__doc__ or "")


class Errors(Rst):
    """Document an error and all below it."""

    required_arguments = 1

    def text(self) -> Iterator[str]:
        """Yield a directive of autodoc for each."""
        for kind, _ in tree(getattr(pybk, self.arguments[0].removeprefix("pybk."))):
            yield f".. autoexception:: pybk.{kind.__name__}"
            yield "   :show-inheritance:"
            yield ""


class ErrorTable(Rst):
    """List all errors as a tree, with whether the operation happened and whether to repeat it."""

    def text(self) -> Iterator[str]:
        """Yield a table."""
        known = known_of(self.env.app)
        yield from (".. list-table::", "   :header-rows: 1", "   :class: errors", "")
        yield from _row("error", FIELDS["Outcome"] + "?", FIELDS["Retry"] + "?")
        for kind, depth in tree(PybkError):
            name = f"{'— ' * depth}:py:exc:`~pybk.{kind.__name__}`"
            if not is_raised(kind):
                yield from _row(name, "", "")
                continue
            outcome = _SAYS if "outcome_unknown" in outcome_of(kind) else outcome_of(kind).partition(".")[0]
            yield from _row(name, outcome, known.linked(retry_of(kind), "").rstrip("."))


def _row(*cells: str) -> Iterator[str]:
    for number, cell in enumerate(cells):
        yield f"   {'* -' if number == 0 else '  -'} {cell}".rstrip()


def _fields(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Add to the docstring of an error what its attributes say."""
    if what != "exception" or not issubclass(obj, PybkError) or obj is PybkError:
        return
    found = fields_in("\n".join(lines))
    kept = [i for i, line in enumerate(lines) if line.startswith(tuple(f"{name}: " for name in FIELDS))]
    if not is_raised(obj):
        return
    end = min(kept, default=len(lines))
    made = [f"Outcome: {outcome_of(obj)}", f"Retry: {retry_of(obj)}", f"Remedy: {found['Remedy']}"]
    code = [f":Code in BookKeeper: {obj.code}"] if "code" in vars(obj) else []
    lines[end:] = [*made, *code, ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives to Sphinx."""
    app.add_directive("errors", Errors)
    app.add_directive("error-table", ErrorTable)
    app.connect("autodoc-process-docstring", _fields, priority=300)  # before docstrings makes fields of the lines
    return {"parallel_read_safe": True, "parallel_write_safe": True}
