"""``python -m bench.plots FILE...``: draw what benchmarks wrote with ``--json``, a plot for each contest.

A plot has a bar for each contestant: the median of its rounds, and a line from the lowest to the highest. It is an SVG
whose text is text, and whose colours follow the page that it is put into, or else the reader's preference.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import quoteattr

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.report import number

INK: Final = "#24292f"
PALE: Final = "#57606a"
OURS: Final = "#0969da"
OTHERS: Final = "#8c959f"
"""As matplotlib writes them into the file; ``STYLE`` replaces them."""

NAMES: Final = {INK: "ink", PALE: "pale", OURS: "ours", OTHERS: "others"}
STYLE: Final = """<style>
.plot { --ink: var(--color-foreground-primary, #24292f); --pale: var(--color-foreground-secondary, #57606a);
        --ours: var(--color-brand-primary, #0969da); --others: #8c959f; }
@media (prefers-color-scheme: dark) {
.plot { --ink: var(--color-foreground-primary, #d0d7de); --pale: var(--color-foreground-secondary, #8b949e);
        --ours: var(--color-brand-primary, #58a6ff); --others: #6e7681; }
}
</style>
"""
_BAR_INCHES: Final = 0.3
_SETTINGS: Final[Any] = {"svg.fonttype": "none", "svg.hashsalt": "pybk", "font.family": "sans-serif", "font.size": 9}


def draw(title: str, figures: Sequence[Mapping[str, Any]]) -> str:
    """Return the plot of one contest as SVG.

    Args:
        title: What was done.
        figures: The figures of its contestants, as ``bench.contest.Figure`` has them.
    """
    names = [figure["contestant"] for figure in figures]
    medians = [figure["median"] for figure in figures]
    lows = [figure["median"] - min(figure["rounds"]) for figure in figures]
    highs = [max(figure["rounds"]) - figure["median"] for figure in figures]
    colours = [OURS if name.startswith("pybk") else OTHERS for name in names]
    with mpl.rc_context(_SETTINGS):
        plot = Figure(figsize=(7.2, 0.9 + _BAR_INCHES * len(figures)), layout="constrained")
        axes = plot.add_subplot()
        axes.barh(names, medians, color=colours, height=0.62)
        axes.errorbar(medians, names, xerr=[lows, highs], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
        for name, median, high in zip(names, medians, highs, strict=True):
            axes.annotate(
                number(median), (median + high, name), (5, 0), textcoords="offset points", va="center", color=INK
            )
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.set_title(f"{title} ({figures[0]['unit']})", loc="left", color=INK)
        axes.tick_params(colors=PALE, length=0)
        axes.spines[:].set_visible(False)
        axes.set_facecolor("none")
        written = io.StringIO()
        plot.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _with_style(written.getvalue(), title)


def _with_style(svg: str, title: str) -> str:
    """Return an SVG with colours by name, without the head of a file, so that it may stand inside a page."""
    body = svg[svg.index("<svg") :]
    for colour, name in NAMES.items():
        body = body.replace(colour, f"var(--{name})")
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL).replace("*{stroke", ".plot *{stroke")
    head, _, rest = body.partition(">")
    return f'{head} class="plot" role="img" aria-label={quoteattr(title)}>\n{STYLE}{rest.lstrip()}'


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plots", description="Draw what benchmarks wrote with --json."
    )
    parser.add_argument("file", nargs="+", type=Path, help="what a benchmark printed")
    parser.add_argument("--directory", type=Path, help="where plots are written; by default next to each file")
    parsed = parser.parse_args(arguments)
    for file in parsed.file:
        document = json.loads(file.read_text(encoding="utf-8"))
        for contest, figures in groupby(document["figures"], lambda figure: figure["contest"]):
            target = (parsed.directory or file.parent) / f"{file.stem}-{contest}.svg"
            target.write_text(draw(document["titles"][contest], list(figures)), encoding="utf-8")
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
