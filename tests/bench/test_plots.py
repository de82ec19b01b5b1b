"""Plots show what benchmarks measured, and name their colours."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from bench import plots

FIGURES = [
    {"contest": "append", "contestant": "pybk", "unit": "/s", "rounds": [9.0, 10.0, 12.0], "median": 10.0},
    {"contest": "append", "contestant": "a <peer>", "unit": "/s", "rounds": [1234.0], "median": 1234.0},
]


def test_a_plot_has_each_contestant_with_its_median(tmp_path: Path) -> None:
    document = {"titles": {"append": "append & wait"}, "figures": FIGURES}
    (tmp_path / "one.json").write_text(json.dumps(document), encoding="utf-8")
    assert plots.main([str(tmp_path / "one.json")]) == 0
    svg = (tmp_path / "one-append.svg").read_text(encoding="utf-8")
    root = ET.fromstring(svg)
    texts = {each.text for each in root.iter() if each.tag.endswith("text")}
    assert {"pybk", "a <peer>", "10", "1,234", "append & wait (/s)"} <= texts
    assert root.get("aria-label") == "append & wait"
    assert "fill: var(--ours)" in svg
    assert "fill: var(--others)" in svg
    outside = svg.replace(plots.STYLE, "")
    assert not [colour for colour in plots.NAMES if colour in outside]
