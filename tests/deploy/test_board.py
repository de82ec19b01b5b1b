"""The Grafana board: its file is what its script makes, and what it shows exists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from deploy.grafana.board import COLUMNS, board, text
from tests.deploy.expressions import labels_of, mistakes
from tests.paths import ROOT

BOARD = board()
PANELS: list[dict[str, Any]] = BOARD["panels"]
SHOWN = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]
VARIABLES = {each["name"]: each for each in BOARD["templating"]["list"]}


def test_the_file_is_what_the_script_makes() -> None:
    assert (ROOT / "deploy/grafana/pybk.json").read_text() == text(), "run `python deploy/grafana/board.py`"
    assert json.loads(text()) == BOARD


@pytest.mark.parametrize(("title", "target"), SHOWN, ids=[f"{title} {each['refId']}" for title, each in SHOWN])
def test_a_panel_shows_metrics_that_exist(title: str, target: dict[str, Any]) -> None:
    expression = target["expr"]
    assert not mistakes(expression.replace("$__rate_interval", "5m"))
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")}
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped, "labels that no series has"
    assert set(re.findall(r"\$(\w+)", expression)) <= {*VARIABLES, "__rate_interval"}


def test_variables_take_their_values_from_labels_that_exist() -> None:
    assert set(VARIABLES) == {"datasource", "cluster", "bookie", "ledger_type"}
    for name in ("cluster", "bookie", "ledger_type"):
        query = VARIABLES[name]["query"]["query"]
        found = re.fullmatch(r"label_values\((\w+)((?:\{.*\})?), (\w+)\)", query)
        assert found, query
        metric, conditions, label = found.groups()
        assert not mistakes(metric + conditions)
        assert label in {*labels_of()[metric], "cluster"}


def test_panels_stand_side_by_side_and_none_covers_another() -> None:
    cells = [
        (x, y)
        for panel in PANELS
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == COLUMNS - 1
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
