"""The directive ``figures``: what a benchmark measured, as plots and a table, from the file that it wrote."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

FIGURES = Path(__file__).resolve().parents[1] / "figures"


class Figures(SphinxDirective):
    """Show contests of a file in ``docs/figures``.

    The arguments are the file's name without its end, and the contests. Each has a plot, which ``bench.plots`` drew,
    and rows in one table: median, lowest and highest of the rounds, and what was reached of each target.
    """

    required_arguments = 2
    optional_arguments = 100

    def run(self) -> list[nodes.Node]:
        """Return the plots and the table."""
        name, *wanted = self.arguments
        path = FIGURES / f"{name}.json"
        self.env.note_dependency(str(path))
        document = json.loads(path.read_text(encoding="utf-8"))
        contests = {key: list(found) for key, found in groupby(document["figures"], lambda each: each["contest"])}
        missing = [each for each in wanted if each not in contests]
        if missing:
            raise self.error(f"{path.name} has no {', '.join(missing)}; it has {', '.join(contests)}")
        found: list[nodes.Node] = []
        for contest in wanted:
            svg = (FIGURES / f"{name}-{contest}.svg").read_text(encoding="utf-8")
            found.append(nodes.raw("", f'<figure class="plot-of-figures">{svg}</figure>', format="html"))
        rows = [row for contest in wanted for row in _rows(document["titles"][contest], contests[contest])]
        return [*found, *self.parse_text_to_nodes("\n".join([_HEAD, *rows]))]


_HEAD = "| work | by | median | lowest to highest | target | reached |\n|---|---|---|---|---|---|"


def _rows(title: str, figures: list[dict[str, Any]]) -> list[str]:
    rows = []
    for figure in figures:
        low, high = min(figure["rounds"]), max(figure["rounds"])
        targets = "<br>".join(text.replace("<", "&lt;") for text, _ in figure["targets"])
        reached = "<br>".join(f"{ratio:.2f}" + ("" if ratio >= 1 else ", **missed**") for _, ratio in figure["targets"])
        unit = figure["unit"]
        rows.append(
            f"| {title} | {figure['contestant']} | {_number(figure['median'])} {unit} | "
            f"{_number(low)} to {_number(high)} | {targets} | {reached} |"
        )
        title = ""
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive to Sphinx."""
    app.add_directive("figures", Figures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
