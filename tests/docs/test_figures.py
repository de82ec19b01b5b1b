"""The plots of the documentation are those of the figures next to them, and the pages show figures that there are."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bench.report import number
from tests.paths import ROOT

FIGURES = ROOT / "docs" / "figures"
CONTESTS = [
    (file, contest)
    for file in sorted(FIGURES.glob("*.json"))
    for contest in json.loads(file.read_text(encoding="utf-8"))["titles"]
]


def figures_of(file: Path, contest: str) -> list[dict[str, Any]]:
    found = groupby(json.loads(file.read_text(encoding="utf-8"))["figures"], lambda each: each["contest"])
    return next(list(figures) for name, figures in found if name == contest)


@pytest.mark.parametrize(("file", "contest"), CONTESTS, ids=lambda each: getattr(each, "stem", each))
def test_a_plot_has_the_names_and_medians_of_its_figures(file: Path, contest: str) -> None:
    root = ET.fromstring((FIGURES / f"{file.stem}-{contest}.svg").read_text(encoding="utf-8"))
    texts = [each.text for each in root.iter() if each.tag.endswith("text")]
    for figure in figures_of(file, contest):
        assert figure["contestant"] in texts
        assert number(figure["median"]) in texts


def test_each_plot_belongs_to_figures() -> None:
    wanted = {f"{file.stem}-{contest}.svg" for file, contest in CONTESTS}
    assert {file.name for file in FIGURES.glob("*.svg")} == wanted


def test_the_page_shows_all_figures_that_are_kept() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = {
        (name, contest)
        for name, contests in re.findall(r"```\{figures\} (\S+) (.+)", text)
        for contest in contests.split()
    }
    assert shown == {(file.stem, contest) for file, contest in CONTESTS}
